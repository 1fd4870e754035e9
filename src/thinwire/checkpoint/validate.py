"""Validation of saved numbers and tensors, common to all states."""

from collections.abc import Mapping

import torch

from thinwire.codecs.checks import is_whole
from thinwire.errors import StateError
from thinwire.programs.finite import all_finite

_MOST = 1 << 48
"""An exclusive limit of counts. No job reaches it, and larger numbers overflow the seeds made from steps."""


def check_count(what: str, value: object) -> None:
    """Raise StateError unless `value` is a whole number from 0 to below 2**48."""
    if not is_whole(value) or not 0 <= value < _MOST:
        raise StateError(f"{what}={value!r} must be a whole number from 0 to below 2**48")


def check_tensor(what: str, tensor: object, *, finite: bool = True) -> None:
    """Raise StateError unless `tensor` is a dense tensor, and finite unless `finite` is False.

    Buffers need not be finite: attention masks hold -inf.
    """
    if (
        not isinstance(tensor, torch.Tensor)
        or tensor.layout != torch.strided
        or tensor.is_quantized
        or tensor.is_meta
    ):
        raise StateError(f"the saved {what} is a {type(tensor).__name__}, not a dense tensor")
    if finite and (tensor.is_floating_point() or tensor.is_complex()) and not all_finite(tensor):
        raise StateError(f"the saved {what} contains inf or NaN: load an earlier checkpoint")


def check_tensors(
    what: str, saved: object, tensors: Mapping[str, torch.Tensor], *, finite: bool = True
) -> None:
    """Raise StateError if saved tensors do not have the names, shapes and kinds of the model's.

    Args:
        what: The singular noun for the tensors, for error messages.
        saved: The saved tensors by name.
        tensors: The tensors that they are loaded into.
        finite: Whether saved values must be finite.
    """
    if not isinstance(saved, dict) or set(saved) != set(tensors):
        raise StateError(f"the state's {what}s are not this model's: it was saved from another one")
    for name, tensor in saved.items():
        shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        if shape != tuple(tensors[name].shape):
            raise StateError(
                f"the saved {what} {name} has shape {shape}, the model's {tuple(tensors[name].shape)}: the"
                " state was saved from another model"
            )
        check_tensor(f"{what} {name}", tensor, finite=finite)
        if _kind(tensor) != _kind(tensors[name]):
            raise StateError(f"the saved {what} {name} is {tensor.dtype}, the model's {tensors[name].dtype}")


def _kind(tensor: torch.Tensor) -> tuple[bool, bool]:
    return tensor.is_floating_point(), tensor.is_complex()
