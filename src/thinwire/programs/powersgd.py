r"""PowerSGD: gradients as products of two thin matrices, found by one step of subspace iteration.

For each gradient matrix M (n x m), with Q (m x r) left from the step before:

    Q = orthonormal basis of Q
    P = mean over ranks of M Q        first all-reduce, n r numbers
    P = orthonormal basis of P
    Q = mean over ranks of M^T P      second all-reduce, m r numbers
    gradient = P Q^T

The residual M - P Q^T is added to the next step's gradient (error feedback). In the first steps, gradients
change fastest and Q is not yet a good basis. These steps send 4-bit integers instead. Q follows the mean
gradient, which costs no bytes. All ranks compute the same bits of P Q^T, even on different kinds of hosts and
with or without native code. See `reproducible.py`.

Vogels, Karimireddy, Jaggi: PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization,
https://arxiv.org/abs/1905.13727.
"""

import math
import zlib
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

from thinwire.codecs.checks import check_whole
from thinwire.codecs.draws import random_floats
from thinwire.codecs.quantize import Quantize
from thinwire.engine.foreach import stack_of
from thinwire.engine.ops import AllReduce, Collectives
from thinwire.engine.pack import pack, unpack
from thinwire.errors import OptionError
from thinwire.programs.error_feedback import ErrorFeedback
from thinwire.programs.leftovers import add_residuals
from thinwire.programs.lowrank import Averages, LowRankGradient, MatrixGroup, Passes, orthonormal
from thinwire.programs.memory import RESIDUAL, Memory
from thinwire.programs.program import Bucket, Outcome, Program, is_alone, unchanged
from thinwire.programs.stacked import StackedPasses
from thinwire.programs.twoshot import TwoShot

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_INT8 = TwoShot(Quantize(bits=8, block=64))
"""The exchange of 8-bit factors."""
_WARMUP_STEPS = 8
"""Steps of the default warm-up (docs/benchmarks.md, from `thinwire bench`)."""
_INT4 = TwoShot(Quantize(bits=4, block=64))
"""The exchange of gradients in the warm-up, a seventh of the exact bytes."""


@dataclass(frozen=True, kw_only=True, repr=False)
class PowerSGD(Program):
    """Low-rank gradients: bytes fall from n m to (n + m) rank for each n x m matrix.

    Tuning. Start with `PowerSGD(rank=16, factor_dtype="int8")`. It sends as many bytes as rank 4 with float32
    factors, and has a third of its gap to plain DDP's loss (docs/benchmarks.md). If steps still wait for the
    link, halve the rank. If they are bound by computing, use bf16 factors and half the rank, since work grows
    with the rank. If the loss falls behind, double the rank. Leave `warm_start` and `error_feedback` on,
    because the same rank is far less accurate without them. If `thinwire bench` shows that a step is bound by
    computing rather than by the link, compression cannot help.

    Args:
        rank: Columns kept of each matrix. Bytes and work grow with it. 1 to 4 for most models, up to 32 for
            large language models.
        min_compression: A matrix that would shrink by less than this factor is sent uncompressed, together
            with biases and other vectors.
        warm_start: Begin each step's iteration with the last step's Q, which makes one iteration enough.
        error_feedback: Add the residual to the next step's gradient. Costs one copy of the gradients.
        residual: "mean" keeps this rank's gradient minus the averaged result. "sent" keeps it minus this
            rank's own contribution. The average over ranks, and therefore training, is the same except for
            rounding. "mean" also compensates the rounding of the sum, and "sent" stays small.
        factor_dtype: "int8" sends factors as 8-bit integers with a scale for every 64 of them, a quarter of
            float32's bytes. "bf16" halves all bytes. Error feedback compensates the rounding of both. "fp16"
            rounds less than bf16, but if a factor exceeds 65504, the bucket's gradient is NaN, as after any
            overflow. None is the dtype of the gradients.
        flatten: Treat the whole bucket as one square matrix. Operations are fewer and larger, but the
            structure that makes gradients low-rank is destroyed. Only worth trying with rank=1.
        seed: Seed of the first Q.
        warmup: Steps at the start of training that send 4-bit integers, a seventh of the exact bytes. 0 sends
            low-rank gradients from the first step. By default 8. A wire that swaps to PowerSGD after that
            many steps has no warm-up.

    Raises:
        OptionError: An option has the wrong type or is out of range.

    Example::

        wire = thinwire.attach(ddp, thinwire.PowerSGD(rank=4, factor_dtype="bf16"))
    """

    tracks_error = False
    exact_alone = True

    rank: int = 4
    min_compression: float = 2.0
    warm_start: bool = True
    error_feedback: bool = True
    residual: Literal["mean", "sent"] = "mean"
    factor_dtype: Literal["int8", "bf16", "fp16"] | None = None
    flatten: bool = False
    seed: int = 0
    warmup: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or self.rank < 1:
            raise OptionError(f"rank={self.rank!r} must be at least 1: PowerSGD keeps rank columns; try 4")
        if not self.min_compression > 0:
            raise OptionError(f"min_compression={self.min_compression!r} must be positive: 2 is a good value")
        if self.residual not in ("mean", "sent"):
            raise OptionError(
                f"residual={self.residual!r} must be 'mean' or 'sent': the value to subtract from a gradient"
            )
        if self.factor_dtype not in (None, "int8", *_DTYPES):
            raise OptionError(f"factor_dtype={self.factor_dtype!r} must be None, 'int8', 'bf16' or 'fp16'")
        if self.warmup is not None:
            check_whole("warmup", self.warmup, 0, "steps at the start that send 4-bit integers")

    @property
    def start_steps(self) -> int:
        """The number of warm-up steps, as given or the default."""
        return _WARMUP_STEPS if self.warmup is None else self.warmup

    def __call__(self, bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
        """All-reduce P together with all uncompressed tensors, then Q. In the warm-up, send 4 bits."""
        if is_alone(self, bucket):
            add_residuals(bucket, memory)
            return unchanged(bucket)
        if bucket.step < self.start_steps:
            return (yield from self._warm_up(bucket, memory))
        wide = bucket.buffer.to(_precise(bucket.buffer.dtype))
        passes = self._passes(replace(bucket, buffer=wide), memory if self.error_feedback else None)
        groups = passes.groups

        # Q <- the last step's Q, orthonormalised as in torch's hook. The paper leaves Q as it is. The span of
        # M Q is then the same, but its columns differ as the squares of M's singular values do, and the small
        # ones are lost where P is rounded. QR's last bits may differ between hosts: only the mean of M Q is
        # used, in P.
        qs = [orthonormal(q) for q in self._first_qs(groups, bucket, memory)]

        # P <- M Q, averaged, where M is gradient + residual. Gradients that are not compressed, such as
        # vectors, share the all-reduce.
        first = passes.times(qs)
        own, mean = yield from self._mean([*first, *passes.rests()], bucket)

        # Orthonormalise P with the same bits on every host, so that all ranks decode alike.
        ps = passes.bases(mean[: len(groups)])

        # Q <- M^T P, averaged.
        own_qs, mean_qs = yield from self._mean(passes.transposed_times(ps), bucket, reuse=True)

        # gradient <- P Q^T, residual <- M - P Q^T. With residual="sent", the residual's Q is this rank's own.
        passes.finish(
            ps,
            Averages(own_qs, own[len(groups) :]),
            Averages(mean_qs, mean[len(groups) :]),
            against=self.residual,
            memory=memory,
            dtype=bucket.buffer.dtype,
        )

        # Warm start: the next step begins with this Q, which makes one iteration a step enough.
        if self.warm_start:
            self._remember(groups, mean_qs, memory)
        return Outcome(bucket.buffer if wide is bucket.buffer else bucket.buffer.copy_(wide))

    @property
    def exact_vectors(self) -> bool:
        """True if vectors must be excluded. Unless P is rounded or flattened, it carries them exactly."""
        return self.flatten or self.factor_dtype is not None

    def feeds_back(self, shape: torch.Size) -> bool:
        """Return whether the residual of a parameter is added to its gradient.

        Args:
            shape: Shape of the parameter.

        Returns:
            False if the gradient is sent uncompressed, or if that depends on its bucket.
        """
        compressed = self._matrix_shape(shape) != (0, 0) or self.factor_dtype is not None
        return self.error_feedback and not self.flatten and compressed

    def numbers_sent(self, shape: torch.Size) -> int:
        """Return how many numbers are sent for a gradient of this shape.

        Args:
            shape: Shape of the gradient.

        Returns:
            Numbers in both collectives, or all of them if the gradient is not compressed.
        """
        n, m = self._matrix_shape(shape)
        return (n + m) * min(n, m, self.rank) + shape.numel() - n * m

    def _matrix_shape(self, shape: torch.Size) -> tuple[int, int]:
        """Return the shape of a gradient's matrix, or (0, 0) if the gradient is not compressed."""
        length = shape.numel()
        n = math.isqrt(length) if self.flatten else shape[0] if shape else 1
        # A flattened bucket is cut to the largest matrix that fits. Padding it, as torch does, needs a copy.
        m = length // n if n else 0
        return (n, m) if (n + m) * min(n, m, self.rank) * self.min_compression < n * m else (0, 0)

    def _warm_up(self, bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
        """Average with 4-bit integers, and update Q from the mean, which needs no exchange."""
        program = ErrorFeedback(_INT4) if self.error_feedback else _INT4
        outcome = yield from program(replace(bucket, exact=self._exact_in(bucket)), memory)
        if self.warm_start:
            # Q <- M^T orthonormal(M Q) of the mean M, which all ranks have. So the first low-rank step begins
            # with a basis of recent gradients instead of a random one.
            wide = outcome.mean.to(_precise(outcome.mean.dtype))
            passes = self._passes(replace(bucket, buffer=wide), None)
            qs = passes.refined(self._first_qs(passes.groups, bucket, memory))
            self._remember(passes.groups, qs, memory)
        return outcome

    def _exact_in(self, bucket: Bucket) -> frozenset[str]:
        """Return the parameters that the warm-up sends exactly.

        They are those that later steps send exactly. Later steps add no residual to them, so a residual that
        the warm-up left would be lost.
        """
        if self.exact_vectors:
            return bucket.exact
        shapes = zip(bucket.names, bucket.shapes, strict=True)
        return frozenset(name for name, shape in shapes if self._matrix_shape(shape) == (0, 0))

    def _passes(self, bucket: Bucket, memory: Memory | None) -> Passes:
        """Return the passes over the bucket's matrices and rests, as the bucket's device runs them best."""
        parts = self._parts(bucket, memory)
        return Passes(parts) if bucket.buffer.device.type == "cpu" else StackedPasses(parts)

    def _parts(self, bucket: Bucket, memory: Memory | None) -> list[LowRankGradient]:
        """Return the bucket's gradients as matrices and rests, one by one, or all as one matrix if flattened.

        Args:
            bucket: The gradients.
            memory: The memory of residuals. None leaves them out.
        """
        views = bucket.views()
        wholes = {bucket.names[0]: bucket.buffer} if self.flatten else views
        parts = []
        for name, whole in wholes.items():
            shape = self._matrix_shape(whole.shape)
            inexact = shape != (0, 0) or self.factor_dtype is not None
            pieces = (views if self.flatten else {name: whole}) if inexact else {}
            residuals = (
                []
                if memory is None
                else [
                    (own, view, memory.read(own, RESIDUAL, partial(torch.zeros_like, view)).to(view.dtype))
                    for own, view in pieces.items()
                ]
            )
            parts.append(LowRankGradient(name, whole.view(-1), shape, min(*shape, self.rank), residuals))
        return parts

    def _mean(
        self, tensors: list[torch.Tensor], bucket: Bucket, *, reuse: bool = False
    ) -> Collectives[tuple[list[torch.Tensor], list[torch.Tensor]]]:
        """Return this rank's tensors as sent, and their means over ranks. Without tensors, send nothing.

        Args:
            tensors: The tensors.
            bucket: The bucket that they come from.
            reuse: Whether their memory may be overwritten.
        """
        if not tensors:
            return [], []
        shapes = [tensor.shape for tensor in tensors]
        flat = tensors[0].view(-1) if reuse and len(tensors) == 1 else pack(tensors)
        if self.factor_dtype == "int8":
            own, mean = yield from self._coded_mean(flat, bucket)
            return unpack(own, shapes), unpack(mean, shapes)
        dtype = _DTYPES.get(self.factor_dtype or "", bucket.buffer.dtype)
        # Divide before the cast: in float16 a sum may overflow although the mean does not.
        encoded = torch.mul(flat, 1 / bucket.world_size, out=torch.empty_like(flat, dtype=dtype))
        if self.residual == "sent":
            flat = encoded.to(flat.dtype).mul(bucket.world_size)
        mean = (yield AllReduce(encoded)).to(flat.dtype)
        return unpack(flat, shapes), unpack(mean, shapes)

    def _coded_mean(
        self, flat: torch.Tensor, bucket: Bucket
    ) -> Collectives[tuple[torch.Tensor, torch.Tensor]]:
        """Return this rank's numbers as sent, if residuals are computed from them, and the mean in 8 bits."""
        sent = self.residual == "sent"
        numbers = replace(
            bucket,
            buffer=flat.clone() if sent else flat,
            names=("factors",),
            shapes=(flat.shape,),
            exact=frozenset(),
            track_error=sent,
        )
        outcome = yield from _INT8(numbers, Memory())
        return flat if outcome.error is None else flat - outcome.error, outcome.mean

    def _first_qs(self, groups: list[MatrixGroup], bucket: Bucket, memory: Memory) -> list[torch.Tensor]:
        """Return the Q that each matrix begins the step with, the last step's or a random one, by group."""
        step, dtype = 0 if self.warm_start else bucket.step, _precise(bucket.buffer.dtype)

        def fresh(part: LowRankGradient) -> torch.Tensor:
            # By name, not by bucket: the same Q on all ranks, in any bucket, on any device.
            seed = zlib.crc32(f"{self.seed} {part.name} {step}".encode())
            numbers = random_floats(part.rank * part.columns, bucket.buffer.device, seed)
            return numbers.mul_(2).sub_(1).view(part.rank, part.columns).to(dtype)

        if not self.warm_start:
            return [stack_of([fresh(part) for part in group]) for group in groups]
        return [
            stack_of([memory.read(part.name, part.key, partial(fresh, part)).to(dtype) for part in group])
            for group in groups
        ]

    def _remember(self, groups: list[MatrixGroup], qs: list[torch.Tensor], memory: Memory) -> None:
        # Views of one tensor, which the next step's `stack_of` finds again: neither makes a copy.
        for group, stacked in zip(groups, qs, strict=True):
            for part, q in zip(group, stacked, strict=True):
                memory.adopt(part.name, part.key, q)


def _precise(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute in, at least float32.

    A residual may be twice as large as any gradient. In float16 it could be infinite although the mean is
    not, for good. In bf16 it would lose the small errors that it accumulates.
    """
    return torch.promote_types(dtype, torch.float32)
