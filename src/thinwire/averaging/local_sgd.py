"""Train apart, and average the models every so many steps."""

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.averaging.policy import Average, Averaging, check_whole


@dataclass(frozen=True)
class LocalSGD(Averaging):
    """Every rank trains on its own, and after every `period` steps all parameters become their mean.

    Bytes fall by the period: the model travels once in that many steps, instead of its gradients in each.
    With `warmup_steps` it is post-local SGD. To compress averages see `DiLoCo`, which sends what has changed.

    Args:
        period: Steps from one average to the next, counted from the end of the warm-up.

    Lin, Stich, Patel, Jaggi: Don't Use Large Mini-Batches, Use Local SGD, https://arxiv.org/abs/1808.07217.

    Example::

        wire = thinwire.attach(ddp, thinwire.LocalSGD(period=8, warmup_steps=500), optimizer=optimizer)
        ...  # train as before
        wire.finalize()
    """

    period: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("period", self.period, 1, "steps from one average to the next")

    def due(self, step: int) -> Sequence[Average]:
        """Everything, among everybody, at each multiple of the period."""
        return [Average()] if step % self.period == 0 else []
