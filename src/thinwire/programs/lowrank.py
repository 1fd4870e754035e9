"""Gradients as matrices, and PowerSGD's passes over them.

PowerSGD on a CPU is bound by memory rather than by arithmetic. So each of its three passes reads a matrix
once, in native code if that is in use. The first adds the residual and computes M Q, the second computes M^T
P, and the third computes P Q^T and the new residual. P and Q are stored transposed (`MatrixGroup`), so M Q is
computed as Q^T M^T.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import TypeAlias

import torch

from thinwire.kernels import lowrank
from thinwire.programs.memory import RESIDUAL, Memory
from thinwire.programs.reproducible import bases_of, product

_FEW = 4
"""The most columns for which native code is at least as fast as BLAS for M Q and M^T P."""


class LowRankGradient:
    """One gradient: a matrix to compress, a rest that is sent as it is, or both.

    Args:
        name: Name of the parameter.
        flat: The gradient, changed in place.
        shape: Shape of the matrix that the gradient begins with, or (0, 0).
        rank: Columns of the matrix's factors.
        residuals: Name, gradient and residual of each parameter that `flat` is made of. Empty without error
            feedback.
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
        self.own, self.mean = Approximation(), Approximation()
        self.residuals = residuals

    @property
    def columns(self) -> int:
        """The matrix's number of columns."""
        return self.shape[1]

    @property
    def key(self) -> str:
        """The slot of Q, which contains its size."""
        return f"q {self.rank}x{self.columns}"

    def times(self, q: torch.Tensor, into: torch.Tensor) -> None:
        """Add the residual to the gradient, and write M Q, transposed as `q` is."""
        residuals = [residual for _, _, residual in self.residuals]
        if len(q) <= _FEW and self._one_residual() and lowrank.supported(self.matrix, q, into, *residuals):
            lowrank.times(self.matrix, residuals[0] if residuals else None, q, into)
        else:
            self._correct()
            # It obeys the user's TF32 switch, as the model's own products do. Ranks agree all the same: they
            # use the mean alone, and everything after it is exact.
            torch.mm(q, self.matrix.mT, out=into)

    def transposed_times(self, p: torch.Tensor, into: torch.Tensor) -> None:
        """Write M^T P, transposed as `p` is."""
        if len(p) <= _FEW and lowrank.supported(self.matrix, p, into):
            lowrank.transposed_times(self.matrix, p, into)
        else:
            torch.mm(p, self.matrix, out=into)

    def corrected_rest(self) -> torch.Tensor:
        """Return the rest plus its residual. If there is a matrix, `times` has already added it."""
        if not self.matrix.numel():
            self._correct()
        return self.rest

    def finish(self, against: str, memory: Memory, dtype: torch.dtype) -> None:
        """Write the mean, and keep the gradient less the mean ("mean") or less this rank's share ("sent").

        Args:
            against: The option `residual` of `PowerSGD`.
            memory: Where the residuals are kept.
            dtype: The dtype that the mean is rounded to afterwards, which residuals compensate.
        """
        if self._one_residual() and self.mean.product is not None and not self.rest.numel():
            kept = self._finish_matrix(against, memory)
        else:
            kept = self._finish_pieces(against, memory)
        # The mean is rounded to the gradients' dtype later. Error feedback compensates for that too.
        if dtype != self.matrix.dtype:
            for missed, mean in kept:
                missed.add_(mean - mean.to(dtype))

    def _finish_matrix(self, against: str, memory: Memory) -> "Pairs":
        """Compute the product and the residual in one pass."""
        kept = [(memory.new_value(name, RESIDUAL, residual), view) for name, view, residual in self.residuals]
        missed = kept[0][0] if kept else None
        # The matrix holds M here. `product` writes `missed` before it overwrites M with P Q^T.
        if against == "sent" and missed is not None and self.own.product is not None:
            product(*self.own.product, into=self.matrix, missed=missed)
            missed = None
        if self.mean.product is not None:
            product(*self.mean.product, into=self.matrix, missed=missed)
        return kept

    def _finish_pieces(self, against: str, memory: Memory) -> "Pairs":
        """Compute the residual of each parameter after the mean of all."""
        kept = []
        for name, view, residual in self.residuals:
            kept.append((memory.new_value(name, RESIDUAL, residual).copy_(view), view))
        if against == "sent" and kept:
            self._write(self.own)
            _subtract(kept)
        self._write(self.mean)
        if against == "mean":
            _subtract(kept)
        return kept

    def _one_residual(self) -> bool:
        """Return whether the matrix has the residual of one parameter, or none."""
        return all(residual.numel() == self.matrix.numel() for _, _, residual in self.residuals)

    def _correct(self) -> None:
        for _, view, residual in self.residuals:
            view.add_(residual)

    def _write(self, result: "Approximation") -> None:
        if result.product is not None:
            p, q = result.product
            product(p, q, into=self.matrix)
        if result.rest is not None:
            self.rest.copy_(result.rest)


class Approximation:
    """A gradient after compression: the factors P and Q of its matrix, and its rest."""

    product: tuple[torch.Tensor, torch.Tensor] | None = None
    rest: torch.Tensor | None = None


Pairs: TypeAlias = list[tuple[torch.Tensor, torch.Tensor]]
"""Residuals, with the gradients of the same parameters."""

MatrixGroup: TypeAlias = list[LowRankGradient]
"""Gradients whose matrices have one shape.

Their factors are stacked and transposed, (gradient, rank, length), so a column of P or Q is a row here.
Products are two to five times as fast in this layout on a CPU, and QR expects it.
"""


@dataclass(frozen=True)
class Averages:
    """The results of both all-reduces, or a rank's own share of them: Q of each group, and the rests."""

    qs: list[torch.Tensor]
    rests: list[torch.Tensor]


class Passes:
    """PowerSGD's passes over the gradients of a bucket, matrix by matrix.

    Args:
        parts: The gradients.
    """

    def __init__(self, parts: list[LowRankGradient]) -> None:
        self.parts = parts
        by_shape: defaultdict[tuple[int, int], MatrixGroup] = defaultdict(list)
        for part in parts:
            if part.matrix.numel():
                by_shape[part.shape].append(part)
        self.groups = list(by_shape.values())
        """The gradients that have a matrix, grouped by its shape."""
        self.with_rest = [part for part in parts if part.rest.numel()]
        """The gradients that have a rest."""

    def times(self, qs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return M Q of each matrix M, to which its residual is added first."""
        return [_times(group, q) for group, q in zip(self.groups, qs, strict=True)]

    def rests(self) -> list[torch.Tensor]:
        """Return the rests plus their residuals, after `times`."""
        return [part.corrected_rest() for part in self.with_rest]

    def bases(self, ps: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return orthonormal bases of P, with the same bits on all ranks."""
        return bases_of(ps)

    def transposed_times(self, ps: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return M^T P of each matrix M."""
        return [_transposed_times(group, p) for group, p in zip(self.groups, ps, strict=True)]

    def refined(self, qs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return M^T P of each matrix M, with P a basis of M Q: one iteration on means that all ranks have.

        Where M is finite but its products overflow, in float16 above all, Q stays as it is. A non-finite Q
        would make every later mean NaN.
        """
        ps = [orthonormal(p) for p in self.times([orthonormal(q) for q in qs])]
        return [
            torch.where(found.isfinite().all(2, keepdim=True).all(1, keepdim=True), found, q)
            for found, q in zip(self.transposed_times(ps), qs, strict=True)
        ]

    def finish(
        self,
        ps: list[torch.Tensor],
        own: Averages,
        mean: Averages,
        *,
        against: str,
        memory: Memory,
        dtype: torch.dtype,
    ) -> None:
        """Write the means to the gradients, and keep the residuals.

        Args:
            ps: The bases of P.
            own: This rank's share of the means.
            mean: The means.
            against: The option `residual` of `PowerSGD`.
            memory: Where the residuals are kept.
            dtype: The dtype that the mean is rounded to afterwards, which residuals compensate.
        """
        for group, p, own_q, mean_q in zip(self.groups, ps, own.qs, mean.qs, strict=True):
            for number, part in enumerate(group):
                part.own.product = p[number], own_q[number]
                part.mean.product = p[number], mean_q[number]
        for part, own_rest, mean_rest in zip(self.with_rest, own.rests, mean.rests, strict=True):
            part.own.rest, part.mean.rest = own_rest, mean_rest
        for part in self.parts:
            part.finish(against, memory, dtype)


def _times(group: MatrixGroup, qs: torch.Tensor) -> torch.Tensor:
    products = qs.new_empty(len(group), qs.shape[1], group[0].shape[0])
    for part, q, into in zip(group, qs, products, strict=True):
        part.times(q, into)
    return products


def _transposed_times(group: MatrixGroup, ps: torch.Tensor) -> torch.Tensor:
    products = ps.new_empty(len(group), ps.shape[1], group[0].columns)
    for part, p, into in zip(group, ps, products, strict=True):
        part.transposed_times(p, into)
    return products


def orthonormal(rows: torch.Tensor) -> torch.Tensor:
    """Return an orthonormal basis of the span of each matrix's rows, completed where rows are dependent.

    Householder QR in at least float32 cannot fail on finite numbers, so rows of zeros and dependent rows need
    no special case, and for these shapes it is the fastest on a CPU (docs/design/decisions.md). Its last bits
    depend on the host, so use it only for values on which ranks need not agree.
    """
    exact = rows if rows.dtype in (torch.float32, torch.float64) else rows.float()
    basis: torch.Tensor = torch.linalg.qr(exact.mT)[0].mT.to(rows.dtype)
    return basis.contiguous()


def _subtract(pairs: Pairs) -> None:
    for residual, gradient in pairs:
        residual.sub_(gradient)
