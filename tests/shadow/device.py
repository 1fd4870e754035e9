"""The shadow device in this process: torch.device("shadow"), its streams, and its backend "shadowccl".

`load` registers it for the life of the process. So it belongs into ranks, as `run_ranks(..., backend=SHADOW)`
starts them, and not into pytest's own process.
"""

import contextlib
import functools
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, distributed_c10d

from tests import native_build
from thinwire.engine.comm.process_group import torch_version

SHADOW = "cpu:gloo,shadow:shadowccl"
"""The backend of ranks on the shadow device, as "cpu:gloo,cuda:nccl" is of ranks on GPUs."""
_SOURCE = Path(__file__).with_name("shadow_device.cpp")


def unavailable() -> str | None:
    """Return why the shadow device cannot be compiled here; None if it can."""
    if torch_version() < (2, 13):
        return f"the shadow device needs torch 2.13 or later, and this is {torch.__version__}"
    return native_build.missing(python=True)


def library() -> Path:
    """Return the compiled device, which is built first if its sources have changed."""
    return native_build.library(_SOURCE, python=True)


@functools.cache
def load() -> ModuleType:
    """Register the device and its backend with torch; return the compiled module."""
    spec = importlib.util.spec_from_file_location(_SOURCE.stem, library())
    assert spec is not None
    assert spec.loader is not None
    compiled = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(compiled)
    torch.utils.rename_privateuse1_backend("shadow")
    torch._register_device_module("shadow", _DeviceModule)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend("shadowccl", _new_backend, extended_api=True, devices=["shadow"])
    return compiled


def reset() -> None:
    """Forget all races and counts so far, and a planted fault. The host waits for the device first."""
    load().heal()
    load().reset()


def races() -> list[str]:
    """Return the accesses since `reset` that no event orders, a sentence each; at most 40 of them."""
    return list(load().races())


def counts() -> dict[str, int]:
    """Return how often the device did something since `reset`: "host waits", "collectives", "races", ..."""
    return dict(load().counts())


def operations() -> dict[str, int]:
    """Return how often each operation ran since `reset`, and what the host waited for."""
    return dict(load().operations())


def hang(group: str = "thinwire", after: int = 0) -> None:
    """Plant a lost rank: collectives of this process never end, as on NCCL when a peer is gone.

    `wait()` returns and `is_completed()` stays False. A host that waits for one of their streams blocks until
    the group is aborted. After the group's time limit it raises, where NCCL's watchdog would end the process.

    Args:
        group: A part of the names of the groups whose collectives never end.
        after: The number of collectives of these groups that still work.
    """
    load().hang(group, after)


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The device that a trace models. The default is about a T4 on a network of 10 Gbit/s.

    Args:
        launch: Seconds of the host to launch an operation.
        kernel: Seconds of the smallest kernel or collective.
        memory: Bytes per second of the device's memory.
        flops: Operations per second of matrix products.
        link: Bytes per second of the network.
    """

    launch: float = 5e-6
    kernel: float = 2e-6
    memory: float = 320e9
    flops: float = 8e12
    link: float = 1.25e9


class Span(NamedTuple):
    """An operation of a trace, at modelled times in seconds."""

    stream: int
    what: str
    label: str
    start: float
    end: float
    nbytes: float


def start_trace(speed: Speed) -> None:
    """Record every operation from now on, with the time at which a device of this speed would run it.

    An operation starts when the host has launched it, the stream's earlier work has ended, and the events
    that the stream waits for have been reached. Operations of different streams do not slow each other down.
    """
    load().start_trace(speed.launch, speed.kernel, speed.memory, speed.flops, speed.link)


def end_trace() -> list[Span]:
    """Stop the trace; return its operations in the order of their launches, from time 0."""
    spans = [Span(*span) for span in load().end_trace()]
    first = min((span.start for span in spans), default=0.0)
    return [span._replace(start=span.start - first, end=span.end - first) for span in spans]


def label(text: str) -> None:
    """Label the operations that this thread launches from now on."""
    load().label(text)


class _DeviceModule:
    """torch.shadow: the members of torch.cuda that torch and thinwire use."""

    Event = torch.Event
    is_available = staticmethod(lambda: True)
    is_initialized = staticmethod(lambda: True)
    is_autocast_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: load().DEVICES)
    current_device = staticmethod(torch.accelerator.current_device_index)
    set_device = staticmethod(torch.accelerator.set_device_index)
    current_stream = staticmethod(torch.accelerator.current_stream)
    synchronize = staticmethod(torch.accelerator.synchronize)
    manual_seed = manual_seed_all = staticmethod(lambda seed: None)
    get_amp_supported_dtype = staticmethod(lambda: [torch.float16, torch.bfloat16])
    _is_in_bad_fork = staticmethod(lambda: False)
    get_device_properties = staticmethod(lambda device=None: SimpleNamespace(name="shadow", total_memory=0))
    memory_allocated = staticmethod(lambda device=None: load().bytes())
    max_memory_allocated = staticmethod(lambda device=None: load().peak())
    reset_peak_memory_stats = staticmethod(lambda device=None: load().reset_peak())
    host_waits = staticmethod(lambda: counts().get("host waits", 0))
    _told = 0

    @classmethod
    def races(cls) -> int:
        """Return the number of races since the last call."""
        before, cls._told = cls._told, counts().get("races", 0)
        return cls._told - before

    @staticmethod
    def Stream(device: Any = None, priority: int = 0) -> torch.Stream:  # noqa: N802 - torch's name
        return torch.Stream(device="shadow" if device is None else device)

    @staticmethod
    @contextlib.contextmanager
    def stream(stream: torch.Stream) -> Iterator[None]:
        before = torch.accelerator.current_stream(stream.device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    @staticmethod
    @contextlib.contextmanager
    def device(device: Any) -> Iterator[None]:
        before = torch.accelerator.current_device_index()
        index = device if isinstance(device, int) else torch.device(device).index
        torch.accelerator.set_device_index(before if index is None else index)
        try:
            yield
        finally:
            torch.accelerator.set_device_index(before)


def _new_backend(options: Any, _: Any) -> Any:
    _split_from_world(options)
    gloo = dist.ProcessGroupGloo(
        options.store, options.group_rank, options.group_size, timeout=options.timeout
    )
    limit = int(options.timeout.total_seconds() * 1000)
    return load().group(gloo, options.group_rank, options.group_size, limit, options.group_id)


def _split_from_world(options: Any) -> None:
    """Wait for all ranks of the world if it is bound to a device, as NCCL does.

    torch then makes every later NCCL group by ncclCommSplit, without being asked. That is a collective of the
    whole world, also for a group of some ranks. The others would wait for it here, until the limit.
    """
    world = dist.group.WORLD
    if world is None or world.bound_device_id is None:
        return
    store = distributed_c10d._get_process_group_store(world)
    store = PrefixStore(f"split {store.add(f'splits of rank {world.rank()}', 1)}", store)
    store.set(str(world.rank()), "")
    store.wait([str(rank) for rank in range(world.size())], options.timeout)


if __name__ == "__main__":
    print(unavailable() or library())  # noqa: T201
