"""Fake CUDA tensors: devices and dtypes without memory or kernels, with the rules of a GPU enforced.

torch's fake tensors check that every operation exists for the devices and dtypes of its arguments. On a build
of torch without CUDA they need the guard in `guard.cpp`. `FakeCuda` rejects what they accept and a GPU pays
for: copies between host and device, and operations with other roundings than the CPU's.
"""

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.native_build import library, missing

aten = torch.ops.aten
_NO_KERNEL = {
    aten._unsafe_view.default,
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.scalar_tensor.default,
    aten.lift_fresh.default,
    aten._local_scalar_dense.default,
    torch.ops.prim.device.default,
}
_DIVISIONS = {aten.div.Tensor, aten.div_.Tensor, aten.div.out, aten.div.Scalar, aten.div_.Scalar}
_SUMS = {aten.add.Tensor, aten.add_.Tensor, aten.add.out, aten.sub.Tensor, aten.sub_.Tensor, aten.sub.out}


class FakeCuda(TorchDispatchMode):
    """Raises where an operation leaves the device or has other bits on a GPU, and counts launches.

    Attributes:
        launches: The operations so far that launch a kernel, or several.
        peak: The most bytes so far of living tensors that operations have taken or returned.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches = self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        # Some operators make a number in Python a scalar on the CPU, which kernels take as an argument.
        away = [tensor.device for tensor in tensors if tensor.device.type != "cuda" and tensor.dim()]
        assert not away, f"{func} with a tensor on {away[0]}: a hidden CPU tensor, or a copy to the host"
        _check_rounding(func, args, kwargs or {}, result)
        if func not in _NO_KERNEL and not func.is_view and any(tensor.numel() for tensor in tensors):
            self.launches += 1
        self._measure(tensors)
        return result

    def _measure(self, tensors: list[torch.Tensor]) -> None:
        """Update the peak. Memory is counted once, however many views it has."""
        storages = [tensor.untyped_storage() for tensor in tensors]
        new = [(StorageWeakRef(storage), storage.nbytes()) for storage in storages]
        if any(ref.cdata not in self._live for ref, _ in new):
            self._live = {key: kept for key, kept in self._live.items() if not kept[0].expired()}
            self._live.update((ref.cdata, (ref, nbytes)) for ref, nbytes in new)
            self.peak = max(self.peak, sum(nbytes for _, nbytes in self._live.values()))


def _check_rounding(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Raise if CUDA's kernel rounds otherwise than the CPU's."""
    if not isinstance(result, torch.Tensor) or not result.is_floating_point():
        return
    if func in _DIVISIONS:
        by = args[1]
        exact = isinstance(by, torch.Tensor) and by.device.type == "cuda"
        assert exact, f"{func} by {by}: CUDA multiplies by the reciprocal; divide by a tensor on the device"
    if func in _SUMS:
        factor = kwargs.get("alpha", 1)
        assert factor in (1, -1), f"{func} with alpha={factor}: a fused multiply-add on GPUs, rounded once"


@functools.cache
def unavailable() -> str | None:
    """Return why there are no fake CUDA tensors here, or None if there are."""
    return None if torch.cuda.is_available() else missing()


@contextmanager
def fake_cuda() -> Iterator[None]:
    """Make tensors on "cuda" fake ones within the block. Call it where `unavailable` is None."""
    if not torch.cuda.is_available():
        _install_guard()
    with FakeTensorMode():
        yield


@functools.cache
def _install_guard() -> None:
    """Register the guard, once in a process and for good: torch keeps a pointer to it."""
    ctypes.CDLL(str(library(Path(__file__).with_name("guard.cpp")))).install()
