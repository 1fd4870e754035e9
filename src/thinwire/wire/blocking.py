"""Runs one program at once, on the caller's own process group, and waits for each of its collectives.

For work between steps, such as averaging parameters, where nothing else is under way that it could overlap
with or be overtaken by.
"""

import time
from typing import Any, TypeVar

import torch.distributed as dist

from thinwire.errors import ProgramError, ThinwireError, WireError
from thinwire.wire.communicator import Communicator
from thinwire.wire.ops import Await, Collective, Steps

Result = TypeVar("Result")


def run_blocking(steps: Steps[Result], group: dist.ProcessGroup) -> Result:
    """Run a program to its end over the ranks of `group`, all of which must call this.

    A group of one uses no network. On an accelerator, results are ordered on the current stream; the host
    does not wait for them.

    Example::

        def mean(x):
            total = yield AllReduce(x)
            return total / dist.get_world_size()


        run_blocking(mean(torch.ones(3)), dist.group.WORLD)
    """
    communicator = Communicator(group)
    communicator.borrow()
    received: Any = None
    try:
        while True:
            try:
                op = steps.send(received)
            except StopIteration as stop:
                result: Result = stop.value
                return result
            received = _carry(op, communicator)
    finally:
        steps.close()


def _carry(op: Collective | Await, communicator: Communicator) -> Any:
    if isinstance(op, Collective) and op.ranks is not None:
        raise ProgramError(
            f"{op} cannot run on a group of the caller's, which has no subgroups of ours: run the program on"
            " a process group of those ranks"
        )
    started, rank, size = time.perf_counter(), communicator.rank, communicator.size
    try:
        return communicator.issue(op).wait()
    except ThinwireError:
        raise
    except RuntimeError as error:
        waited, reason = time.perf_counter() - started, str(error).partition("\n")[0]
        raise WireError(
            f"rank {rank} of {size} waited {waited:.1f} s for {op}, and it failed: a rank died, stalled, or"
            " did not make the same call. Look at the other ranks' logs, and restart from the last"
            f" checkpoint. (The backend said: {reason})"
        ) from error
