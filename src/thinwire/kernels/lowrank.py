"""PowerSGD's passes over a gradient matrix, each of which reads the matrix from memory once.

Factors are stored with their columns as rows: P as (rank, n) and Q as (rank, m) for a matrix M of n x m. So
they are contiguous for the wire and multiply two to five times as fast (M^T P of 1024 x 256 at rank 4: 20 us
instead of 120). All tensors are contiguous float32 CPU tensors, except the factors of an exact product.
"""

import ctypes

import torch

from thinwire.errors import OptionError
from thinwire.kernels.library import native
from thinwire.kernels.tensors import addressable

FEW = 4
"""Up to this many columns, products are computed in float32, term by term."""


def supported(*tensors: torch.Tensor) -> bool:
    """Return whether native code is in use and all are plain contiguous float32 tensors on the CPU."""
    return addressable(tensors)


def times(matrix: torch.Tensor, residual: torch.Tensor | None, q: torch.Tensor, p: torch.Tensor) -> None:
    """Add the residual to M, in place, and write M Q to `p`.

    Args:
        matrix: M, n x m.
        residual: n m numbers of any shape, or None.
        q: Q, rank x m.
        p: Overwritten, rank x n.

    Raises:
        OptionError: Shapes or dtypes do not fit.
    """
    n, m = matrix.shape
    added = () if residual is None else (residual,)
    _check(matrix, (*added, q, p), [*(n * m for _ in added), len(q) * m, len(q) * n])
    pointer = None if residual is None else residual.data_ptr()
    _library().tw_times(matrix.data_ptr(), pointer, n, m, len(q), q.data_ptr(), p.data_ptr())


def transposed_times(matrix: torch.Tensor, p: torch.Tensor, q: torch.Tensor) -> None:
    """Write M^T P to `q`.

    Args:
        matrix: M, n x m.
        p: P, rank x n.
        q: Overwritten, rank x m.

    Raises:
        OptionError: Shapes or dtypes do not fit.
    """
    n, m = matrix.shape
    _check(matrix, (p, q), [len(p) * n, len(p) * m])
    _library().tw_transposed_times(matrix.data_ptr(), n, m, len(p), p.data_ptr(), q.data_ptr())


def product(p: torch.Tensor, q: torch.Tensor, matrix: torch.Tensor, missed: torch.Tensor | None) -> None:
    """Write M - P Q^T to `missed`, and P Q^T to M.

    The terms of an element are added in the order of columns, and each is rounded by itself. Factors in
    float64 must have so few bits that nothing is rounded before the result is.

    Args:
        p: P, rank x n, in float64, or in float32 with at most 4 rows.
        q: Q, rank x m, in the dtype of `p`.
        matrix: M, n x m, overwritten.
        missed: n m numbers of any shape, overwritten. None writes nothing.

    Raises:
        OptionError: Shapes or dtypes do not fit.
    """
    n, m = matrix.shape
    _check(matrix, () if missed is None else (missed,), [] if missed is None else [n * m])
    exact = p.dtype is torch.float64
    fit = p.shape == (len(p), n) and q.shape == (len(p), m) and (exact or 1 <= len(p) <= FEW)
    if not fit or not addressable([p, q], p.dtype) or p.dtype not in (torch.float32, torch.float64):
        raise _misfit(matrix, (p, q))
    pointer = None if missed is None else missed.data_ptr()
    function = _library().tw_product_exact if exact else _library().tw_product_few
    function(matrix.data_ptr(), pointer, n, m, len(p), p.data_ptr(), q.data_ptr())


def _check(matrix: torch.Tensor, others: tuple[torch.Tensor, ...], numbers: list[int]) -> None:
    if not addressable([matrix, *others]) or [tensor.numel() for tensor in others] != numbers:
        raise _misfit(matrix, others)


def _misfit(matrix: torch.Tensor, others: tuple[torch.Tensor, ...]) -> OptionError:
    forms = [(tuple(tensor.shape), tensor.dtype) for tensor in (matrix, *others)]
    return OptionError(
        f"tensors {forms} do not fit each other, or cannot be passed to native code: call `supported` first,"
        " and pass factors with their columns as rows"
    )


def _library() -> ctypes.CDLL:
    library = native()
    assert library is not None, "the tensors were checked"
    return library
