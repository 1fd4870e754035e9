"""torch's operations on lists of tensors, which an accelerator runs in one launch, in one place.

| name | purpose | since |
|---|---|---|
| `torch._foreach_copy_`, `_foreach_zero_` | write many tensors at once | 2.6 |
| `torch._foreach_add_`, `_foreach_mul` | add many tensors, or multiply them by a number | 2.6 |

Since: the oldest inspected version that has it. All are in 2.6, 2.9, 2.13 and 2.15.
"""

from collections.abc import Sequence

import torch

from thinwire.version import private

Tensors = Sequence[torch.Tensor]


def copy_all(into: Tensors, tensors: Tensors) -> None:
    """Copy each tensor into the one at its place."""
    if into:
        private(torch, "_foreach_copy_")(into, tensors)


def zero_all(tensors: Tensors) -> None:
    """Fill all tensors with zeros."""
    if tensors:
        private(torch, "_foreach_zero_")(tensors)


def add_all(to: Tensors, tensors: Tensors, factor: float) -> None:
    """Add `factor` times each tensor to the one at its place, the product rounded before the sum.

    >>> x = torch.ones(2)
    >>> add_all([x], [torch.tensor([1.0, 2.0])], 0.5)
    >>> x
    tensor([1.5000, 2.0000])
    """
    if to:
        added = tensors if factor == 1 else private(torch, "_foreach_mul")(tensors, factor)
        private(torch, "_foreach_add_")(to, added)
