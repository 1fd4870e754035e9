"""torch's operations on lists of tensors, which an accelerator runs in one launch, in one place.

| name | purpose | since |
|---|---|---|
| `torch._foreach_copy_`, `_foreach_zero_` | write many tensors at once | 2.6 |
| `torch._foreach_add_`, `_foreach_sub_` | add or subtract many tensors at once | 2.6 |
| `torch._foreach_mul` | multiply many tensors by a number | 2.6 |
| `UntypedStorage._cdata` | compare the memory of tensors, also of fake ones | 2.6 |

Since: the oldest inspected version that has it. All are in 2.6, 2.9, 2.13 and 2.15.
"""

from collections.abc import Sequence
from itertools import pairwise

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


def subtract_all(tensors: Tensors, of: Tensors) -> None:
    """Subtract each tensor from the one at its place in `of`.

    >>> x = torch.ones(2)
    >>> subtract_all([torch.tensor([1.0, 2.0])], of=[x])
    >>> x
    tensor([ 0., -1.])
    """
    if of:
        private(torch, "_foreach_sub_")(of, tensors)


def stack_of(tensors: Tensors) -> torch.Tensor:
    """Return tensors of one shape as a stack, to be read: a view if their distances in memory are equal.

    >>> numbers = torch.arange(6)
    >>> stack_of([numbers[:2], numbers[3:5]])
    tensor([[0, 1],
            [3, 4]])
    >>> stack_of([numbers[:2], numbers[3:5]]).data_ptr() == numbers.data_ptr()
    True
    """
    first = tensors[0]
    distances = {after.storage_offset() - before.storage_offset() for before, after in pairwise(tensors)}
    alike = all(tensor.stride() == first.stride() and shares_memory(tensor, first) for tensor in tensors)
    if len(distances) > 1 or min(distances, default=0) < 0 or not alike:
        return torch.stack(list(tensors))
    return first.as_strided((len(tensors), *first.shape), (*(distances or {first.numel()}), *first.stride()))


def shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are views of one storage."""
    return bool(private(one.untyped_storage(), "_cdata") == private(other.untyped_storage(), "_cdata"))
