"""Drop-in replacement for `torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook`, on thinwire's engine.

PowerSGD approximates each gradient matrix by the product of two thin ones, P and Q, and averages those
(https://arxiv.org/abs/1905.13727). The error of the product is kept as a residual and added to the next
step's gradient. The first `start_powerSGD_iter` steps exchange exact gradients. Vectors are always exact.

The hook takes two collectives per bucket. All ranks average P, orthonormalise it, and average Q. The engine
issues them in a static order, so any number of buckets can be in flight.

For new code, `thinwire.attach(ddp, thinwire.PowerSGD(rank=4))` is the same algorithm with byte counts,
audits and a `state_dict` for every rank. This module is for code that has torch's hook already.

Differences from torch:

- Any number of buckets works, on any backend. torch's hook aborts or hangs on Gloo with more than one.
- Compression may begin at step 0. torch needs `start_powerSGD_iter` of at least 2.
- A column of zeros, an inf or a NaN does no lasting harm. In torch each of them stays in Q or in the
  residual.
- Residuals and factors are kept by parameter name, so they survive other bucket sizes and resuming.
- `p_memory_dict` stays empty, because P is not needed from one step to the next.
- `batched_powerSGD_hook` runs. torch's fails an assertion on every call.

A run that is resumed in a new DDP has the losses of the uninterrupted run. torch's differ from the fourth
digit on, because torch keeps errors and Q by bucket. A new DDP's first buckets have another order, so errors
are added to the wrong parameters. Save every rank's own state. Loading rank 0's on all ranks, as in torch's
example, loses the residuals of the other ranks. torch then also adds a residual to parameters that are not
compressed, such as biases, which thinwire leaves exact.

Performance:
    A matrix of n rows and m columns sends rank * (n + m) numbers instead of n * m. `batched_powerSGD_hook`
    treats a whole bucket as one square matrix. Products are fewer and larger, but far less accurate. P, Q and
    their product take about 3 * rank multiplications for each number of the gradient.

Safety:
    A step with a non-finite mean is rolled back on every rank. Residuals, factors, counts and the random
    state are restored, and all gradients are NaN, so that a GradScaler skips the step on every rank. A
    pickled state loads under `torch.load`'s default, `weights_only=True`.
"""

# DDP inspects a hook's annotations and rejects strings: no `from __future__ import annotations` here.

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from thinwire.ddp_comm_hooks._hook import for_ddp, run_of
from thinwire.engine.foreach import stack_of
from thinwire.errors import OptionError, UnavailableError
from thinwire.models.ddp.model import check_bucket, thinwire_hook
from thinwire.programs.allreduce import Exact
from thinwire.programs.lowrank import MatrixGroup
from thinwire.programs.memory import RESIDUAL, Memory, Place
from thinwire.programs.powersgd import PowerSGD
from thinwire.programs.program import Bucket, Programs
from thinwire.step.runner import AttachedRun, Choice

__all__ = ["PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"]

logger = logging.getLogger(__name__)

_memories: "weakref.WeakKeyDictionary[AttachedRun, dict[int, StateMemory]]" = weakref.WeakKeyDictionary()


class PowerSGDState:
    """Options and memory of the PowerSGD hooks.

    `thinwire.PowerSGD`, the same algorithm for `attach`, explains which options to tune in which order.

    Args:
        process_group: Group to average over. None is the DDP model's own. An unpickled state has the default
            group, as in torch.
        matrix_approximation_rank: Columns kept of each matrix.
        start_powerSGD_iter: Steps with the exact mean before compression begins. 0 is allowed.
        min_compression_rate: Matrices that would shrink by less are sent uncompressed.
        use_error_feedback: Add the residual to the next step's gradient.
        warm_start: Begin with the last step's Q.
        orthogonalization_epsilon: Ignored. Columns of zeros need no epsilon here.
        random_seed: Seed of the first Q, as in torch.
        compression_stats_logging_frequency: Steps between two lines of statistics in the log.
        batch_tensors_with_same_shape: Order in which Q is drawn, as in torch. Factors of the same shape are
            always orthonormalised together.

    Raises:
        OptionError: If an option is out of range.
        UnavailableError: If numpy is not installed.

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
        program(self, flatten=False)  # validates the options
        settings = {name: getattr(self, name) for name in self.__slots__[1:8]}
        logger.info("PowerSGD config: %s; random_seed = %s", settings, random_seed)

    def __getstate__(self) -> dict[str, Any]:
        """Return all slots except the process group, as tensors and values that `torch.load` accepts."""
        logger.warning("NOTE: Process group is not serializable and excluded from a saved state.")
        slots = {name: getattr(self, name) for name in self.__slots__ if name != "process_group"}
        kind, keys, *position = self.rng.get_state()
        return {**slots, "rng": (kind, keys.tolist(), *position)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a saved state with the default group, or, if there is none, the DDP model's own."""
        logger.warning(
            "NOTE: Process group will be set to a default group (i.e. the world size). If a different group"
            " is desired, please set `self.process_group` after PowerSGD state is loaded."
        )
        self.process_group = dist.group.WORLD
        for name, value in state.items():
            setattr(self, name, value)
        self.rng = _numpy_generator(0)
        self.rng.set_state(state["rng"])

    def maybe_increase_iter(self, bucket: dist.GradBucket) -> None:
        """Count a step when its last bucket arrives.

        Args:
            bucket: Bucket that DDP passed to the hook.
        """
        if bucket.is_last():
            self.iter += 1
            if self.iter == self.start_powerSGD_iter:
                logger.info("Start to apply PowerSGD after %s iterations.", self.iter)

    def compression_stats(self) -> tuple[float, int, int]:
        """Return (rate, numbers before compression, numbers after) over all compressed steps so far."""
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return before / after if after > 0 else 0, before, after


torch.serialization.add_safe_globals([PowerSGDState])  # so that torch.load accepts a saved state by default


@for_ddp
def powerSGD_hook(  # noqa: N802 - torch's name
    state: PowerSGDState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average gradients as products of thin matrices, one pair for each parameter.

    `thinwire.PowerSGD` explains the algorithm and its options.

    Args:
        state: Options and memory.
        bucket: Gradients, passed by DDP.

    Returns:
        A future of the averaged gradients.

    Example::

        ddp.register_comm_hook(PowerSGDState(None, matrix_approximation_rank=4), powerSGD_hook)
    """
    return _run(state, bucket, flatten=False)


@for_ddp
def batched_powerSGD_hook(  # noqa: N802 - torch's name
    state: PowerSGDState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a whole bucket as one product of thin matrices, which is faster and far less accurate.

    Arguments and return value are those of `powerSGD_hook`.

    Example::

        ddp.register_comm_hook(PowerSGDState(None), batched_powerSGD_hook)
    """
    return _run(state, bucket, flatten=True)


def _run(
    state: PowerSGDState, bucket: dist.GradBucket, *, flatten: bool
) -> torch.futures.Future[torch.Tensor]:
    check_bucket(bucket)
    compressing = state.iter >= state.start_powerSGD_iter
    undo = _undo(state) if bucket.index() == 0 else None
    if compressing:
        _count(state, bucket, flatten=flatten)
    state.maybe_increase_iter(bucket)
    chosen = program(state, flatten=flatten) if compressing else Exact()
    run = run_of(chosen, state.process_group, bucket)
    memories = _memories.setdefault(run, {})
    memory = memories.setdefault(id(state), StateMemory(state))  # it keeps the state alive, and so its id
    return thinwire_hook(run, bucket, Choice(Programs(chosen), memory, undo))


def _undo(state: PowerSGDState) -> Callable[[], None]:
    """Return a function that restores the current counts and random state."""
    counts = ("iter", "total_numel_before_compression", "total_numel_after_compression", "next_stats_report")
    before, drawn = {name: getattr(state, name) for name in counts}, state.rng.get_state()

    def undo() -> None:
        for name, value in before.items():
            setattr(state, name, value)
        state.rng.set_state(drawn)

    return undo


def program(state: PowerSGDState, *, flatten: bool) -> "TorchPowerSGD":
    """Return the program that a state describes."""
    return TorchPowerSGD(
        rank=state.matrix_approximation_rank,
        min_compression=state.min_compression_rate,
        warm_start=state.warm_start,
        error_feedback=state.use_error_feedback,
        flatten=flatten,
        warmup=0,
        state=state,
    )


@dataclass(frozen=True, kw_only=True, repr=False)
class TorchPowerSGD(PowerSGD):
    """A PowerSGD that draws Q as torch does, so that runs can be compared. It compresses on one rank too."""

    exact_alone = False

    state: PowerSGDState = field(repr=False, compare=False)

    def _first_qs(self, groups: list[MatrixGroup], bucket: Bucket, memory: Memory) -> list[torch.Tensor]:
        """Return each group's Q, either kept or drawn in torch's order from one seed per bucket."""
        kept = self.state.q_memory_dict
        known = [[kept.get(f"{part.name} {part.key}") for part in group] for group in groups]
        dtype = torch.promote_types(bucket.buffer.dtype, torch.float32)
        if self.warm_start and not any(q is None for group in known for q in group):
            return [stack_of([q.to(dtype) for q in group if q is not None]) for group in known]
        together = self.state.batch_tensors_with_same_shape
        # torch seeds the global generator for a moment. On the wire thread that would change the training
        # thread's random numbers at the same time, such as a dropout mask that is being recomputed.
        generator = torch.Generator().manual_seed(self.state.rng.randint(1_000_000_000))
        drawn = [_draw(group, bucket.buffer.dtype, generator, together=together) for group in groups]
        return [qs.to(bucket.buffer.device, dtype) for qs in drawn]


def _draw(
    group: MatrixGroup, dtype: torch.dtype, generator: torch.Generator, *, together: bool
) -> torch.Tensor:
    """Draw the Q of a group on the CPU, as torch does for any device."""
    rows, columns, rank = [len(group)] if together else [1] * len(group), group[0].columns, group[0].rank
    drawn = [torch.randn(n, columns, rank, dtype=dtype, device="cpu", generator=generator) for n in rows]
    return torch.cat(drawn).mT.contiguous()


class StateMemory(Memory):
    """A program's memory, stored in the dictionaries of a PowerSGDState by parameter name."""

    def __init__(self, state: PowerSGDState) -> None:
        super().__init__()
        self._state = state

    def find(self, place: Place) -> torch.Tensor | None:
        """Return a residual from `error_dict` or a factor from `q_memory_dict`, or None."""
        kept, key = self._where(place)
        return kept.get(key)

    def keep(self, place: Place, tensor: torch.Tensor) -> None:
        """Store a tensor in the dictionary that `find` reads."""
        kept, key = self._where(place)
        kept[key] = tensor

    def residuals(self) -> list[torch.Tensor]:
        """Return all tensors of `error_dict`."""
        return list(self._state.error_dict.values())

    def _where(self, place: Place) -> tuple[dict[str, torch.Tensor], str]:
        name, key = place
        state = self._state
        return (state.error_dict, name) if key == RESIDUAL else (state.q_memory_dict, f"{name} {key}")


def _count(state: PowerSGDState, bucket: dist.GradBucket, *, flatten: bool) -> None:
    """Update the compression statistics, and log them when they are due."""
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
