"""A rank of a benchmark: `python -m thinwire.bench.worker TASK`, on each host, with TASK as JSON.

Rank 0 reports by lines on stdout that begin with `MARK`.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from thinwire.bench.contestants import line_up
from thinwire.bench.measure import measure, probe_rate
from thinwire.bench.memory import peak_memory
from thinwire.bench.results import Track
from thinwire.bench.workloads import find_workload

MARK = "thinwire-bench "
_SECONDS_BETWEEN_REPORTS = 0.2

Report = Callable[[str, Any], None]


@dataclass(frozen=True)
class Task:
    """What every rank is told."""

    workload: str
    programs: tuple[str, ...]
    steps: int
    bucket_mb: float | None
    with_torch: bool = True
    memory: bool = False
    probe: bool = False
    seconds: float = 600.0


def work(task: Task, report: Report) -> None:
    """Report `memory`, or `rate`, `round`s, `overtime`, `parameters` and `tracks`."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    workload = find_workload(task.workload)
    contestants = line_up(list(task.programs), with_torch=task.with_torch)
    if task.memory:
        report("memory", peak_memory(workload, contestants, task.bucket_mb, lambda n: _join(task, n + 1)))
        return
    _join(task, 0)
    report("parameters", sum(parameter.numel() for parameter in workload.model().parameters()))
    if task.probe:
        report("rate", probe_rate())
    tracks: list[Track] = measure(
        workload, contestants, task.steps, task.bucket_mb, _pacer(report, task.steps)
    )
    report("tracks", [asdict(track) for track in tracks])
    dist.barrier()
    dist.destroy_process_group()


def _join(task: Task, number: int) -> None:
    """Open the process group; number 0 is the one that torchrun or the lab prepared."""
    limit = timedelta(seconds=task.seconds)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if number == 0:
        dist.init_process_group(backend, timeout=limit)
        return
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + number
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(address, port, world_size, is_master=rank == 0, timeout=limit)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)


def _pacer(report: Report, steps: int) -> Callable[[str, int], None]:
    """Not more reports than a progress bar can use."""
    latest = 0.0

    def on_round(kind: str, done: int) -> None:
        nonlocal latest
        if done == steps or time.monotonic() - latest > _SECONDS_BETWEEN_REPORTS:
            latest = time.monotonic()
            report(kind, done)

    return on_round


def main() -> None:
    """Work on the task of the command line."""

    def report(kind: str, value: Any) -> None:
        if os.environ["RANK"] == "0":
            sys.stdout.write(f"{MARK}{json.dumps([kind, value])}\n")
            sys.stdout.flush()

    task = json.loads(sys.argv[1])
    work(Task(**{**task, "programs": tuple(task["programs"])}), report)


if __name__ == "__main__":
    main()
