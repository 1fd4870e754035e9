"""Block encodings of many tensors at once, fused with error feedback, averaging and finiteness checks.

"Pieces" are contiguous float32 CPU tensors. Each piece is padded with zeros to whole blocks of `block`
numbers. The blocks of all pieces follow each other in `scales`, one float32 per block, and in `codes`,
block * bits / 8 bytes per block. Both may be of any shape.

Arithmetic is float32, every operation is rounded by itself, and sums are taken in a fixed order:

    x = value + (keep * residual)
    mean = ((rank 0 + rank 1) + (rank 2 + rank 3) + ...) / world, in pairs; this rank's own is x, not decoded
    error = x - decoded                       (of a mean: (mean - decoded) * world)
    into = into + (weight * decoded)

Torch computes the same bits with one operation for each operator above. `add(..., alpha=)` does not, except
with a factor of 1 or -1, because it may fuse two operations. Equal bits let ranks with and without native
code train together, and let tests compare both paths.
"""

import ctypes
from collections.abc import Sequence

import torch

from thinwire.errors import OptionError
from thinwire.kernels.library import Pieces, native
from thinwire.kernels.tensors import address_of, addressable, addresses, lengths_of, scratch

KINDS = {"int8": (0, 8), "int4": (1, 4), "sign": (2, 1), "e4m3": (3, 8), "e5m2": (4, 8), "int2": (5, 2)}
"""Encodings: their index in blocks.c, and their bits per number."""

Tensors = Sequence[torch.Tensor]
Encoding = tuple[torch.Tensor, torch.Tensor]
"""Scales and codes."""


def supported(kind: str, tensors: Tensors) -> bool:
    """Return whether the functions of this module can be called with these pieces.

    Args:
        kind: "int8", "int4", "int2", "sign", "e4m3" or "e5m2". Others are not supported.
        tensors: Values, residuals, errors or tensors to decode into.

    Returns:
        Whether native code is in use, and all tensors are plain contiguous float32 tensors on the CPU.
    """
    return kind in KINDS and addressable(tensors)


def bits_of(kind: str) -> int:
    """Return the bits per number of an encoding."""
    return KINDS[kind][1]


def encode(
    kind: str,
    block: int,
    values: Tensors,
    residuals: Tensors | None,
    keep: float,
    errors: Tensors | None,
    scales: torch.Tensor,
    codes: torch.Tensor,
) -> None:
    """Encode value + keep * residual of all pieces, and write the error of the encoding.

    Args:
        kind: The encoding, see `supported`.
        block: Numbers in a block.
        values: Pieces to encode.
        residuals: Pieces to add to the values, or None.
        keep: Factor of the residuals.
        errors: Pieces to write x - decoded to, or None. They may be the values or the residuals themselves.
        scales: Overwritten, one number per block.
        codes: Overwritten, one row of bytes per block.

    Raises:
        OptionError: Sizes or dtypes do not fit.
    """
    which, width = _checked(kind, block, values, scales, codes)
    job = _Job(values, residuals, keep, errors)
    _library().tw_encode(
        which, width, job.pieces, scales.data_ptr(), codes.data_ptr(), scratch(2 * block).data_ptr()
    )


def mean_encode(
    kind: str,
    block: int,
    values: Tensors,
    residuals: Tensors | None,
    keep: float,
    received: Sequence[Encoding],
    rank: int,
    errors: Tensors | None,
    scales: torch.Tensor,
    codes: torch.Tensor,
) -> None:
    """Average this rank's numbers and received encodings, and encode the mean, as `TwoShot` does.

    Args:
        kind: The encoding, see `supported`.
        block: Numbers in a block.
        values: This rank's own pieces.
        residuals: Pieces to add to the values, or None.
        keep: Factor of the residuals.
        received: Scales and codes of the other ranks, in the order of ranks.
        rank: This rank.
        errors: Pieces to write (mean - decoded) * world to, or None. They may be the values or the residuals.
        scales: Overwritten, one number per block. Not one of `received`.
        codes: Overwritten, one row of bytes per block. Not one of `received`.

    Raises:
        OptionError: Sizes or dtypes do not fit.
    """
    which, width = _checked(kind, block, values, scales, codes)
    for row in received:
        _checked(kind, block, values, *row)
    if not 0 <= rank <= len(received):
        raise OptionError(
            f"rank={rank} of {len(received) + 1} ranks: pass a number from 0 to {len(received)}"
        )
    world = len(received) + 1
    job = _Job(values, residuals, keep, errors)
    all_scales, all_codes = addresses(row[0] for row in received), addresses(row[1] for row in received)
    _library().tw_mean_encode(
        which,
        width,
        job.pieces,
        rank,
        world,
        address_of(all_scales),
        address_of(all_codes),
        scales.data_ptr(),
        codes.data_ptr(),
        scratch((2 + world.bit_length()) * block).data_ptr(),
    )


def decode(kind: str, block: int, scales: torch.Tensor, codes: torch.Tensor, into: Tensors) -> None:
    """Write the encoded numbers to pieces.

    Args:
        kind: The encoding, see `supported`.
        block: Numbers in a block.
        scales: One number per block.
        codes: One row of bytes per block.
        into: Pieces, overwritten.

    Raises:
        OptionError: Sizes or dtypes do not fit.
    """
    _call_into("tw_decode", kind, block, scales, codes, into)


def add(
    kind: str, block: int, scales: torch.Tensor, codes: torch.Tensor, into: Tensors, weight: float = 1.0
) -> None:
    """Add `weight` times the encoded numbers to pieces.

    Args:
        kind: The encoding, see `supported`.
        block: Numbers in a block.
        scales: One number per block.
        codes: One row of bytes per block.
        into: Pieces, changed in place.
        weight: Factor of the encoded numbers.

    Raises:
        OptionError: Sizes or dtypes do not fit.
    """
    _call_into("tw_add", kind, block, scales, codes, into, weight)


def finite(x: torch.Tensor) -> torch.Tensor:
    """Return whether all numbers of a tensor are finite.

    Minimum and maximum propagate infinity and NaN. On a CPU they take about as long as a sum (155 against 131
    us for a million numbers, one thread), which huge finite numbers could overflow.

    Args:
        x: Tensor of any real floating dtype, on any device.

    Returns:
        A scalar bool tensor on the device of `x`. The host has not read it. True for an empty tensor.

    >>> finite(torch.tensor([1.0, 3e38, 3e38])), finite(torch.tensor([1.0, float("nan")]))
    (tensor(True), tensor(False))
    """
    if addressable([x]):
        return _flag(_library().tw_finite(x.data_ptr(), x.numel()))
    if x.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=x.device)
    if x.device.type == "cuda":
        norm: torch.Tensor = torch.linalg.vector_norm(x, torch.inf)
        return norm < torch.inf
    low, high = x.aminmax()
    return low * 0 == high * 0  # NaN, which equals nothing, unless both are finite


def _flag(value: int) -> torch.Tensor:
    return torch.tensor(bool(value), dtype=torch.bool, device="cpu")


class _Job:
    """The struct `Pieces` of a call, and the arrays that it points to."""

    def __init__(
        self, values: Tensors, residuals: Tensors | None, keep: float, errors: Tensors | None
    ) -> None:
        for name, others in (("residuals", residuals), ("errors", errors)):
            _check_like(name, others, values)
        self._arrays = [lengths_of(values), addresses(values)]
        self._arrays += [addresses(others or ()) for others in (residuals, errors)]
        lengths, own, added, missed = map(address_of, self._arrays)
        self.pieces = Pieces(
            len(values), lengths, own, added if residuals else None, missed if errors else None, keep
        )


def _library() -> ctypes.CDLL:
    library = native()
    if library is None:
        raise OptionError(
            "native code is not in use: call `supported` first, and the codec's own functions if it is False"
        )
    return library


def _call_into(
    name: str,
    kind: str,
    block: int,
    scales: torch.Tensor,
    codes: torch.Tensor,
    into: Tensors,
    *options: float,
) -> None:
    """Call a function of the library that decodes to pieces."""
    which, width = _checked(kind, block, into, scales, codes)
    lengths, targets = lengths_of(into), addresses(into)
    places = address_of(lengths), address_of(targets)
    call = getattr(_library(), name)
    call(which, width, len(into), *places, scales.data_ptr(), codes.data_ptr(), *options)


def _checked(
    kind: str, block: int, pieces: Tensors, scales: torch.Tensor, codes: torch.Tensor
) -> tuple[int, int]:
    """Return the encoding's index and the width of blocks. Raise OptionError if the library would overrun."""
    which, bits = KINDS[kind]
    _check_pieces("pieces", pieces)
    if block < 1 or block * bits % 8:
        raise OptionError(f"block={block} must be positive and fill whole bytes at {bits} bits per number")
    count = sum(-(-piece.numel() // block) for piece in pieces)
    fit = scales.numel() == count and codes.numel() * codes.element_size() == count * block * bits // 8
    plain = scales.dtype is torch.float32 and scales.is_contiguous() and codes.is_contiguous()
    if not fit or not plain or scales.device.type != "cpu" or codes.device.type != "cpu":
        raise OptionError(
            f"scales {tuple(scales.shape)} {scales.dtype} and codes {tuple(codes.shape)} {codes.dtype} do not"
            f" fit {count} blocks of {block} {kind} numbers: pass contiguous CPU tensors, {count} scales"
            f" and {count * block * bits // 8} bytes of codes"
        )
    return which, block


def _check_pieces(name: str, pieces: Tensors) -> None:
    """Raise OptionError unless the library can read and write the memory of all pieces."""
    if not addressable(pieces):
        forms = [(tuple(piece.shape), piece.stride(), piece.dtype, piece.device.type) for piece in pieces]
        raise OptionError(
            f"{name} {forms} cannot be passed to native code, which takes contiguous float32 CPU tensors:"
            " call `supported` first, and the codec's own functions if it is False"
        )


def _check_like(name: str, others: Tensors | None, values: Tensors) -> None:
    """Raise OptionError unless `others` is None or has the lengths of `values`."""
    _check_pieces(name, others or ())
    if others is not None and [piece.numel() for piece in others] != [piece.numel() for piece in values]:
        raise OptionError(
            f"{name} have {[piece.numel() for piece in others]} numbers and values"
            f" {[piece.numel() for piece in values]}: pass one piece of the same length for each"
        )
