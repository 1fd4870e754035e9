"""A rank of a benchmark, started on each host by `python -m thinwire.tools.bench.worker TASK` (JSON).

It reports by lines on stdout that begin with `MARK`. Rank 0 reports measurements, every rank reports errors.
"""

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist

from thinwire.tools.bench.contestants import Contestant, line_up
from thinwire.tools.bench.devices import device, probe_rate
from thinwire.tools.bench.measure import MOST_OVERTIME, measure
from thinwire.tools.bench.memory import peak_memory, reason
from thinwire.tools.bench.workloads import Workload, find_workload

MARK = "thinwire-bench "
_SECONDS_BETWEEN_REPORTS = 0.2
_PR_SET_PDEATHSIG = 1

Report = Callable[[str, Any], None]


@dataclass(frozen=True)
class Task:
    """The instructions for every rank.

    Attributes:
        workload: A built-in name, or `package.module:build`.
        programs: Texts for `parse_program`.
        steps: The number of rounds.
        bucket_mb: DDP's bucket size. None for the best one of each contestant.
        with_torch: Whether to run torch's own hooks too.
        memory: Measure peak memory instead of steps.
        probe: Also measure the network's rate.
        losses: Train for the losses alone.
        seed: The seed of the model and its batches.
        overtime: Whether contestants keep training until they reach plain DDP's loss.
        seconds: The time limit of a collective.
    """

    workload: str
    programs: tuple[str, ...]
    steps: int
    bucket_mb: float | None
    with_torch: bool = True
    memory: bool = False
    probe: bool = False
    losses: bool = False
    seed: int = 0
    overtime: bool = True
    seconds: float = 600.0

    @property
    def result(self) -> str:
        """The kind of the report that ends the task."""
        return "memory" if self.memory else "losses" if self.losses else "tracks"

    def prepare(self, number: int) -> tuple[Workload, list[Contestant], float | None]:
        """Open the process group of that number. Return the workload, the contestants and the bucket size."""
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        workload = find_workload(self.workload)
        _join(self, number)
        return workload, line_up(list(self.programs), with_torch=self.with_torch), self.bucket_mb


def work(task: Task, report: Report, *, number: int = 0) -> None:
    """Do the task of one rank.

    Args:
        task: The instructions.
        report: Called with a kind and a value. The kind is `memory` or `losses` if the task asks for these,
            or else `parameters`, `rate`, `round`, `overtime` and `tracks`.
        number: The number of the process group. A process can open each only once. All but 0 need
            `served_store`, and so does peak memory.
    """
    if task.memory:
        report("memory", peak_memory(lambda contestant: task.prepare(contestant + 1)))
        return
    workload, contestants, bucket_mb = task.prepare(number)
    paced = _pacer(report, task.steps)
    if task.losses:
        workload = workload.with_seed(task.seed, task.steps * (1 + MOST_OVERTIME))
        tracks = measure(workload, contestants, task.steps, bucket_mb, paced, overtime="steps")
        report("losses", [track.losses for track in tracks])
        _leave()
        return
    report("parameters", sum(parameter.numel() for parameter in workload.model().parameters()))
    if task.probe:
        report("rate", probe_rate())
    overtime: Literal["time"] | None = "time" if task.overtime else None
    tracks = measure(workload, contestants, task.steps, bucket_mb, paced, overtime=overtime)
    report("tracks", [asdict(track) for track in tracks])
    _leave()


def _leave() -> None:
    dist.barrier()
    dist.destroy_process_group()


def _join(task: Task, number: int) -> None:
    """Open a process group. Number 0 is the one that torchrun or the lab prepared."""
    limit = timedelta(seconds=task.seconds)
    backend = "gloo"
    if device().type == "cuda":
        torch.cuda.set_device(device())
        backend = "nccl"
    # A process cannot open a second group at the rendezvous of the first, so the others use the served store.
    if number == 0:
        dist.init_process_group(backend, timeout=limit)
        return
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    served = dist.TCPStore(address, port, is_master=False, timeout=limit)
    store = dist.PrefixStore(f"thinwire bench {number}", served)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)


@contextmanager
def served_store() -> Iterator[None]:
    """Serve the store of all process groups but 0 from a separate process, unless torchrun serves one.

    Enter it before any thread is started, because it forks. A store for each process group would need a port
    each, which another program may have taken.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or os.environ["RANK"] != "0":
        yield
        return
    server = os.fork()
    if server == 0:
        _serve_store()
    try:
        yield
    finally:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)


def _serve_store() -> NoReturn:
    try:
        _end_with_parent()
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(address, port, is_master=True, wait_for_workers=False)
        while store:
            signal.pause()
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _pacer(report: Report, steps: int) -> Callable[[str, int], None]:
    """Return a callback that limits the reports to the rate that a progress bar can show."""
    latest = 0.0

    def on_round(kind: str, done: int) -> None:
        nonlocal latest
        if done == steps or time.monotonic() - latest > _SECONDS_BETWEEN_REPORTS:
            latest = time.monotonic()
            report(kind, done)

    return on_round


def main() -> None:
    """Run the task on the command line. The process ends when its parent does."""
    _end_with_parent()

    def report(kind: str, value: Any) -> None:
        if os.environ["RANK"] == "0" or kind == "error":
            # Begin with a newline, because the user's code may have printed an incomplete line.
            sys.stdout.write(f"\n{MARK}{json.dumps([kind, value])}\n")
            sys.stdout.flush()

    fields = json.loads(sys.argv[1])
    task = Task(**{**fields, "programs": tuple(fields["programs"])})
    try:
        with served_store() if task.memory else nullcontext():
            work(task, report)
    except SystemExit as error:  # from the user's model; even sys.exit(0) is a failure
        report("error", f"the model's code called sys.exit({error.code})")
        sys.exit(1)
    except Exception as error:
        report("error", reason(error))
        raise


if __name__ == "__main__":
    main()
