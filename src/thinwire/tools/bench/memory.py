"""Peak memory of a rank that trains a single contestant, in its own process.

A rank forks before it starts a thread or runs the user's code. Every contestant therefore begins with the
same memory, and no lock is held by a thread that does not exist in the fork.
"""

import importlib
import os
import pickle
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch.distributed as dist

from thinwire.errors import LabError
from thinwire.models.ddp.internals import import_dynamo
from thinwire.tools.bench.contestants import Contestant, rounds_needed
from thinwire.tools.bench.devices import device
from thinwire.tools.bench.measure import enter, train_step
from thinwire.tools.bench.workloads import Workload

_LEAST_STEPS = 3

Prepare = Callable[[int], tuple[Workload, list[Contestant], float | None]]
"""Opens the process group of a number. Returns the workload, the contestants and the bucket size in MB."""


def peak_memory(prepare: Prepare) -> list[int]:
    """Measure the peak memory of each contestant. Every rank must call it.

    Args:
        prepare: Called once for each contestant, in a fork of this process.

    Returns:
        Peak resident bytes for each contestant, the maximum over ranks.

    Raises:
        LabError: A contestant failed.
    """
    # Import once here instead of in every fork: dynamo for DDP, the optimizers for torch's contestants.
    import_dynamo()
    importlib.import_module("torch.distributed.optim")
    # The number of contestants is known only inside a fork, because this process must not run the user's
    # code.
    peaks: list[int] = []
    count = 1
    while len(peaks) < count:
        peak, count = _forked(partial(_train, prepare, len(peaks)))
        peaks.append(peak)
    return peaks


def _train(prepare: Prepare, number: int) -> tuple[int, int]:
    """Return the peak of contestant `number`, and the number of contestants."""
    workload, contestants, bucket_mb = prepare(number)
    model = workload.model().to(device())
    entry = enter(contestants[number], model, workload, bucket_mb)
    steps = max(_LEAST_STEPS, rounds_needed(contestants[number].program))
    for step in range(steps if entry.track.unavailable is None else 0):
        train_step(entry, workload, step)
    gathered: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(gathered, _high_water_mark())
    dist.destroy_process_group()
    return max(gathered), len(contestants)


def reason(error: BaseException) -> str:
    """Return the first line of an error's message, after its type unless it is a LabError."""
    text = str(error) if isinstance(error, LabError) else f"{type(error).__name__}: {error}"
    return text.partition("\n")[0]


def _high_water_mark() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def _forked(work: Callable[[], tuple[int, int]]) -> tuple[int, int]:
    """Call `work` in a fork of this process, and return its result."""
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
    fine, result = pickle.loads(data) if data else (False, "the process died without an error")
    if not fine or isinstance(result, str):
        raise LabError(str(result))
    peak, count = result
    return peak, count
