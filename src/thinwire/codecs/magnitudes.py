"""Scales and magnitudes of blocks, with the same bits on every processor."""

import functools
import math

import torch
from torch.nn import functional

from thinwire.codecs.rounding import divide

TINY = 1e-33
"""Ranges smaller than this are treated as zero, because reciprocals would overflow."""

SMALLEST = 2.0**-126
"""The smallest scale: float32's smallest normal number. The reciprocal of zero would be infinite."""

_UNIT = 2.0**-20
"""Precision of sums of magnitudes, as a share of the largest. Sums of 32768 squares fit in 64 bits."""

_SMALLEST_UNIT = 1.2e-38
"""Rows whose unit is not above this are treated as zero. Smaller ones are subnormal."""


def scale_of(
    x: torch.Tensor, levels: float, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's scale, the largest magnitude times 1/levels or SMALLEST, and its reciprocal.

    Args:
        x: Rows along the last dimension.
        levels: The code of a row's largest magnitude.
        out: A tensor to write the scales to, or None for a new one.

    Returns:
        Scale and reciprocal of each row. Those of a row with a non-finite number are NaN, or infinity and 0.
    """
    # The factor is 1/levels rounded to float32, on every device: a division by a number is none on GPUs.
    scale: torch.Tensor = torch.clamp(largest_magnitude(x).mul_(1 / levels), min=SMALLEST, out=out)
    return scale, scale.reciprocal()


def largest_magnitude(x: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude over the last dimension, which stays. NaN if there is a NaN."""
    if x.device.type == "cuda":
        # One kernel that reads x once. Other devices' norms may lose NaN.
        norm: torch.Tensor = torch.linalg.vector_norm(x, torch.inf, dim=-1, keepdim=True)
        return norm
    if x.device.type == "cpu":
        # Six times as fast as aminmax by rows, or a norm (benchmarks/codecs.py).
        # abs: of zeros the sign that `maximum` returns depends on the processor.
        return torch.maximum(x.amax(-1, keepdim=True), x.amin(-1, keepdim=True).neg_()).abs_()
    return x.abs().amax(-1, keepdim=True)


def finite_scales(scales: torch.Tensor, levels: float = 1.0) -> torch.Tensor:
    """Return whether all scales times `levels` are finite, as a scalar bool tensor. Scales are not negative.

    >>> finite_scales(torch.tensor([2e36, 0.0]), 127), finite_scales(torch.tensor([3e36]), 127)
    (tensor(True), tensor(False))
    """
    return (scales <= _largest_scale(levels)).all()


@functools.cache
def _largest_scale(levels: float) -> float:
    """Return the largest float32 whose product with `levels` is rounded to a finite number."""
    # Products from here on are rounded to infinity. The quotient is no float32, except for odd factors of
    # 2^25 - 1, so that cutting it to 24 bits gives the number below it.
    mantissa, exponent = math.frexp((2.0**128 - 2.0**103) / levels)
    return math.ldexp(math.floor(math.ldexp(mantissa, 24)), exponent - 24)


def write_scaled(codes: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    """Write integers times their row's scale, in one kernel on an accelerator."""
    if out.device.type == "cpu":
        out.copy_(codes).mul_(scale)  # without a temporary copy of the codes in float32
    else:
        torch.mul(codes, scale, out=out)


def sums_of(x: torch.Tensor) -> torch.Tensor:
    """Return the sums over the last dimension, which stays with a length of 1. `x` is overwritten.

    The second half is added to the first until one column is left. torch.sum's order, and so its last bits,
    depend on the processor and the number of threads.
    """
    left = x.shape[-1]
    while left > 1:
        half = (left + 1) // 2
        x[..., : left - half].add_(x[..., half:left])
        left = half
    return x[..., :1]


def sums_of_magnitudes(x: torch.Tensor) -> torch.Tensor:
    """Return `sums_of` the magnitudes, for rows of even length, in one launch less. `x` stays as it is."""
    # A norm of two numbers is one sum, so its order is fixed.
    pairs: torch.Tensor = torch.linalg.vector_norm(x.unflatten(-1, (2, -1)), 1, dim=-2)
    return sums_of(pairs)


def _halved(x: torch.Tensor) -> torch.Tensor:
    """Return the first step of `sums_of` as a new tensor, and leave `x` as it is."""
    width = x.shape[-1]
    half = (width + 1) // 2
    if width % 2 == 0:
        return x[..., :half] + x[..., half:]
    first = x[..., :half].clone()
    first[..., : width - half].add_(x[..., half:])
    return first


def encode_magnitudes(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode each row as signs and magnitudes in few bits.

    With 2 bits, there are two magnitudes: the mean of those up to their root mean square, `low`, and of those
    above it, `high`. A number becomes the nearer one. With more bits, magnitudes are low + step * code, and
    the steps divide the range from the smallest to the largest. If a row has zeros, `low` is zero, so that
    they stay zeros.

    Args:
        x: A float32 matrix.
        bits: Bits of a number, with its sign: 2 to 8.

    Returns:
        `low`, and `high` or `step`, of each row, as two columns of bf16, and integers of `bits` bits, the
        sign in the lowest. A row with a non-finite number has a non-finite `low`.
    """
    magnitudes, levels = x.abs(), 2 ** (bits - 1) - 1
    low, high = magnitudes.aminmax(dim=1, keepdim=True)
    # Zero times a non-finite number is NaN, whichever of the row's numbers it was.
    missing = high * 0
    if bits == 2:
        means = _means_in_units(magnitudes, high)
        torch.where(low > 0, means[:, :1], missing, out=means[:, :1])
        ranges = means.to(torch.bfloat16)
        # The sum of two numbers has one order, and halving it is exact.
        codes = magnitudes > ranges.mean(1, keepdim=True, dtype=torch.float32)
    else:
        ranges = x.new_empty(x.shape[0], 2, dtype=torch.bfloat16)
        low_sent, step_sent = ranges[:, :1].copy_(low + missing), ranges[:, 1:]
        step = step_sent.copy_(divide(high - low_sent, levels)).float()
        # 1 / infinity is 0.
        inverse = functional.threshold(step, TINY, torch.inf).reciprocal_()
        level = magnitudes.sub_(low_sent).mul_(inverse).round_().clamp_(0, levels)
        codes = level.nan_to_num_(0.0).to(torch.uint8)
    negative = (x < 0).view(torch.uint8)
    return ranges, negative.add_(codes.view(torch.uint8), alpha=2)  # of integers, which are not rounded


def _means_in_units(magnitudes: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Return the means of each row's magnitudes up to their root mean square, and of those above it.

    Magnitudes are counted in units of a millionth of the largest. Sums of integers are exact, so their order
    does not matter: an accelerator takes one operation for each.
    """
    width = magnitudes.shape[1]
    unit = high * _UNIT
    inverse = functional.threshold(unit, _SMALLEST_UNIT, torch.inf).reciprocal_()  # 1 / infinity is 0
    # What a non-finite number becomes depends on the processor, but times its row's unit it is non-finite.
    whole = (magnitudes * inverse).to(torch.int64)
    squares = whole * whole
    large = squares > squares.sum(1, keepdim=True).floor_divide_(width)
    # Counts up to 2^24 are exact in float32.
    count = large.sum(1, keepdim=True, dtype=torch.float32)
    total, above = whole.sum(1, keepdim=True), (whole * large).sum(1, keepdim=True)
    # The smallest square does not exceed the mean, so there are always numbers that are not large. If none
    # is, the first quotient is 0 / 0, and fmax takes the other mean for it.
    means = magnitudes.new_empty(len(magnitudes), 2)
    low = torch.div(total - above, width - count, out=means[:, :1])
    torch.fmax(above / count, low, out=means[:, 1:])
    return means.mul_(unit)


def decode_magnitudes(ranges: torch.Tensor, codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the float32 numbers that `encode_magnitudes` encoded, each operation rounded by itself."""
    low, other = ranges.float().view(-1, 2).split(1, dim=1)
    large = codes > 1 if bits == 2 else None
    magnitudes = (codes >> 1).mul(other).add_(low) if large is None else torch.where(large, other, low)
    signed = codes.view(torch.int8) if codes.dtype == torch.uint8 else codes
    # The lowest bit, moved to where an integer has its sign.
    return magnitudes.copysign_(signed << 8 * signed.element_size() - 1)


def two_means(x: torch.Tensor, threshold: float, large: torch.Tensor) -> torch.Tensor:
    """Divide each row's magnitudes into small and large ones.

    Sums are taken in a fixed order, so that their bits depend on neither the processor nor the threads.

    Args:
        x: A float32 matrix.
        threshold: A number is large if its square exceeds `threshold` times the row's mean square. If squares
            overflow or underflow, no number is large.
        large: A bool tensor with the numbers of `x` in any shape that has a row for each of its rows.
            Overwritten with which numbers are large.

    Returns:
        The mean of the small numbers and that of the large ones, as two columns. If a row has only one kind,
        both means are equal. The means of a row with a non-finite number are non-finite.
    """
    rows, width = x.shape
    both = x.new_empty(2, rows, width)
    # One round of sums for the magnitudes and the squares.
    torch.abs(x, out=both[0])
    torch.mul(x, x, out=both[1])
    total, square = sums_of(_halved(both))
    # An infinite or NaN limit has no square above it. Then both means are that of all magnitudes.
    limit = square * (threshold / width)
    del square  # the last view of the sums' memory, as large as x
    shape = large.shape
    torch.gt(both[1].view(shape), limit.view(rows, *(1 for _ in shape[1:])), out=large)
    count = large.sum([*range(1, large.dim())]).unsqueeze(1)
    # Over the squares, which are not needed any more. A magnitude times 1 or 0 is exact.
    torch.mul(both[0].view(shape), large, out=both[1].view(shape))
    above = sums_of(both[1])
    # 0 / 0 is NaN, and fmax and fmin take the other mean for it. Otherwise the large mean is the larger one.
    means = x.new_empty(rows, 2)
    low, high = means.split(1, dim=1)
    torch.div(total - above, width - count, out=low)
    torch.fmax(above / count, low, out=high)
    if threshold <= 1:  # else the squares of a row cannot all exceed their mean, so some number is small
        torch.fmin(low, high, out=low)
    return means
