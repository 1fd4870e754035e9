"""Peak memory of a rank that trains just one way: each contestant in a process of its own.

Ranks fork before they have started anything, so that every contestant begins with the same memory.
"""

import os
import pickle
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch.distributed as dist

from thinwire.bench.contestants import Contestant
from thinwire.bench.measure import enter, train_step
from thinwire.bench.workloads import Workload
from thinwire.errors import LabError

_STEPS = 3


def peak_memory(
    workload: Workload, contestants: list[Contestant], bucket_mb: float | None, join: Callable[[int], None]
) -> list[int]:
    """Peak resident bytes by contestant, of the rank that needed most; every rank calls it.

    Args:
        workload: What to train.
        contestants: Each gets a process.
        bucket_mb: DDP's bucket size.
        join: Opens the process group; given a number, so that each contestant meets at a port of its own.
    """

    def train(number: int, contestant: Contestant) -> int:
        join(number)
        entry = enter(contestant, workload, bucket_mb, _STEPS)
        for step in range(_STEPS if entry.track.unavailable is None else 0):
            train_step(entry, workload, step)
        everyone: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(everyone, _high_water_mark())
        dist.destroy_process_group()
        return max(everyone)

    return [_forked(partial(train, number, contestant)) for number, contestant in enumerate(contestants)]


def _high_water_mark() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def _forked(work: Callable[[], int]) -> int:
    """What `work` returns in a fork of this process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            message: tuple[bool, object] = (True, work())
        except BaseException:
            message = (False, traceback.format_exc())
        with os.fdopen(writer, "wb") as pipe:
            pickle.dump(message, pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    fine, result = pickle.loads(data) if data else (False, "the process died")
    if not fine:
        raise LabError(f"measuring memory failed: {result}")
    assert isinstance(result, int)
    return result
