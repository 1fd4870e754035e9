"""Copies, comparisons and means of nested dicts, lists and tuples of tensors."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


def copied(tree: Any, copy: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> Any:
    """Return a copy of nested dicts, lists and tuples, with `copy` applied to each detached tensor."""
    if isinstance(tree, torch.Tensor):
        return copy(tree.detach())
    if isinstance(tree, Mapping):
        return {key: copied(value, copy) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)([copied(value, copy) for value in tree])
    return tree


def same(left: Any, right: Any) -> bool:
    """Return whether two nested values are equal, with all tensors in them."""
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and torch.equal(left, right)
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def means(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mean of each floating-point or complex tensor, and the first state's other values.

    >>> means([{"mean": torch.tensor([1.0]), "count": 3}, {"mean": torch.tensor([2.0]), "count": 4}])
    {'mean': tensor([1.5000]), 'count': 3}
    """
    made = {}
    for name, first in states[0].items():
        if isinstance(first, torch.Tensor) and (first.is_floating_point() or first.is_complex()):
            # In double precision the mean of equal numbers is that number, whatever the number of ranks.
            precise = torch.promote_types(first.dtype, torch.float64)
            made[name] = torch.stack([state[name].to(precise) for state in states]).mean(0).to(first.dtype)
        else:
            made[name] = copied(first)
    return made
