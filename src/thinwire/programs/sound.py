"""What any saved number and tensor must be, whoever's state it is."""

import torch

from thinwire.codecs.codec import is_whole
from thinwire.errors import StateError
from thinwire.programs.overflow import all_finite

_MOST = 1 << 48
"""No job counts so far; larger numbers do not fit where steps become seeds."""


def check_count(what: str, value: object) -> None:
    """Refuse what cannot have been counted."""
    if not is_whole(value) or not 0 <= value < _MOST:
        raise StateError(f"{what}={value!r} must be a whole number from 0 on, below 2**48")


def check_tensor(what: str, tensor: object, *, finite: bool = True) -> None:
    """Refuse what is no ordinary tensor, and numbers that would spread to the whole model."""
    if (
        not isinstance(tensor, torch.Tensor)
        or tensor.layout != torch.strided
        or tensor.is_quantized
        or tensor.is_meta
    ):
        raise StateError(f"the saved {what} is a {type(tensor).__name__} that is no dense tensor")
    if finite and (tensor.is_floating_point() or tensor.is_complex()) and not all_finite(tensor):
        raise StateError(f"the saved {what} holds inf or NaN: go back to an earlier checkpoint")
