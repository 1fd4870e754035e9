"""Arithmetic that is rounded in the same way on every device.

An elementwise operation has one correct rounding, so its bits do not depend on the device. Two of torch's
spellings break this, and the functions here replace them:

- CUDA and XPU divide by a Python number, or by a scalar on the CPU, as a multiplication by its reciprocal.
- `add(..., alpha=...)` rounds once on GPUs and in the vector loops of some CPUs, and twice elsewhere.
"""

import torch


def divide(x: torch.Tensor, by: float) -> torch.Tensor:
    """Return a tensor divided by a number, each quotient rounded once.

    Args:
        x: Numbers of at least float32, the precision in which the divisor is exact enough.
        by: The divisor.

    >>> divide(torch.tensor([1.0, 5.0]), 127)
    tensor([0.0079, 0.0394])
    """
    return x / x.new_full((), by)


def divide_in_place(x: torch.Tensor, by: float) -> torch.Tensor:
    """Divide a tensor by a number in place, as `divide` does, and return it."""
    return x.div_(x.new_full((), by))


def add_scaled(x: torch.Tensor, other: torch.Tensor, factor: float) -> torch.Tensor:
    """Add `factor` times another tensor in place, the product rounded before the sum, and return `x`.

    >>> add_scaled(torch.tensor([1.0]), torch.tensor([3.0]), 0.5)
    tensor([2.5000])
    """
    # The product with 1 or -1 is exact, so the sum is rounded once whether it is fused or not.
    return x.add_(other, alpha=factor) if factor in (1, -1) else x.add_(other * factor)
