"""Arithmetic that is rounded in the same way on every device.

An elementwise operation has one correct rounding, so its bits do not depend on the device. Two of torch's
spellings break this, and the functions here replace them:

- CUDA and XPU divide by a Python number, or by a scalar on the CPU, as a multiplication by its reciprocal.
- `add(..., alpha=...)` rounds once on GPUs and in the vector loops of some CPUs, and twice elsewhere.
"""

import math
from collections.abc import Iterable

import torch


def divide(x: torch.Tensor, by: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return a tensor divided by a number, each quotient rounded once.

    Args:
        x: Numbers of at least float32, the precision in which the divisor is exact enough.
        by: The divisor.
        out: A tensor to write the quotients to, or None for a new one.

    >>> divide(torch.tensor([1.0, 5.0]), 127)
    tensor([0.0079, 0.0394])
    """
    if _exact_inverse(by):
        return torch.mul(x, 1 / by, out=out)
    return torch.div(x, x.new_full((), by), out=out)


def divide_in_place(x: torch.Tensor, by: float) -> torch.Tensor:
    """Divide a tensor by a number in place, as `divide` does, and return it."""
    return x.mul_(1 / by) if _exact_inverse(by) else x.div_(x.new_full((), by))


def _exact_inverse(by: float) -> bool:
    """Return whether a divisor is a power of two: a product with its inverse has the quotient's bits."""
    return math.frexp(by)[0] == 0.5


def add_scaled(x: torch.Tensor, other: torch.Tensor, factor: float) -> torch.Tensor:
    """Add `factor` times another tensor in place, the product rounded before the sum, and return `x`.

    >>> add_scaled(torch.tensor([1.0]), torch.tensor([3.0]), 0.5)
    tensor([2.5000])
    """
    # The product with 1 or -1 is exact, so the sum is rounded once whether it is fused or not.
    return x.add_(other, alpha=factor) if factor in (1, -1) else x.add_(other * factor)


def sum_pairs(x: torch.Tensor) -> torch.Tensor:
    """Return the sum over the first dimension, in pairs: (x0 + x1) + (x2 + x3) + ... `x` is overwritten.

    The order is fixed, because torch.sum's depends on the device. A level of pairs is one operation, so an
    accelerator launches few kernels for any number of ranks. An odd last one is carried to the next level.

    >>> sum_pairs(torch.tensor([[1.0], [2.0], [4.0]]))
    tensor([7.])
    """
    while len(x) > 1:
        even = len(x) // 2 * 2
        x[0:even:2].add_(x[1:even:2])
        x = x[::2]
    return x[0]


def sum_pairs_of(terms: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the sum of tensors that come one at a time, with the bits of `sum_pairs`. They are overwritten.

    >>> sum_pairs_of(torch.tensor([float(number)]) for number in (1, 2, 4))
    tensor([7.])
    """
    # The sums that wait for their partner, like the ones of a binary counter.
    waiting: list[torch.Tensor] = []
    for number, term in enumerate(terms):
        while number & 1:
            term = waiting.pop().add_(term)
            number >>= 1
        waiting.append(term)
    total = waiting.pop()
    while waiting:
        total = waiting.pop().add_(total)
    return total
