"""Scales of blocks, and sums with the same bits on every processor."""

import torch


def scale_of(x: torch.Tensor, levels: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's scale, its largest magnitude over `levels`, and the reciprocal.

    The reciprocal is 0 where it would not be finite. A row with a non-finite number has a non-finite scale.
    """
    # abs: of zeros the sign that `maximum` returns depends on the processor.
    most = torch.maximum(x.amax(1, keepdim=True), x.amin(1, keepdim=True).neg_()).abs_()
    return most / levels, torch.where(most > TINY, most.reciprocal() * levels, 0.0)


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


TINY = 1e-33
"""Rows whose numbers are all smaller than this are treated as zero, because reciprocals would overflow."""
