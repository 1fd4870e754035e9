"""The names of `torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook`, on thinwire's engine.

What differs from torch's: any number of buckets, on any backend; compression may begin at step 0; a zero,
an inf or a NaN does no lasting harm; what is remembered is named by parameter, so other bucket sizes and a
resumed run find it again. `p_memory_dict` stays empty: P is not needed from one step to the next.
"""

# DDP inspects a hook's annotations and refuses strings: no `from __future__ import annotations` here.

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from thinwire.ddp_comm_hooks._run import bridge_of
from thinwire.errors import OptionError, UnavailableError
from thinwire.programs.allreduce import Exact
from thinwire.programs.memory import RESIDUAL, Memory, Place
from thinwire.programs.powersgd import Parts, PowerSGD
from thinwire.programs.program import Bucket

__all__ = ["PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"]

logger = logging.getLogger(__name__)


class PowerSGDState:
    """Options and memory of the PowerSGD hooks.

    Which to tune, and in which order, is told by `thinwire.PowerSGD`, the same algorithm for `attach`.

    Args:
        process_group: Over which to average; None: the DDP model's own.
        matrix_approximation_rank: Columns kept of each matrix.
        start_powerSGD_iter: Steps with the exact mean before compression begins; 0 is fine.
        min_compression_rate: A matrix that would shrink by less travels as it is.
        use_error_feedback: Add what was not sent to the next step's gradient.
        warm_start: Begin with the last step's Q.
        orthogonalization_epsilon: Accepted and not needed: columns of zeros are no problem here.
        random_seed: Draws the first Q, as torch's does.
        compression_stats_logging_frequency: Steps between two lines of statistics in the log.
        batch_tensors_with_same_shape: Decides the order in which Q is drawn, as in torch; same-shaped factors
            are always made orthonormal together.

    Example::

        state = PowerSGDState(process_group=None, matrix_approximation_rank=4, start_powerSGD_iter=100)
        ddp.register_comm_hook(state, powerSGD_hook)
    """

    __slots__ = [  # noqa: RUF023 - torch's order, and so that of a saved state
        "process_group",
        "matrix_approximation_rank",
        "start_powerSGD_iter",
        "min_compression_rate",
        "orthogonalization_epsilon",
        "use_error_feedback",
        "warm_start",
        "batch_tensors_with_same_shape",
        "rng",
        "error_dict",
        "p_memory_dict",
        "q_memory_dict",
        "iter",
        "total_numel_before_compression",
        "total_numel_after_compression",
        "compression_stats_logging_frequency",
        "next_stats_report",
    ]

    def __init__(
        self,
        process_group: Any,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,  # noqa: N803 - torch's name
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
    ) -> None:
        if start_powerSGD_iter < 0:
            raise OptionError(
                f"start_powerSGD_iter={start_powerSGD_iter} must not be negative: 0 starts at once"
            )
        self.process_group = process_group
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.min_compression_rate = min_compression_rate
        self.orthogonalization_epsilon = orthogonalization_epsilon
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.batch_tensors_with_same_shape = batch_tensors_with_same_shape
        self.rng = _numpy_generator(random_seed)
        self.error_dict: dict[str, torch.Tensor] = {}
        self.p_memory_dict: dict[str, torch.Tensor] = {}
        self.q_memory_dict: dict[str, torch.Tensor] = {}
        self.iter = 0
        self.total_numel_before_compression = 0
        self.total_numel_after_compression = 0
        self.compression_stats_logging_frequency = max(1, compression_stats_logging_frequency)
        self.next_stats_report = 0
        program(self, flatten=False)  # raises on what it cannot take
        settings = {name: getattr(self, name) for name in self.__slots__[1:8]}
        logger.info("PowerSGD config: %s; random_seed = %s", settings, random_seed)

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the process group, which cannot be saved."""
        logger.warning("NOTE: Process group is not serializable and excluded from a saved state.")
        return {name: getattr(self, name) for name in self.__slots__ if name != "process_group"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """What was saved, over the DDP model's own group until another is set."""
        logger.warning(
            "NOTE: Process group will be set to a default group. Set `process_group` of the loaded state if a"
            " different group is desired."
        )
        self.process_group = None
        for name, value in state.items():
            setattr(self, name, value)

    def maybe_increase_iter(self, bucket: dist.GradBucket) -> None:
        """Count a step when its last bucket is handed over."""
        if bucket.is_last():
            self.iter += 1
            if self.iter == self.start_powerSGD_iter:
                logger.info("Start to apply PowerSGD after %s iterations.", self.iter)

    def compression_stats(self) -> tuple[float, int, int]:
        """(rate, numbers before compression, numbers after), over all compressed steps so far."""
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return before / after if after > 0 else 0, before, after


def powerSGD_hook(  # noqa: N802 - torch's name
    state: PowerSGDState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average gradients as products of thin matrices, one pair for each parameter.

    `thinwire.PowerSGD` explains the algorithm and its options.

    Example::

        ddp.register_comm_hook(PowerSGDState(None, matrix_approximation_rank=4), powerSGD_hook)
    """
    return _run(state, bucket, flatten=False)


def batched_powerSGD_hook(  # noqa: N802 - torch's name
    state: PowerSGDState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average gradients as one product of thin matrices for a whole bucket: faster, and far less accurate.

    Example::

        ddp.register_comm_hook(PowerSGDState(None), batched_powerSGD_hook)
    """
    return _run(state, bucket, flatten=True)


def _run(
    state: PowerSGDState, bucket: dist.GradBucket, *, flatten: bool
) -> torch.futures.Future[torch.Tensor]:
    compressing = state.iter >= state.start_powerSGD_iter
    undo = _undo(state) if bucket.index() == 0 else None
    if compressing:
        _count(state, bucket, flatten=flatten)
    state.maybe_increase_iter(bucket)
    chosen = program(state, flatten=flatten) if compressing else Exact()
    bridge = bridge_of(chosen, state.process_group, bucket)
    memory = bridge.memories.setdefault(id(state), StateMemory(state))  # which keeps the state, and its id
    return bridge.run(chosen, bucket, memory, undo=undo)


def _undo(state: PowerSGDState) -> Callable[[], None]:
    """What brings back the counts of now."""
    counts = ("iter", "total_numel_before_compression", "total_numel_after_compression", "next_stats_report")
    before, drawn = {name: getattr(state, name) for name in counts}, state.rng.get_state()

    def undo() -> None:
        for name, value in before.items():
            setattr(state, name, value)
        state.rng.set_state(drawn)

    return undo


def program(state: PowerSGDState, *, flatten: bool) -> "TorchPowerSGD":
    """The program that a state describes."""
    return TorchPowerSGD(
        rank=state.matrix_approximation_rank,
        min_compression=state.min_compression_rate,
        warm_start=state.warm_start,
        error_feedback=state.use_error_feedback,
        flatten=flatten,
        state=state,
    )


@dataclass(frozen=True, kw_only=True)
class TorchPowerSGD(PowerSGD):
    """PowerSGD that draws its Q as torch does, so that runs can be compared."""

    state: PowerSGDState = field(repr=False, compare=False)

    def _starts(self, groups: list[Parts], bucket: Bucket, memory: Memory) -> list[torch.Tensor]:
        """One seed for each bucket that needs one; then matrices in order, column after column."""
        kept = self.state.q_memory_dict
        known = [[kept.get(f"{part.name} {part.key}") for part in group] for group in groups]
        if self.warm_start and not any(q is None for group in known for q in group):
            return [torch.stack([q for q in group if q is not None]) for group in known]
        together = self.state.batch_tensors_with_same_shape
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.state.rng.randint(1_000_000_000))
            drawn = [_draw(group, bucket.buffer.dtype, together=together) for group in groups]
        return [qs.to(bucket.buffer) for qs in drawn]


def _draw(group: Parts, dtype: torch.dtype, *, together: bool) -> torch.Tensor:
    count, columns, rank = len(group), group[0].columns, group[0].rank
    if together:
        drawn = torch.randn(count, columns, rank, dtype=dtype)
    else:
        drawn = torch.cat([torch.randn(1, columns, rank, dtype=dtype) for _ in range(count)])
    return drawn.mT.contiguous()


class StateMemory(Memory):
    """A program's memory within the state's own dictionaries, by parameter name."""

    def __init__(self, state: PowerSGDState) -> None:
        super().__init__()
        self._state = state

    def find(self, place: Place) -> torch.Tensor | None:
        """Residuals in `error_dict`, factors in `q_memory_dict`."""
        kept, key = self._where(place)
        return kept.get(key)

    def keep(self, place: Place, tensor: torch.Tensor) -> None:
        """As they are found."""
        kept, key = self._where(place)
        kept[key] = tensor

    def residuals(self) -> list[torch.Tensor]:
        """All of `error_dict`."""
        return list(self._state.error_dict.values())

    def _where(self, place: Place) -> tuple[dict[str, torch.Tensor], str]:
        name, key = place
        state = self._state
        return (state.error_dict, name) if key == RESIDUAL else (state.q_memory_dict, f"{name} {key}")


def _count(state: PowerSGDState, bucket: dist.GradBucket, *, flatten: bool) -> None:
    """Keep the books, and log them when it is time."""
    chosen, length = program(state, flatten=flatten), bucket.buffer().numel()
    shapes = [torch.Size((length,))] if flatten else [gradient.shape for gradient in bucket.gradients()]
    state.total_numel_before_compression += length
    state.total_numel_after_compression += sum(chosen.numbers_sent(shape) for shape in shapes)
    if bucket.is_last() and state.iter >= state.next_stats_report:
        rate, before, after = state.compression_stats()
        logger.info(
            "Compression stats: iter %s, total before compression %s, total after compression %s, rate %s",
            state.iter,
            before,
            after,
            rate,
        )
        state.next_stats_report = state.iter + state.compression_stats_logging_frequency


def _numpy_generator(seed: int) -> Any:
    try:
        import numpy
    except ModuleNotFoundError as error:
        raise UnavailableError(
            "PowerSGDState draws as torch's does, with numpy: pip install numpy"
        ) from error
    return numpy.random.RandomState(seed)
