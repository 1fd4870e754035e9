"""Runs programs at once, on the caller's own process group, and waits for their collectives.

For work between steps, such as averaging parameters, where nothing else is under way that it could overlap
with or be overtaken by.
"""

import time
from collections import deque
from collections.abc import Iterable
from typing import Any, TypeVar

import torch.distributed as dist

from thinwire.errors import ProgramError, ThinwireError, WireError
from thinwire.wire.communicator import Communicator, Pending
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
            received = _Turn(steps, op, communicator).wait()
    finally:
        steps.close()


def run_abreast(programs: Iterable[Steps[None]], group: dist.ProcessGroup, width: int = 2) -> None:
    """Run many short programs over the ranks of `group`, `width` of them under way at any time.

    The order on the wire is that of the programs and of nothing else: the oldest collective is waited for,
    its program goes on behind the others, and when it ends the next one starts. Two broadcasts by different
    ranks fill both directions of a link; Gloo does not work on more than two at once.
    """
    communicator = Communicator(group)
    communicator.borrow()
    coming = iter(programs)
    under_way: deque[_Turn] = deque()

    def go_on(steps: Steps[None], received: Any) -> None:
        try:
            op = steps.send(received)
        except StopIteration:
            return
        under_way.append(_Turn(steps, op, communicator))

    try:
        while True:
            while len(under_way) < width and (steps := next(coming, None)) is not None:
                go_on(steps, None)
            if not under_way:
                return
            oldest = under_way.popleft()
            go_on(oldest.steps, oldest.wait())
    finally:
        for turn in under_way:
            turn.steps.close()


class _Turn:
    """A program's collective under way."""

    def __init__(self, steps: Steps[Any], op: Collective | Await, communicator: Communicator) -> None:
        if isinstance(op, Collective) and op.ranks is not None:
            raise ProgramError(
                f"{op} cannot run on a group of the caller's, which has no subgroups of ours: run the program"
                " on a process group of those ranks"
            )
        self.steps, self._op, self._communicator = steps, op, communicator
        self._started = time.perf_counter()
        try:
            self._pending: Pending = communicator.issue(op)
        except ThinwireError:
            raise
        except RuntimeError as error:
            raise self._failure(error) from error

    def wait(self) -> Any:
        try:
            return self._pending.wait()
        except ThinwireError:
            raise
        except RuntimeError as error:
            raise self._failure(error) from error

    def _failure(self, error: RuntimeError) -> WireError:
        waited, reason = time.perf_counter() - self._started, str(error).partition("\n")[0]
        rank, size = self._communicator.rank, self._communicator.size
        return WireError(
            f"rank {rank} of {size} waited {waited:.1f} s for {self._op}, and it failed: a rank died,"
            " stalled, or did not make the same call. Look at the other ranks' logs, and restart from the"
            f" last checkpoint. (The backend said: {reason})"
        )
