"""A rank of a benchmark: `python -m thinwire.bench.worker TASK`, on each host, with TASK as JSON.

It reports by lines on stdout that begin with `MARK`: rank 0 what was measured, any rank what went wrong.
"""

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from thinwire.bench.contestants import Contestant, line_up
from thinwire.bench.measure import device, measure, probe_rate
from thinwire.bench.memory import peak_memory, reason
from thinwire.bench.results import Track
from thinwire.bench.workloads import Workload, find_workload

MARK = "thinwire-bench "
_SECONDS_BETWEEN_REPORTS = 0.2
_PR_SET_PDEATHSIG = 1

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

    def prepare(self, number: int) -> tuple[Workload, list[Contestant], float | None]:
        """Open the process group of that number; what to train, and who takes part."""
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        workload = find_workload(self.workload)
        _join(self, number)
        return workload, line_up(list(self.programs), with_torch=self.with_torch), self.bucket_mb


def work(task: Task, report: Report) -> None:
    """Report `memory`, or `rate`, `round`s, `overtime`, `parameters` and `tracks`."""
    if task.memory:
        report("memory", peak_memory(lambda number: task.prepare(number + 1)))
        return
    workload, contestants, bucket_mb = task.prepare(0)
    report("parameters", sum(parameter.numel() for parameter in workload.model().parameters()))
    if task.probe:
        report("rate", probe_rate())
    tracks: list[Track] = measure(workload, contestants, task.steps, bucket_mb, _pacer(report, task.steps))
    report("tracks", [asdict(track) for track in tracks])
    dist.barrier()
    dist.destroy_process_group()


def _join(task: Task, number: int) -> None:
    """Open a process group; number 0 is the one that torchrun or the lab prepared."""
    limit = timedelta(seconds=task.seconds)
    backend = "gloo"
    if device().type == "cuda":
        torch.cuda.set_device(device())
        backend = "nccl"
    if number == 0:
        dist.init_process_group(backend, timeout=limit)
        return
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        agents = dist.TCPStore(address, port, is_master=False, timeout=limit)
        store: dist.Store = dist.PrefixStore(f"thinwire memory {number}", agents)
    else:
        store = dist.TCPStore(address, port + number, world_size, is_master=rank == 0, timeout=limit)
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
    """Work on the task of the command line, and end with whoever gave it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def report(kind: str, value: Any) -> None:
        if os.environ["RANK"] == "0" or kind == "error":
            # A line of its own: whoever printed before may have left one unfinished.
            sys.stdout.write(f"\n{MARK}{json.dumps([kind, value])}\n")
            sys.stdout.flush()

    task = json.loads(sys.argv[1])
    try:
        work(Task(**{**task, "programs": tuple(task["programs"])}), report)
    except Exception as error:
        report("error", reason(error))
        raise


if __name__ == "__main__":
    main()
