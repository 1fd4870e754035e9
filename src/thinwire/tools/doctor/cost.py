"""Memory and speed of plain DDP and of a few programs, on a model of the size that users train.

`rates` and `speed` measure what `thinwire plan --device` assumes: the time of a launch, the rate of the
device's memory, and the launches of each program.
"""

import gc
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.plan.compute import shapes_of
from thinwire.plan.devices import LAUNCH_SECONDS, device_named, work
from thinwire.plan.traffic import handed_over
from thinwire.tools.doctor.check import OK, SKIPPED, Outcome, Surroundings

_WIDTH = 1024
_WARM_UP, _STEPS = 3, 8
_CONTESTANTS: dict[str, Callable[[], thinwire.Program] | None] = {
    "DDP": None,
    "Exact": thinwire.Exact,
    "BF16": thinwire.BF16,
    "Int8": thinwire.Int8,
    "FP8": thinwire.FP8,
    "PowerSGD": lambda: thinwire.PowerSGD(rank=4, warmup=0),
}

_LAUNCHES, _COPIES = 1000, 10
_SMALLEST, _LARGEST = 16 << 20, 256 << 20
"""Bytes of the copy by which memory is measured. It must not fit into caches."""


class _Contestant:
    """A model with one way to average its gradients."""

    def __init__(self, around: Surroundings, program: thinwire.Program | None) -> None:
        width = min(_WIDTH, max(64, int(around.parameters**0.5) // 2))
        layers = max(1, around.parameters // (width * width))
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers))).to(around.device)
        self.planned = 0 if program is None else _planned(model, program, around.world_size)
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
            # Of the program alone, as the planner counts them: without those of the model and of DDP.
            figures[name]["program_launches"] = figures[name]["launches"] - figures["DDP"]["launches"]
            figures[name]["planned_launches"] = contestant.planned
        count = contestants["DDP"].parameters
    plain = figures["DDP"]["step_ms"]
    shown = ", ".join(f"{name} {plain / figures[name]['step_ms']:.2f} x" for name in figures if name != "DDP")
    text = f"{count / 1e6:.1f} M parameters: DDP {plain:.1f} ms a step; as fast as DDP: {shown}"
    return Outcome(OK, text, {"parameters": count, "contestants": figures})


def rates(around: Surroundings) -> Outcome:
    """Measure the time of a launch and the rate of memory, next to what `thinwire plan --device` assumes."""
    launch, issue = _launch_seconds(around)
    rate = _memory_rate(around)
    read = getattr(around.module, "get_device_properties", None)
    title = str(getattr(read(around.device), "name", "")) if callable(read) else ""
    sheet = device_named(title)
    details = {
        "launch_us": round(1e6 * launch, 2),
        "host_us_per_launch": round(1e6 * issue, 2),
        "planned_launch_us": 1e6 * (sheet.launch_seconds if sheet else LAUNCH_SECONDS),
        "memory_gb_per_s": round(rate / 1e9, 1),
        "planned_memory_gb_per_s": sheet.memory_rate / 1e9 if sheet else None,
        "planned_as": sheet.name if sheet else None,
    }
    planned = f"data sheet {sheet.memory_rate / 1e9:g}" if sheet else "no data sheet"
    text = (
        f"launch {details['launch_us']:.1f} us, {details['host_us_per_launch']:.1f} us of it on the host"
        f" (planned {details['planned_launch_us']:g}); memory {details['memory_gb_per_s']:g} GB/s ({planned})"
    )
    return Outcome(OK, text, details)


def _launch_seconds(around: Surroundings) -> tuple[float, float]:
    """Return the time of a tiny kernel in a long queue, and the host's part of it. Medians of rounds."""
    tiny = torch.zeros(1, dtype=torch.float32, device=around.device)
    whole, issued = [], []
    for _ in range(_WARM_UP + _STEPS):
        started = _now(around)
        for _ in range(_LAUNCHES):
            tiny.add_(1)
        issued.append((time.perf_counter() - started) / _LAUNCHES)
        whole.append((_now(around) - started) / _LAUNCHES)
    return median(whole[_WARM_UP:]), median(issued[_WARM_UP:])


def _memory_rate(around: Surroundings) -> float:
    """Return bytes per second of a large copy, which reads and writes each byte."""
    size = min(_LARGEST, max(_SMALLEST, 4 * around.parameters))
    source = torch.zeros(size // 4, dtype=torch.float32, device=around.device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(_WARM_UP + _STEPS):
        started = _now(around)
        for _ in range(_COPIES):
            target.copy_(source)
        seconds.append((_now(around) - started) / _COPIES)
    return 2 * source.nbytes / median(seconds[_WARM_UP:])


def _planned(model: torch.nn.Module, program: thinwire.Program, ranks: int) -> int:
    """Return the launches of a step that the planner assumes for a program."""
    handed = handed_over(program, shapes_of(model), sliced=False)
    return sum(work(each.layout, ranks, _STEPS).launches for each in handed)


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
