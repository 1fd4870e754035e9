"""Finiteness as a tensor, computed on the gradients' device and read by the host once, when a step ends."""

from collections.abc import Sequence

import torch

from thinwire.engine.pack import real_numbers
from thinwire.kernels import blocks


def finite(x: torch.Tensor) -> torch.Tensor:
    """Return whether all elements are finite, as a scalar bool tensor that the host does not read.

    Args:
        x: Tensor of any shape and floating or complex dtype, dense or sparse.

    Returns:
        A scalar bool tensor on the device of `x`. True for an empty tensor.

    >>> finite(torch.tensor([1.0, 3e38, 3e38])), finite(torch.tensor([1.0, float("nan")]))
    (tensor(True), tensor(False))
    """
    return blocks.finite(real_numbers(x.coalesce().values() if x.is_sparse else x))


def all_true(flags: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return whether all flags are true, as a scalar bool tensor that the host does not read.

    >>> all_true([torch.tensor(True), torch.tensor(False)])
    tensor(False)
    """
    return flags[0] if len(flags) == 1 else torch.stack(list(flags)).all()


def all_finite(x: torch.Tensor) -> bool:
    """Return whether all elements are finite. The host waits for the result."""
    return bool(finite(x).item())
