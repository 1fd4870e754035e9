"""Memory and speed of plain DDP and of a few programs, on a model of the size that users train."""

import gc
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.tools.doctor.check import OK, SKIPPED, Outcome, Surroundings

_WIDTH = 1024
_WARM_UP, _STEPS = 3, 8
_CONTESTANTS: dict[str, Callable[[], thinwire.Program] | None] = {
    "DDP": None,
    "Exact": thinwire.Exact,
    "Int8": thinwire.Int8,
    "PowerSGD": lambda: thinwire.PowerSGD(rank=4, warmup=0),
}


class _Contestant:
    """A model with one way to average its gradients."""

    def __init__(self, around: Surroundings, program: thinwire.Program | None) -> None:
        width = min(_WIDTH, max(64, int(around.parameters**0.5) // 2))
        layers = max(1, around.parameters // (width * width))
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers))).to(around.device)
        self.ddp = DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=1e-3)
        if program is not None:
            thinwire.attach(self.ddp, program, timeout=around.limit)
        self.batch = torch.randn(8, width, dtype=torch.float32, device=around.device)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())

    def step(self) -> None:
        """Train one step."""
        self.optimizer.zero_grad()
        self.ddp(self.batch).square().mean().backward()
        self.optimizer.step()


def memory(around: Surroundings) -> Outcome:
    """Measure the peak of allocated memory of each contestant."""
    measured = getattr(around.module, "max_memory_allocated", None)
    reset = getattr(around.module, "reset_peak_memory_stats", None)
    if not callable(measured) or not callable(reset):
        return Outcome(SKIPPED, f"{around.device.type} does not measure its memory")
    peaks = {}
    with around.group():
        for name, make in _CONTESTANTS.items():
            reset()
            contestant = _Contestant(around, make() if make else None)
            for _ in range(_WARM_UP):
                contestant.step()
            peaks[name] = int(measured())
            del contestant
            gc.collect()  # a DDP model is in a cycle
    text = ", ".join(f"{name} {peak / 2**20:,.0f} MiB" for name, peak in peaks.items())
    return Outcome(OK, f"peak: {text}", peaks)


def speed(around: Surroundings) -> Outcome:
    """Measure the time of a step of each contestant, in turns, then count launches with the profiler."""
    figures: dict[str, Any] = {}
    with around.group():
        contestants = {
            name: _Contestant(around, make() if make else None) for name, make in _CONTESTANTS.items()
        }
        times: dict[str, list[float]] = {name: [] for name in contestants}
        for number in range(_WARM_UP + _STEPS):
            for name, contestant in contestants.items():
                started = _now(around)
                contestant.step()
                if number >= _WARM_UP:
                    times[name].append(_now(around) - started)
        for name, contestant in contestants.items():
            figures[name] = {"step_ms": round(1e3 * median(times[name]), 3), **_profiled(around, contestant)}
        count = contestants["DDP"].parameters
    plain = figures["DDP"]["step_ms"]
    shown = ", ".join(f"{name} {plain / figures[name]['step_ms']:.2f} x" for name in figures if name != "DDP")
    text = f"{count / 1e6:.1f} M parameters: DDP {plain:.1f} ms a step; as fast as DDP: {shown}"
    return Outcome(OK, text, {"parameters": count, "contestants": figures})


def _now(around: Surroundings) -> float:
    if around.device.type != "cpu":
        around.module.synchronize()
    return time.perf_counter()


def _profiled(around: Surroundings, contestant: _Contestant) -> dict[str, Any]:
    """Return launches, device time and host time of one step."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if around.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        contestant.step()
        _now(around)
    events = profile.key_averages()
    return {
        "launches": sum(event.count for event in events if "LaunchKernel" in event.key),
        "torch_calls": sum(event.count for event in events if event.key.startswith("aten::")),
        "device_ms": round(sum(event.self_device_time_total for event in events) / 1e3, 3),
        "host_ms": round(sum(event.self_cpu_time_total for event in events) / 1e3, 3),
    }
