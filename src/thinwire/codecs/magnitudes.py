"""Scales and magnitudes of blocks, with the same bits on every processor."""

import torch

from thinwire.codecs.rounding import divide

TINY = 1e-33
"""Rows whose numbers are all smaller than this are treated as zero, because reciprocals would overflow."""


def scale_of(x: torch.Tensor, levels: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's scale, its largest magnitude over `levels`, and the reciprocal.

    The reciprocal is 0 where it would not be finite. A row with a non-finite number has a non-finite scale.
    """
    # abs: of zeros the sign that `maximum` returns depends on the processor.
    # amax and amin are six times as fast as aminmax by rows, or a norm (benchmarks/codecs.py).
    most = torch.maximum(x.amax(1, keepdim=True), x.amin(1, keepdim=True).neg_()).abs_()
    return divide(most, levels), torch.where(most > TINY, most.reciprocal() * levels, 0.0)


def sums_of(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of each row as a column. `x` is overwritten.

    The second half is added to the first until one column is left. torch.sum's order, and so its last bits,
    depend on the processor and the number of threads.
    """
    left = x.shape[1]
    while left > 1:
        half = (left + 1) // 2
        x[:, : left - half].add_(x[:, half:left])
        left = half
    return x[:, :1]


def encode_magnitudes(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode each row as sign * (low + step * code).

    With 2 bits, `low` is the mean of the magnitudes up to their root mean square, and low + step the mean of
    those above it. With more bits, the steps divide the range from the smallest to the largest. If a row has
    zeros, `low` is zero, so that they stay zeros.

    Args:
        x: A float32 matrix.
        bits: Bits of a number, with its sign: 2 to 8.

    Returns:
        `low` and `step` of each row, as two columns of bf16, and integers of `bits` bits, the sign in the
        lowest. A row with a non-finite number has a non-finite `low`.
    """
    magnitudes, levels = x.abs(), 2 ** (bits - 1) - 1
    least, most = magnitudes.amin(1, keepdim=True), magnitudes.amax(1, keepdim=True)
    if bits == 2:
        low, high, _ = two_means(magnitudes, 1.0)
        low = torch.where(least > 0, low, 0.0)
    else:
        low, high = least, most
    low = low.bfloat16()
    step = divide(high - low, levels).bfloat16().float()
    inverse = torch.where(step > TINY, step.reciprocal(), 0.0)
    codes = ((magnitudes - low) * inverse).round_().clamp_(0, levels).nan_to_num_(0.0).to(torch.uint8)
    # Zero times a non-finite number is NaN, whichever of the row's numbers it was.
    ranges = torch.cat([low + most * 0, step.bfloat16()], dim=1).bfloat16()
    return ranges, codes.mul_(2).add_(x < 0)


def decode_magnitudes(ranges: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Return the float32 numbers that `encode_magnitudes` encoded, each operation rounded by itself."""
    low, step = ranges.float().unbind(1)
    magnitudes = (codes >> 1).float().mul_(step.unsqueeze(1)).add_(low.unsqueeze(1))
    return torch.where(codes.bitwise_and(1).bool(), -magnitudes, magnitudes)


def two_means(magnitudes: torch.Tensor, threshold: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Divide each row's magnitudes into small and large ones.

    Sums are taken in a fixed order, so that their bits depend on neither the processor nor the threads.

    Args:
        magnitudes: A float32 matrix.
        threshold: A number is large if its square exceeds `threshold` times the row's mean square. If squares
            overflow or underflow, no number is large.

    Returns:
        The mean of the small numbers, the mean of the large ones, and a bool matrix of which are large. If a
        row has only one kind, both means are equal. The means of a row with a non-finite number are NaN.
    """
    width, total = magnitudes.shape[1], sums_of(magnitudes.clone())
    squares = magnitudes * magnitudes
    large = squares > divide(sums_of(squares.clone()), width) * threshold
    count = large.sum(1, keepdim=True)
    above = sums_of(torch.where(large, magnitudes, 0.0))
    high, low = above / count.clamp_min(1), (total - above) / (width - count).clamp_min(1)
    missing = total * 0  # NaN where the total is not finite
    return (
        torch.where(count == width, high, low) + missing,
        torch.where(count == 0, low, high) + missing,
        large,
    )
