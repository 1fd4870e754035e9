"""Linear algebra whose every bit is the same on any host, with native code and without.

BLAS, LAPACK and `torch.sum` choose the order of their additions by the kind of processor and the number of
threads. Ranks on unlike hosts would get other last bits from the same numbers, and replicas would drift
apart. Two kinds of arithmetic do not depend on the host, and all results here are made of them: elementwise
operations, which have one correct rounding each, and matrix products of numbers with so few bits that nothing
is rounded, in whatever order they are added (Ozaki, Ogita, Oishi, Rump: Error-free transformations of matrix
multiplication, 2012).
"""

import threading
from collections.abc import Sequence

import torch
from torch.nn import functional

from thinwire.kernels import lowrank

_AT_ONCE = 1 << 18
"""Numbers of a product that are worked on at a time: scratch space stays small, and in the cache."""
_MANTISSA = 53
_EXPONENT = 0x7FF0000000000000
"""The exponent's bits of a float64."""
_LEAST = 2.0**-1000
"""Instead of zero, where a row of zeros would be divided by it."""
_NEXT_TO_NOTHING = 1e-10
"""Of a row's square: what is left of it after projection, below this, is no direction but noise."""


def bases_of(stacks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return an orthonormal basis of the span of each matrix's rows; zeros for rows that add nothing to it.

    By Cholesky's factor of the rows' products with each other, which are computed exactly. Its one weakness,
    that they square the condition number, matters little in double precision: for float32 one pass is enough.
    For float64, of which products keep twice 20 bits or so, a second one mends what the first has lost.

    Args:
        stacks: Matrices, (matrix, row, length), finite; any number of such stacks, of one dtype.

    Returns:
        The same, with orthonormal rows.
    """
    if not stacks:
        return []
    passes = 2 if stacks[0].dtype == torch.float64 else 1
    bases = [stack.to(torch.float64, copy=True) for stack in stacks]
    for _ in range(passes):
        sliced = [
            _slices(stack.div_(_power_of(stack).clamp_(min=_LEAST)), 1.0, _bits(stack.shape[2]), passes)
            for stack in bases
        ]
        grams = [_exact_product(parts, [part.mT for part in parts]) for parts in sliced]
        weights = _weights(grams, max(_bits(stack.shape[2]) for stack in stacks), passes)
        bases = [_exact_product(*pair) for pair in zip(weights, sliced, strict=True)]
    return [basis.to(stack.dtype) for basis, stack in zip(bases, stacks, strict=True)]


def product(p: torch.Tensor, q: torch.Tensor, into: torch.Tensor, missed: torch.Tensor | None = None) -> None:
    """Write P Q^T to a matrix, and what the matrix held before less P Q^T to `missed`.

    Args:
        p: The columns of P as rows.
        q: The columns of Q as rows.
        into: Matrix, overwritten.
        missed: As many numbers as the matrix has, in any shape, overwritten. None writes none.
    """
    # Up to so many columns, outer products one by one are as fast as a matrix product in double precision.
    few = len(p) <= lowrank.FEW or into.dtype == torch.float64
    if few:
        wide = torch.promote_types(into.dtype, torch.float32)
        p, q = p.to(wide), q.to(wide)
    else:
        p, q = (
            _slices(one, _power_of(one.view(1, -1)), _bits(len(p)), 1)[0] for one in (p.double(), q.double())
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
    room = _room(min(step, len(into)), into.shape[1], like=p)
    for start in range(0, len(into), step):
        piece, columns = into[start : start + step], p[:, start : start + step]
        if few:
            _outer_products(columns, q, piece, room[: len(piece)])
        else:
            # Adding zero turns -0, which only some hosts return, to 0.
            piece.copy_(torch.mm(columns.mT, q, out=room[: len(piece)]).add_(0.0))


def _outer_products(p: torch.Tensor, q: torch.Tensor, into: torch.Tensor, room: torch.Tensor) -> None:
    """Add them up, column after column; each is rounded by itself, as a fused multiply-add would not."""
    whole = into if into.dtype == p.dtype else torch.empty_like(room)
    torch.mul(p[0, :, None], q[0], out=whole)
    for left, right in zip(p[1:], q[1:], strict=True):
        whole.add_(torch.mul(left[:, None], right, out=room))
    if whole is not into:
        into.copy_(whole)


def _room(rows: int, columns: int, like: torch.Tensor) -> torch.Tensor:
    """Return scratch space, lent until the next call in this thread: fresh memory is slow to come by."""
    size = rows * columns
    if type(like) is not torch.Tensor:  # a fake one must not be kept
        return like.new_empty((rows, columns))
    kept: torch.Tensor | None = getattr(_lent, "room", None)
    if kept is None or kept.numel() < size or (kept.dtype, kept.device) != (like.dtype, like.device):
        kept = _lent.room = like.new_empty(max(size, _AT_ONCE))
    return kept[:size].view(rows, columns)


_lent = threading.local()


def _bits(terms: int) -> int:
    """Return how many bits two factors may have, for sums of so many products to be exact in float64."""
    return (_MANTISSA - (terms - 1).bit_length()) // 2


def _power_of(x: torch.Tensor) -> torch.Tensor:
    """Return the largest power of two that is at most each row's largest magnitude, all in float64."""
    largest = torch.maximum(x.amax(-1, keepdim=True), x.amin(-1, keepdim=True).neg_())
    return (largest.view(torch.int64) & _EXPONENT).view(torch.float64)


def _slices(x: torch.Tensor, power: torch.Tensor | float, bits: int, count: int) -> list[torch.Tensor]:
    """Return so many tensors that add up to `x`, but for what is beyond the last one's bits; `x` is used up.

    Each has so many bits, the first one from twice `power` down: no number of `x` may be larger.
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
    """Return the product of two sums of slices: each pair's is exact, and their sum is elementwise."""
    first, *others = [one @ other for one in left for other in right]
    for other in others:
        first = first + other
    return first


def _weights(grams: Sequence[torch.Tensor], bits: int, count: int) -> list[list[torch.Tensor]]:
    """Return the weights that make rows orthonormal, given the products of the rows; in slices.

    They fit slices of rows that have so many bits. All matrices take the way together, filled up with zeros:
    they are small, and most of the time goes into calls.
    """
    most = max(gram.shape[-1] for gram in grams)
    filled = [functional.pad(gram, (0, most - gram.shape[-1]) * 2) for gram in grams]
    weights = _whitening(torch.cat(filled))
    slices = _slices(weights, _power_of(weights), _MANTISSA - bits - (most - 1).bit_length(), count)
    apart = zip(*(one.split([len(gram) for gram in grams]) for one in slices), strict=True)
    return [
        [one[:, : gram.shape[-1], : gram.shape[-1]] for one in own]
        for own, gram in zip(apart, grams, strict=True)
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
        norm = torch.where(square > least[:, place], square.sqrt(), torch.inf)
        row /= norm
        later -= (later[:, :, place] / norm).unsqueeze(-1) * row.unsqueeze(1)
    return both[..., count:]
