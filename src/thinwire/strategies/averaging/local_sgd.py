"""Local SGD. Ranks train locally, and models are averaged every `period` steps."""

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.codecs.checks import check_whole
from thinwire.strategies.averaging.policy import Average, Averaging


@dataclass(frozen=True, repr=False)
class LocalSGD(Averaging):
    """Local training, with all parameters set to their mean over ranks after every `period` steps.

    This divides the bytes by the period, because the model is sent once in `period` steps instead of its
    gradients in each. With `warmup_steps` it is post-local SGD. To compress the exchange, use `DiLoCo`, which
    exchanges changes of the model.

    Args:
        period: Steps from one average to the next, counted from the end of the warm-up.
        warmup_steps: Steps at the start in which all gradients are exchanged. This option and those below are
            common to all averaged models, and described in `Averaging`.
        within: Ranks whose gradients are averaged in every step after the warm-up.
        gradients: The program for gradients in steps that exchange them.
        buffers: How buffers are treated when models are averaged: `"mean"`, `"rank0"` or `"local"`.
        optimizer_state: How the optimizer's state is treated then: `"local"`, `"mean"` or `"reset"`.

    Raises:
        OptionError: An option has a wrong type or value.

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
        """Return an average of the whole model among all ranks after each multiple of the period."""
        return [Average()] if step % self.period == 0 else []
