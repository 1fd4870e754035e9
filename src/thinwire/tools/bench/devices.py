"""A rank's device, the bytes it has sent, and the rate of its network."""

import os
import time
from typing import Any

import torch
import torch.distributed as dist

from thinwire.tools.lab.interfaces import default_route
from thinwire.tools.lab.namespaces import read_devices

_PROBE_BYTES = 4_000_000
ON_CPU = "THINWIRE_BENCH_ON_CPU"


def device() -> torch.device:
    """Return the device on which this rank trains. In the lab it is the CPU: hosts would share a GPU."""
    if torch.cuda.is_available() and ON_CPU not in os.environ:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def synchronize() -> None:
    """Wait until the device has finished this rank's queued work."""
    if device().type == "cuda":
        torch.cuda.synchronize()


def on_device(batch: Any) -> Any:
    """Move a batch to `device()`. It may be a tensor, or a tuple, list or dict of batches."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device())
    if isinstance(batch, tuple | list):
        parts = [on_device(part) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if isinstance(batch, dict):
        return {key: on_device(part) for key, part in batch.items()}
    return batch


def device_bytes() -> float | None:
    """Return the bytes that this rank has sent so far, as counted by its network device.

    Ranks that share a device each get an equal part of its count.

    Returns:
        The number of bytes, or None if the device is not known.
    """
    local, world = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), dist.get_world_size()
    interface = os.environ.get("GLOO_SOCKET_IFNAME") or ("lo" if local == world else default_route())
    devices = read_devices()
    named = [devices[name] for name in (interface or "").split(",") if name in devices]
    sharing = world if interface == "lo" else local
    return sum(counters.sent for counters in named) / sharing if named else None


def probe_rate() -> int:
    """Measure the network's rate by timing an all-reduce. Every rank must call it.

    Returns:
        Bits per second, equal on all ranks.
    """
    payload = torch.zeros(_PROBE_BYTES // 4, device=device())
    seconds = []
    for _ in range(4):
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(payload)
        synchronize()
        seconds.append(time.perf_counter() - started)
    size = dist.get_world_size()
    best = torch.tensor(min(seconds[1:]), device=device())
    dist.all_reduce(best, dist.ReduceOp.MAX)
    return round(8 * 2 * (size - 1) / size * _PROBE_BYTES / best.item()) if size > 1 else 0
