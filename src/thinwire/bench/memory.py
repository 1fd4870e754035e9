"""Peak memory of a rank that trains just one way: each contestant in a process of its own.

A rank forks before it has started a thread or called a user's code, so that every contestant begins with the
same memory, and no lock is held by a thread that the fork does not have.
"""

import os
import pickle
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch._dynamo  # noqa: F401 - DDP imports it when first made: once here instead of in every fork
import torch.distributed as dist

from thinwire.bench.contestants import Contestant
from thinwire.bench.measure import device, enter, train_step
from thinwire.bench.workloads import Workload
from thinwire.errors import LabError

_STEPS = 3

Prepare = Callable[[int], tuple[Workload, list[Contestant], float | None]]
"""Opens the process group of a number, and says what is to be trained, by whom, in buckets of how many MB."""


def peak_memory(prepare: Prepare) -> list[int]:
    """Peak resident bytes by contestant, of the rank that needed most; every rank calls it."""
    peaks: list[int] = []
    count = 1
    while len(peaks) < count:
        peak, count = _forked(partial(_train, prepare, len(peaks)))
        peaks.append(peak)
    return peaks


def _train(prepare: Prepare, number: int) -> tuple[int, int]:
    """The peak of contestant `number`, and how many contestants there are."""
    workload, contestants, bucket_mb = prepare(number)
    model = workload.model().to(device())
    entry = enter(contestants[number], model, workload, bucket_mb, _STEPS)
    for step in range(_STEPS if entry.track.unavailable is None else 0):
        train_step(entry, workload, step)
    everyone: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(everyone, _high_water_mark())
    dist.destroy_process_group()
    return max(everyone), len(contestants)


def reason(error: BaseException) -> str:
    """The first line of what went wrong, as Python would say it; ours speak for themselves."""
    text = str(error) if isinstance(error, LabError) else f"{type(error).__name__}: {error}"
    return text.partition("\n")[0]


def _high_water_mark() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def _forked(work: Callable[[], tuple[int, int]]) -> tuple[int, int]:
    """What `work` returns in a fork of this process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            message: tuple[bool, object] = (True, work())
        except BaseException as error:
            traceback.print_exc()
            message = (False, reason(error))
        with os.fdopen(writer, "wb") as pipe:
            pickle.dump(message, pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    fine, result = pickle.loads(data) if data else (False, "the process died")
    if not fine or isinstance(result, str):
        raise LabError(str(result))
    peak, count = result
    return peak, count
