"""Tensors as addresses, for calls into the library."""

import threading
from array import array
from collections.abc import Iterable, Sequence

import torch

from thinwire.kernels.library import native


def addressable(tensors: Iterable[torch.Tensor], dtype: torch.dtype = torch.float32) -> bool:
    """Return whether the library can be called with the memory of these tensors.

    It can if native code is in use and all are plain, contiguous CPU tensors of `dtype`. Fake tensors and
    other subclasses have no memory.
    """
    return native() is not None and all(
        type(tensor) is torch.Tensor
        and tensor.dtype is dtype
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_neg()
        for tensor in tensors
    )


def addresses(tensors: Iterable[torch.Tensor]) -> "array[int]":
    """Return the tensors' addresses as a C array. The tensors must outlive its use."""
    return array("q", [tensor.data_ptr() for tensor in tensors])


def address_of(numbers: "array[int]") -> int:
    """Return the address of a C array."""
    return numbers.buffer_info()[0]


def lengths_of(tensors: Sequence[torch.Tensor]) -> "array[int]":
    """Return the tensors' numbers of elements as a C array."""
    return array("q", [tensor.numel() for tensor in tensors])


def scratch(numbers: int) -> torch.Tensor:
    """Return an uninitialised float32 tensor, valid until the next call in this thread."""
    kept: torch.Tensor | None = getattr(_kept, "scratch", None)
    if kept is None or kept.numel() < numbers:
        kept = _kept.scratch = torch.empty(numbers, dtype=torch.float32, device="cpu")
    return kept


_kept = threading.local()
