"""Validation of saved numbers and tensors, common to all states."""

import torch

from thinwire.codecs.checks import is_whole
from thinwire.errors import StateError
from thinwire.programs.finite import all_finite

_MOST = 1 << 48
"""An exclusive limit of counts. No job reaches it, and larger numbers overflow seeds made from steps."""


def check_count(what: str, value: object) -> None:
    """Raise StateError unless `value` is a whole number from 0 to below 2**48."""
    if not is_whole(value) or not 0 <= value < _MOST:
        raise StateError(f"{what}={value!r} must be a whole number from 0 to below 2**48")


def check_tensor(what: str, tensor: object, *, finite: bool = True) -> None:
    """Raise StateError unless `tensor` is a dense tensor, and finite unless `finite` is False."""
    if (
        not isinstance(tensor, torch.Tensor)
        or tensor.layout != torch.strided
        or tensor.is_quantized
        or tensor.is_meta
    ):
        raise StateError(f"the saved {what} is a {type(tensor).__name__}, not a dense tensor")
    if finite and (tensor.is_floating_point() or tensor.is_complex()) and not all_finite(tensor):
        raise StateError(f"the saved {what} contains inf or NaN: load an earlier checkpoint")
