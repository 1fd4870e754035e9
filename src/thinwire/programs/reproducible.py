"""Linear algebra with the same bits on every host, with native code and without.

BLAS, LAPACK and `torch.sum` choose the order of their additions by the kind of processor and the number of
threads. Ranks on different kinds of hosts would get different last bits from the same numbers, and replicas
would drift. Two kinds of arithmetic do not depend on the host, and everything here is built from them. One is
elementwise operations, which have one correct rounding each. The other is matrix products of numbers with so
few bits that nothing is rounded, in any order of addition (Ozaki, Ogita, Oishi, Rump: Error-free
transformations of matrix multiplication, 2012).

Such products need float64. Devices without it (some of XPU's, and MPS) use elementwise operations alone, with
sums in a fixed order. Their bits are the same on all such devices, and differ from those of other devices, so
a group must not have ranks of both kinds.

On a CPU, a basis costs what its arithmetic costs. On an accelerator it costs its launches, so accelerators
have an orthonormalisation of their own, `bases_in_few_launches`, whose bits differ from the CPU's.
"""

import threading
from collections.abc import Sequence

import torch
from torch.nn import functional

from thinwire.codecs.magnitudes import largest_magnitude, sums_of
from thinwire.kernels import lowrank

_AT_ONCE = 1 << 18
"""The part of a product that is computed at a time, so that scratch space stays small and in the cache."""
_AT_ONCE_ON_A_DEVICE = 1 << 24
"""The same on an accelerator, where each piece costs launches: 64 MiB of scratch space, or 128 in float64."""
_MANTISSA = 53
_BITS = {torch.float64: (torch.int64, 0x7FF0000000000000), torch.float32: (torch.int32, 0x7F800000)}
"""For each dtype, the integers of its width, and the exponent's bits."""
_LEAST = {torch.float64: 2.0**-1000, torch.float32: 2.0**-126}
"""The divisor of a row of zeros, instead of zero."""
_NEXT_TO_NOTHING = 1e-12
"""The share of a row's square below which the remainder after projection is noise, not a direction.

Elimination in float64 knows the remainder's square to about 1e-15 of the row's. A larger share would drop
rows with digits that the rows before them have lost to rounding.
"""
_NO_SQUARE = 2.0**-600
"""The square of a row of zeros, instead of zero. Squares of float32 numbers are far above it."""
_MOST_PADDING = 4
"""Rows of different lengths are padded to one batch if that takes at most this many times their memory."""


def bases_of(stacks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return an orthonormal basis of the span of each matrix's rows, with zeros for dependent rows.

    It uses the Cholesky factor of the rows' Gram matrix, which is computed exactly, in two passes (Yamamoto,
    Nakatsukasa, Yanagisawa, Fukaya: Roundoff error analysis of the CholeskyQR2 algorithm, 2015). Where rows
    are nearly dependent, as in a gradient of lower rank, a remainder of rounding errors is scaled up to
    length 1. After one pass such rows are far from orthogonal to the others. The second pass begins with rows
    that are nearly orthonormal, and leaves errors of the last bits only.

    Args:
        stacks: Stacks of finite matrices, (matrix, row, length), all of one dtype.

    Returns:
        Stacks of the same shapes, with orthonormal rows.
    """
    if not stacks:
        return []
    if not has_float64(stacks[0].device):
        return [_basis_in_float32(stack) for stack in stacks]
    # A slice has about 20 bits: one is enough for a basis in float32, two for float64.
    count = 2 if stacks[0].dtype == torch.float64 else 1
    bases = [stack.to(torch.float64, copy=True) for stack in stacks]
    # Always two: after one pass the mean of a gradient of lower rank is off by up to 3e-1. A test whether the
    # second is needed would make the host read a value inside backward. It costs 0.6 ms for a GPT at rank 4.
    for _ in range(2):
        # Scale each row by a power of two, and cut it to as many bits as products may have.
        sliced = [_slices(_scaled(stack), 1.0, _bits(stack.shape[2]), count) for stack in bases]
        # G = A A^T exactly, then W with W G W^T = 1, and A <- W A, whose rows are orthonormal.
        grams = [_exact_product(parts, [part.mT for part in parts]) for parts in sliced]
        weights = _weights(grams, max(_bits(stack.shape[2]) for stack in stacks), count)
        bases = [_exact_product(*pair) for pair in zip(weights, sliced, strict=True)]
    return [basis.to(stack.dtype) for basis, stack in zip(bases, stacks, strict=True)]


def bases_in_few_launches(stacks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return an orthonormal basis of the span of each matrix's rows, in few launches of an accelerator.

    The Gram matrix G of the rows A is computed exactly, as in `bases_of`. Then [G | A] is eliminated as one
    matrix, by elementwise operations, in 3 launches for each row. `bases_of` eliminates [G | 1] for weights,
    which it cuts to few bits and multiplies by A. That moves less memory, but takes four times as
    many launches at rank 4.

    There is one pass instead of two. Rows that are nearly dependent, to a millionth of their length, are
    orthogonal to 1e-2 then, and others to 1e-7 (float64 takes both passes). So a caller must not rely on
    P P^T = 1: see `StackedPasses.transposed_times`.

    Args:
        stacks: Stacks of finite matrices, (matrix, row, length), all of one dtype, float32 or float64.

    Returns:
        Stacks of the same shapes, with orthonormal rows.
    """
    if not stacks:
        return []
    dtype, device = stacks[0].dtype, stacks[0].device
    if not has_float64(device):
        return [_basis_in_float32(stack) for stack in stacks]
    total = sum(len(stack) for stack in stacks)
    rank, length = (max(stack.shape[place] for stack in stacks) for place in (1, 2))
    numbers = sum(stack.numel() for stack in stacks)
    if total * rank * length > _MOST_PADDING * numbers:
        return [basis for stack in stacks for basis in bases_in_few_launches([stack])]
    # All shapes in one batch. Zeros that are appended to rows change no exact sum.
    made = torch.empty if total * rank * length == numbers else torch.zeros
    whole = made(total, rank, rank + length, dtype=torch.float64, device=device)
    places = whole[..., rank:].split([len(stack) for stack in stacks])
    for place, stack in zip(places, stacks, strict=True):
        _corner(place, stack).copy_(stack)
    count = 2 if dtype == torch.float64 else 1
    for _ in range(count - 1):
        whole[..., rank:].div_(_eliminate(whole, _bits(length), count))
    norms = _eliminate(whole, _bits(length), count)
    bases = torch.empty(total, rank, length, dtype=dtype, device=device)
    torch.div(whole[..., rank:], norms, out=bases)
    found = bases.split([len(stack) for stack in stacks])
    return [_corner(basis, stack) for basis, stack in zip(found, stacks, strict=True)]


def _corner(padded: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the part of padded matrices that is not padding."""
    return padded[:, : like.shape[1], : like.shape[2]]


def _eliminate(whole: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Make the rows A of [G | A] orthogonal in place, and return their norms.

    Args:
        whole: Matrices with room for G in their first columns.
        bits: Bits of a number in a slice.
        count: Slices of A.
    """
    grams, rows = whole.split([whole.shape[1], whole.shape[2] - whole.shape[1]], dim=2)
    # Squares of float64's largest numbers would overflow.
    slices = _slices(_scaled(rows) if count > 1 else rows, _power_of(rows), bits, count)
    # G = A A^T exactly, where A is the sum of its slices. The last one is in A's memory.
    if count > 1:
        grams.copy_(_exact_product(slices, [part.mT for part in slices]))
        rows.add_(slices[0])
    else:
        torch.bmm(rows, rows.mT, out=grams)
    # Divide by the rows' lengths, so that one threshold fits all remainders. A row of zeros stays one.
    squares = grams.diagonal(dim1=1, dim2=2)
    lengths = squares.clamp(min=_NO_SQUARE).sqrt_()
    whole.div_(lengths[:, :, None])
    grams.div_(lengths[:, None])
    for place in range(whole.shape[1] - 1):
        # row_j <- row_j - row_i G_ji / G_ii for all rows j below i. G_ii is infinite if row i is noise.
        square = functional.threshold(squares[:, place], _NEXT_TO_NOTHING, torch.inf)
        products = whole[:, place + 1 :, place, None] * whole[:, place, None, place + 1 :]
        # The quotient is rounded before the difference: a factor of -1 leaves nothing to fuse.
        whole[:, place + 1 :, place + 1 :].addcdiv_(products, square[:, None, None], value=-1)
    return functional.threshold(squares, _NEXT_TO_NOTHING, torch.inf).sqrt_().unsqueeze(2)


def has_float64(device: torch.device) -> bool:
    """Return whether a device computes in float64."""
    if device.type == "xpu":
        return bool(torch.xpu.get_device_properties(device).has_fp64)
    return device.type != "mps"


def _basis_in_float32(stack: torch.Tensor) -> torch.Tensor:
    """Return an orthonormal basis like `bases_of`, by modified Gram-Schmidt in float32.

    A Gram matrix in float32 would know the square of a remainder to 1e-7 of its row's, and so lose directions
    of less than a thousandth. Gram-Schmidt subtracts from the rows themselves, at the price of a round of
    sums for each of them.
    """
    rows = stack.to(torch.float32, copy=True)
    # One more pass than in `bases_of`, because remainders in float32 are rougher: after two, 4 of 800 square
    # matrices with singular values from 1 to 1e-7 were off by up to 3e-5, and none after three.
    for _ in range(3):
        least = _squares(_scaled(rows)) * _NEXT_TO_NOTHING
        for place in range(rows.shape[1]):
            row, later = rows[:, place : place + 1], rows[:, place + 1 :]
            square = _squares(row)
            row /= torch.where(square > least[:, place : place + 1], square.sqrt(), torch.inf)
            later -= _sums(later * row) * row
    return rows.to(stack.dtype)


def _squares(rows: torch.Tensor) -> torch.Tensor:
    return _sums(rows * rows)


def _sums(x: torch.Tensor) -> torch.Tensor:
    """Return the sums over the last dimension, in a fixed order. `x` is overwritten."""
    return sums_of(x.view(-1, x.shape[-1])).view(*x.shape[:-1], 1)


def product(p: torch.Tensor, q: torch.Tensor, into: torch.Tensor, missed: torch.Tensor | None = None) -> None:
    """Write P Q^T to a matrix, and the matrix's old value minus P Q^T to `missed`.

    Args:
        p: The columns of P as rows.
        q: The columns of Q as rows.
        into: Matrix, overwritten.
        missed: A tensor with as many elements as the matrix, in any shape, overwritten. None writes nothing.
    """
    few = _is_few(len(p), into)
    if few:
        wide = torch.promote_types(into.dtype, torch.float32)
        p, q = p.to(wide), q.to(wide)
    else:
        # Cut both factors to so few bits that no product is rounded. All hosts cut off the same bits, which
        # are beyond float32's precision of a factor's largest number.
        p, q = (
            _slices(factor, _power_of(factor.view(1, -1)), _bits(len(p)), 1)[0]
            for factor in (p.double(), q.double())
        )
    written = (into,) if missed is None else (into, missed)
    if lowrank.supported(*written):
        lowrank.product(p.contiguous(), q.contiguous(), into, missed)
        return
    if missed is not None:
        missed.view(into.shape).copy_(into)
    _product(p, q, into, few=few)
    if missed is not None:
        missed.view(into.shape).sub_(into)


def _product(p: torch.Tensor, q: torch.Tensor, into: torch.Tensor, *, few: bool) -> None:
    """Write P Q^T to a matrix, some rows at a time."""
    step = max(1, _AT_ONCE // max(1, into.shape[1]))
    scratch = _scratch(min(step, len(into)), into.shape[1], like=p)
    for start in range(0, len(into), step):
        piece, columns = into[start : start + step], p[:, start : start + step]
        if few:
            _outer_products(columns, q, piece, scratch[: len(piece)])
        else:
            # Adding zero turns -0, which only some hosts return, to 0.
            piece.copy_(torch.mm(columns.mT, q, out=scratch[: len(piece)]).add_(0.0))


def _outer_products(p: torch.Tensor, q: torch.Tensor, into: torch.Tensor, scratch: torch.Tensor) -> None:
    """Add the outer products column by column. Each is rounded by itself, unlike with fused multiply-adds."""
    whole = into if into.dtype == p.dtype else torch.empty_like(scratch)
    torch.mul(p[0, :, None], q[0], out=whole)
    for left, right in zip(p[1:], q[1:], strict=True):
        whole.add_(torch.mul(left[:, None], right, out=scratch))
    if whole is not into:
        into.copy_(whole)


def stacked_product(p: torch.Tensor, q: torch.Tensor, into: torch.Tensor) -> None:
    """Write P Q^T to each matrix of a stack, with the bits of `product`, in few launches of an accelerator.

    Args:
        p: The columns of P as rows, (matrix, rank, n).
        q: The columns of Q as rows, (matrix, rank, m).
        into: Stack of matrices, (matrix, n, m), in float32 or float64, overwritten.
    """
    rank, few = p.shape[1], _is_few(p.shape[1], into)
    if not few:
        p, q = _cut(p, q, _bits(rank))
    step = max(1, _AT_ONCE_ON_A_DEVICE // max(1, len(into) * into.shape[2]))
    for start in range(0, into.shape[1], step):
        piece, columns = into[:, start : start + step], p[..., start : start + step]
        if few:
            terms = ((columns[:, place, :, None], q[:, place, None]) for place in range(rank))
            torch.mul(*next(terms), out=piece)
            scratch = torch.empty(piece.shape, dtype=p.dtype, device=p.device) if rank > 1 else piece
            for term in terms:
                piece.add_(torch.mul(*term, out=scratch))
        else:
            # Adding zero turns -0, which only some devices return, to 0.
            torch.add(torch.bmm(columns.mT, q), 0.0, out=piece)


def _is_few(rank: int, into: torch.Tensor) -> bool:
    """Return whether P Q^T is the sum of outer products, added one by one.

    Up to `lowrank.FEW` columns that is as fast as a matrix product in double precision.
    """
    return rank <= lowrank.FEW or into.dtype == torch.float64 or not has_float64(into.device)


def _cut(p: torch.Tensor, q: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return stacks of both factors in float64, cut to `bits` bits of each factor's largest number."""
    n, m = p.shape[2], q.shape[2]
    made = torch.empty if n == m else torch.zeros
    both = made(2, *p.shape[:2], max(n, m), dtype=torch.float64, device=p.device)
    p, q = both[0, ..., :n].copy_(p), both[1, ..., :m].copy_(q)
    flat = both.view(2 * len(p), -1)
    _slices(flat, _power_of(flat), bits, 1)
    return p, q


def _scratch(rows: int, columns: int, like: torch.Tensor) -> torch.Tensor:
    """Return scratch space, valid until the next call in this thread. Allocation would be slow."""
    size = rows * columns
    if type(like) is not torch.Tensor:  # a fake tensor of a plan must not reach real steps
        return like.new_empty((rows, columns))
    kept: torch.Tensor | None = getattr(_lent, "scratch", None)
    if kept is None or kept.numel() < size or (kept.dtype, kept.device) != (like.dtype, like.device):
        kept = _lent.scratch = like.new_empty(max(size, _AT_ONCE))
    return kept[:size].view(rows, columns)


_lent = threading.local()


def _bits(terms: int) -> int:
    """Return how many bits two factors may have, so that sums of `terms` products are exact in float64."""
    return (_MANTISSA - (terms - 1).bit_length()) // 2


def _power_of(x: torch.Tensor) -> torch.Tensor:
    """Return the largest power of two that is at most each row's largest magnitude."""
    integers, exponent = _BITS[x.dtype]
    return (largest_magnitude(x).view(integers) & exponent).view(x.dtype)


def _scaled(rows: torch.Tensor) -> torch.Tensor:
    """Divide each row by a power of two in place, which is exact, so that its largest number is below 2."""
    return rows.div_(_power_of(rows).clamp_(min=_LEAST[rows.dtype]))


def _slices(x: torch.Tensor, power: torch.Tensor | float, bits: int, count: int) -> list[torch.Tensor]:
    """Return `count` slices that add up to `x`, except for bits beyond the last one. `x` is overwritten.

    Each slice has `bits` bits. The first begins at twice `power`, which no number of `x` may exceed.
    """
    slices = []
    for number in range(1, count + 1):
        # Near this number the step from one float64 to the next is that of the slice's last bit.
        shift = power * (1.5 * 2.0 ** (_MANTISSA - number * bits))
        slices.append((x.add_(shift) if number == count else x + shift).sub_(shift))
        if number < count:
            x.sub_(slices[-1])
    return slices


def _exact_product(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the product of two sums of slices. The product of each pair is exact, their sum elementwise."""
    first, *others = [torch.bmm(a, b) for a in left for b in right]
    for other in others:
        first = first + other
    return first


def _weights(grams: Sequence[torch.Tensor], bits: int, count: int) -> list[list[torch.Tensor]]:
    """Return the weights that make rows orthonormal, given the rows' Gram matrices, as slices.

    The weights suit slices of rows with `bits` bits. All matrices are processed together, padded with zeros,
    because they are small and most of the time is spent in calls.
    """
    most = max(gram.shape[-1] for gram in grams)
    missing = [most - gram.shape[-1] for gram in grams]
    filled = [
        functional.pad(gram, (0, less) * 2) if less else gram
        for gram, less in zip(grams, missing, strict=True)
    ]
    weights = _whitening(torch.cat(filled))
    slices = _slices(weights, _power_of(weights), _MANTISSA - bits - (most - 1).bit_length(), count)
    by_gram = zip(*(part.split([len(gram) for gram in grams]) for part in slices), strict=True)
    return [
        [part[:, : gram.shape[-1], : gram.shape[-1]] for part in own]
        for own, gram in zip(by_gram, grams, strict=True)
    ]


def _whitening(grams: torch.Tensor) -> torch.Tensor:
    """Return the lower triangles W for which W G W^T is the identity, by elimination on G and 1 at once."""
    count = grams.shape[-1]
    identity = torch.eye(count, dtype=grams.dtype, device=grams.device).expand_as(grams)
    both = torch.cat([grams, identity], dim=-1)
    least = grams.diagonal(dim1=-2, dim2=-1).unsqueeze(-1) * _NEXT_TO_NOTHING
    for place in range(count):
        row, later = both[:, place], both[:, place + 1 :]
        square = row[:, place, None]
        # Division by infinity turns a row that depends on earlier ones to zeros, without a branch on values.
        norm = torch.where(square > least[:, place], square.sqrt(), torch.inf)
        row /= norm
        if place < count - 1:
            later -= (later[:, :, place] / norm).unsqueeze(-1) * row.unsqueeze(1)
    return both[..., count:]
