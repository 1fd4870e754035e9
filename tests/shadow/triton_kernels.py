"""Triton's kernels on the shadow device: launched by Triton itself, and run as PTX by the evaluator.

Triton asks its driver for a device, a stream and a way to launch. Here the driver is one of our own, for a
GPU that does not exist. Everything before the launch is as on a GPU: thinwire's tables, Triton's
specialisation on the arguments, and compilation. The launch runs the PTX on the shadow device's memory, and
tells the device which memory the kernel has read and written, and so on which stream.
"""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from tests.kernels.triton.ptx import Array, Machine, Memory
from tests.shadow import device
from thinwire.kernels.triton import launch
from thinwire.programs import triton_coder

TARGET = GPUTarget("cuda", 90, 32)
launches: dict[str, int] = {}
"""The number of launches, by kernel."""


class DeviceMemory(Memory):
    """The live memory of the shadow device, and which of it a kernel has used."""

    def __init__(self) -> None:
        super().__init__()
        self._used: dict[tuple[int, bool], tuple[int, int]] = {}
        for address, size in device.load().live():
            self.add(address, np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address)))

    def load(self, addresses: Array, size: int, thread: Array, cta: Array, era: int) -> Array:
        self._note(addresses, size, writes=False)
        return super().load(addresses, size, thread, cta, era)

    def store(self, addresses: Array, size: int, values: Array, thread: Array, cta: Array, era: int) -> None:
        self._note(addresses, size, writes=True)
        super().store(addresses, size, values, thread, cta, era)

    def report(self, kernel: str) -> None:
        """Tell the device what was used."""
        for (_, writes), (begin, end) in self._used.items():
            device.load().use(begin, end, writes, kernel)

    def _note(self, addresses: Array, size: int, *, writes: bool) -> None:
        for chosen, _, index in self._split(addresses, size):
            own = addresses[chosen]
            key = int(own[0]) - int(index[0]), writes
            begin, end = self._used.get(key, (int(own.min()), 0))
            self._used[key] = min(begin, int(own.min())), max(end, int(own.max()) + size)


class _Launcher:
    """What Triton calls to launch a compiled kernel."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self._source = source
        # Triton has just compiled it, so this comes from its cache.
        options = {"num_warps": metadata.num_warps, "enable_fp_fusion": metadata.enable_fp_fusion}
        self._machine = Machine(triton.compile(source, target=TARGET, options=options).asm["ptx"])

    def __call__(self, x: int, y: int, z: int, stream: int, function: Any, *rest: Any) -> None:
        _, _, _, _, *arguments = rest  # metadata, and hooks
        name = self._source.fn.__name__
        launches[name] = launches.get(name, 0) + 1
        memory = DeviceMemory()
        self._machine.run((x, y), memory, self._passed(arguments))
        memory.report(name)

    def _passed(self, arguments: Sequence[Any]) -> list[int | float]:
        """Return the arguments that are left after compilation."""
        named = zip(self._source.fn.arg_names, arguments, strict=True)
        left = [value for name, value in named if self._source.signature[name] != "constexpr"]
        return [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in left]


class _Driver:
    """Triton's driver of a GPU that does not exist."""

    launcher_cls = _Launcher
    utils = SimpleNamespace(
        load_binary=lambda name, kernel, shared, device: (0, None, 0, 0, 1024),
        get_device_properties=lambda device: {"max_shared_mem": 1 << 16},
    )

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def on_the_shadow_device() -> Iterator[None]:
    """Use Triton's kernels on the shadow device."""
    launches.clear()
    driver.set_active(_Driver())  # it stays: without a GPU Triton has no other to go back to
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "DEVICES", (*launch.DEVICES, "shadow"))
        # Pinned memory is the work of a GPU's driver.
        patch.setattr(triton_coder, "_uploaded", lambda table, device: table.to(device, non_blocking=True))
        yield
