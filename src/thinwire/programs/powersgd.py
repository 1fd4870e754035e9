r"""PowerSGD: gradients as products of two thin matrices, found by one step of subspace iteration.

For each gradient matrix M (n x m), with Q (m x r) left from the step before:

    P = mean over ranks of M Q        first all-reduce, n r numbers
    P = orthonormal basis of P
    Q = mean over ranks of M^T P      second all-reduce, m r numbers
    gradient = P Q^T

What the product misses, M - P Q^T, is added to the next step's gradient (error feedback).

Vogels, Karimireddy, Jaggi: PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization,
https://arxiv.org/abs/1905.13727.
"""

import math
import zlib
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, TypeAlias

import torch

from thinwire.errors import OptionError
from thinwire.programs.memory import RESIDUAL, Memory
from thinwire.programs.overflow import all_finite, overflow
from thinwire.programs.program import Bucket, Outcome
from thinwire.wire.ops import AllReduce, Steps
from thinwire.wire.pack import pack, unpack

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class PowerSGD:
    """Low-rank gradients: bytes fall from n m to (n + m) rank for each n x m matrix.

    Tuning. Start with `PowerSGD(rank=4, factor_dtype="bf16")`. If the loss falls behind plain DDP's, first
    let training begin with exact gradients, `Warmup(PowerSGD(...), steps=...)` with about a tenth of all
    steps, the time in which gradients change fastest; then double the rank until it does not help any more.
    Leave `warm_start` and `error_feedback` on: without them the same rank is far less accurate. If a step is
    bound by computing rather than by the link (`thinwire bench` says), compression cannot help.

    Args:
        rank: Columns kept of each matrix; bytes and work grow with it. 1 to 4 for most models, up to 32 for
            large language models.
        min_compression: A matrix that would shrink by less than this factor travels as it is, together with
            biases and other vectors.
        warm_start: Begin each step's iteration with the last step's Q, which makes one iteration enough.
        error_feedback: Add what was not sent to the next step's gradient. Costs one copy of the gradients.
        residual: "mean" keeps what this rank's gradient differs from the averaged result; "sent" what it
            differs from this rank's own contribution to it. The average over ranks, and with it training, is
            the same but for rounding: "mean" also makes up for the rounding of the sum, "sent" stays small.
        factor_dtype: "bf16" halves the bytes of all that travels; with error feedback the rounding is made
            up for as well. "fp16" rounds less, but where a factor exceeds 65504 the bucket's gradient is NaN,
            as after any overflow. None: as the gradients are.
        flatten: Take the whole bucket for one square matrix: fewer, larger operations, but it destroys the
            structure that makes gradients low-rank. Only worth a try with rank=1.
        seed: Of the first Q.

    Example::

        wire = thinwire.attach(ddp, thinwire.PowerSGD(rank=4, factor_dtype="bf16"))
    """

    tracks_error: ClassVar[bool] = False

    rank: int = 4
    min_compression: float = 2.0
    warm_start: bool = True
    error_feedback: bool = True
    residual: str = "mean"
    factor_dtype: str | None = None
    flatten: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or self.rank < 1:
            raise OptionError(f"rank={self.rank!r} must be at least 1: PowerSGD keeps rank columns; try 4")
        if not self.min_compression > 0:
            raise OptionError(f"min_compression={self.min_compression!r} must be positive: 2 is a good value")
        if self.residual not in ("mean", "sent"):
            raise OptionError(
                f"residual={self.residual!r} must be 'mean' or 'sent': what errors are taken against"
            )
        if self.factor_dtype is not None and self.factor_dtype not in _DTYPES:
            raise OptionError(
                f"factor_dtype={self.factor_dtype!r} must be None, {' or '.join(map(repr, _DTYPES))}"
            )

    def __call__(self, bucket: Bucket, memory: Memory) -> Steps[Outcome]:
        """Two all-reduces: P together with all that is not compressed, then Q."""
        parts = self._parts(bucket, memory)
        groups, with_rest = _by_shape(parts), [part for part in parts if part.rest.numel()]
        starts = [orthonormal(start) for start in self._starts(groups, bucket, memory)]
        first = [times(group, qs) for group, qs in zip(groups, starts, strict=True)]
        own, mean = yield from self._mean([*first, *(part.corrected_rest() for part in with_rest)], bucket)
        # After an overflow the second all-reduce takes its turn too: their number depends on no values.
        ps = [orthonormal(p) for p in mean[: len(groups)]] if mean else [p.fill_(math.nan) for p in first]
        second = [transposed_times(group, p) for group, p in zip(groups, ps, strict=True)]
        # P is orthonormal, so no number of the product exceeds the largest of Q times its columns.
        own_qs, mean_qs = yield from self._mean(second, bucket, bound=self.rank)
        if mean is None or mean_qs is None:
            return overflow(bucket)

        for group, p, own_q, q in zip(groups, ps, own_qs, mean_qs, strict=True):
            for number, part in enumerate(group):
                part.own.product = p[number], own_q[number]
                part.mean.product = p[number], q[number]
        rests = zip(with_rest, own[len(groups) :], mean[len(groups) :], strict=True)
        for part, own_value, mean_value in rests:
            part.own.rest, part.mean.rest = own_value, mean_value
        for part in parts:
            part.finish(self.residual, memory)
        if self.warm_start:
            self._remember(groups, mean_qs, memory)
        return Outcome(bucket.buffer, finite=True)

    @property
    def spares_vectors(self) -> bool:
        """Vectors travel with P as they are, unless all that travels is rounded or flattened."""
        return self.flatten or self.factor_dtype is not None

    def numbers_sent(self, shape: torch.Size) -> int:
        """How many numbers stand for a gradient of this shape on the wire."""
        n, m = self._matrix_shape(shape)
        return (n + m) * min(n, m, self.rank) + shape.numel() - n * m

    def _matrix_shape(self, shape: torch.Size) -> tuple[int, int]:
        """As what matrix a gradient is compressed; (0, 0) where that is not worth it."""
        length = shape.numel()
        n = math.isqrt(length) if self.flatten else shape[0] if shape else 1
        m = length // n if n else 0
        return (n, m) if (n + m) * min(n, m, self.rank) * self.min_compression < n * m else (0, 0)

    def _parts(self, bucket: Bucket, memory: Memory) -> list["Part"]:
        """Each gradient of the bucket, or all of it as one."""
        views = bucket.views()
        wholes = {bucket.names[0]: bucket.buffer} if self.flatten else views
        parts = []
        for name, whole in wholes.items():
            shape = self._matrix_shape(whole.shape)
            inexact = shape != (0, 0) or self.factor_dtype is not None
            pieces = (views if self.flatten else {name: whole}) if self.error_feedback and inexact else {}
            residuals = [
                (own, view, memory.read(own, RESIDUAL, partial(torch.zeros_like, view)))
                for own, view in pieces.items()
            ]
            parts.append(Part(name, whole.view(-1), shape, min(*shape, self.rank), residuals))
        return parts

    def _mean(
        self, tensors: list[torch.Tensor], bucket: Bucket, bound: int = 1
    ) -> Steps[tuple[list[torch.Tensor], list[torch.Tensor] | None]]:
        """What this rank gave and the mean over ranks; None where `bound` times the mean is not finite.

        Every rank sees the same mean, so all take the same way. Of nothing the mean is nothing, at no cost.
        """
        if not tensors:
            return [], []
        shapes = [tensor.shape for tensor in tensors]
        flat = pack(tensors)
        encoded = flat.mul(1 / bucket.world_size).to(_DTYPES.get(self.factor_dtype or "", flat.dtype))
        if self.residual == "sent":
            flat = encoded.to(flat.dtype).mul(bucket.world_size)
        mean = (yield AllReduce(encoded)).to(flat.dtype)
        return unpack(flat, shapes), unpack(mean, shapes) if all_finite(
            mean if bound == 1 else mean * bound
        ) else None

    def _starts(self, groups: list["Parts"], bucket: Bucket, memory: Memory) -> list[torch.Tensor]:
        """The Q of every matrix to begin with, stacked by group."""
        step = 0 if self.warm_start else bucket.step

        def fresh(part: Part) -> torch.Tensor:
            seed = zlib.crc32(f"{self.seed} {part.name} {step}".encode())
            numbers = torch.randn(part.rank, part.columns, generator=torch.Generator().manual_seed(seed))
            return numbers.to(bucket.buffer)

        if not self.warm_start:
            return [torch.stack([fresh(part) for part in group]) for group in groups]
        return [
            torch.stack([memory.read(part.name, part.key, partial(fresh, part)) for part in group])
            for group in groups
        ]

    def _remember(self, groups: list["Parts"], qs: list[torch.Tensor], memory: Memory) -> None:
        for group, stacked in zip(groups, qs, strict=True):
            for part, q in zip(group, stacked, strict=True):
                memory.put(part.name, part.key, q)


class Part:
    """One gradient: a matrix to compress, a rest that travels as it is, or both.

    Each is corrected just before it is first read, and finished in one go, while it is in the processor's
    cache: PowerSGD on a CPU waits for memory more than it computes.
    """

    def __init__(
        self,
        name: str,
        flat: torch.Tensor,
        shape: tuple[int, int],
        rank: int,
        residuals: list[tuple[str, torch.Tensor, torch.Tensor]],
    ) -> None:
        self.name = name
        self.shape = shape
        self.rank = rank
        size = shape[0] * shape[1]
        self.matrix, self.rest = flat[:size].view(shape), flat[size:]
        self.own, self.mean = Result(), Result()
        self._residuals = residuals

    @property
    def columns(self) -> int:
        """Of the matrix."""
        return self.shape[1]

    @property
    def key(self) -> str:
        """The slot of Q; one of another size would not fit."""
        return f"q {self.rank}x{self.columns}"

    def correct(self) -> None:
        """Add what earlier steps did not send."""
        for _, view, residual in self._residuals:
            view.add_(residual)

    def corrected_rest(self) -> torch.Tensor:
        """The rest, ready to be sent; with a matrix it has been corrected already."""
        if not self.matrix.numel():
            self.correct()
        return self.rest

    def finish(self, against: str, memory: Memory) -> None:
        """Write the mean, and keep what was given less the mean, or less what this rank sent."""
        missed = []
        for name, view, residual in self._residuals:
            missed.append((memory.room(name, RESIDUAL, residual).copy_(view), view))
        if against == "sent" and missed:
            self._write(self.own)
            _subtract(missed)
        self._write(self.mean)
        if against == "mean":
            _subtract(missed)

    def _write(self, result: "Result") -> None:
        if result.product is not None:
            p, q = result.product
            torch.mm(p.mT, q, out=self.matrix)
        if result.rest is not None:
            self.rest.copy_(result.rest)


def _subtract(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for given, got in pairs:
        given.sub_(got)


Parts: TypeAlias = list[Part]
"""Parts whose matrices have one shape.

Their factors are stacked with columns as rows, (part, rank, length): two to five times as fast to multiply on
a CPU, and what QR wants.
"""


class Result:
    """What comes of a part: P and Q, and the rest."""

    product: tuple[torch.Tensor, torch.Tensor] | None = None
    rest: torch.Tensor | None = None


def _by_shape(parts: list[Part]) -> list[Parts]:
    groups: defaultdict[tuple[int, int], Parts] = defaultdict(list)
    for part in parts:
        if part.matrix.numel():
            groups[part.shape].append(part)
    return list(groups.values())


def times(group: Parts, qs: torch.Tensor) -> torch.Tensor:
    """M Q of each matrix M, corrected first."""
    products = []
    for part, q in zip(group, qs, strict=True):
        part.correct()
        products.append(q @ part.matrix.mT)
    return torch.stack(products)


def transposed_times(group: Parts, ps: torch.Tensor) -> torch.Tensor:
    """M^T P of each matrix M."""
    return torch.stack([p @ part.matrix for part, p in zip(group, ps, strict=True)])


def orthonormal(rows: torch.Tensor) -> torch.Tensor:
    """An orthonormal basis of the span of each matrix's rows; what is missing, it completes.

    By Householder QR, in at least fp32: it cannot fail on finite numbers, so zero and dependent rows need no
    special case, and for these shapes it is the fastest on a CPU (docs/design/decisions.md).
    """
    exact = rows if rows.dtype in (torch.float32, torch.float64) else rows.float()
    basis: torch.Tensor = torch.linalg.qr(exact.mT)[0].mT.to(rows.dtype)
    return basis
