"""Collectives on a process group that the caller owns, and programs run on it while the caller waits.

`run_blocking` and `run_abreast` are for work between steps, such as averaging parameters, when no other
collective is in flight on that group.
"""

import time
from collections import deque
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, TypeVar

from thinwire.engine.comm.collectives import AnyGroup, Issuer
from thinwire.engine.comm.pending import Pending
from thinwire.engine.comm.process_group import global_ranks
from thinwire.engine.comm.rendezvous import StoreRendezvous
from thinwire.engine.ops import Await, Collective, Collectives
from thinwire.errors import ThinwireError, WireError

Result = TypeVar("Result")

_LIMIT = timedelta(minutes=30)
_NO_TIME = timedelta(0)
_ABREAST = 2
"""Programs that run at once. Two broadcasts by different ranks fill both directions of a link, and Gloo works
on at most two."""


class BorrowedGroup(Issuer):
    """A communicator on the caller's own group, without a store.

    Rank and size are read from the group with every collective, so a group may be reconfigured between steps.
    No other collective may be in flight on it. No point-to-point messages are sent on it, because the
    caller's own could have the same tags. `abort` and `close` leave the group unchanged, since the caller
    owns it.

    Args:
        group: A process group, or an object with the same methods.
        limit: The time after which waiting for a future fails. Collectives have the group's own time limit.
    """

    def __init__(self, group: AnyGroup, limit: timedelta = _LIMIT) -> None:
        self.limit = limit
        self.report_limit = _NO_TIME
        self.rendezvous: StoreRendezvous | None = None
        self._group = group

    @property
    def rank(self) -> int:
        """This rank in the group as it is now."""
        return self._group.rank()

    @property
    def world_rank(self) -> int:
        """This rank's number in the world, or in the group if torch.distributed does not know it."""
        return global_ranks(self._group)[self.rank]

    @property
    def size(self) -> int:
        """The number of ranks in the group as it is now."""
        return self._group.size()

    def connect_subgroups(self, groups: Iterable[tuple[int, ...]]) -> None:
        """Do nothing: no groups are made of the ranks of a caller's group."""

    def failure(self) -> str | None:
        """Return None: the caller, who owns the group, looks after it."""
        return None

    def part(self) -> None:
        """Do nothing, because the caller owns the group."""

    def abort(self) -> None:
        """Do nothing, because the caller owns the group."""

    def close(self) -> None:
        """Do nothing, because the caller owns the group."""

    def _route(self, op: Collective) -> tuple[AnyGroup, None]:
        return self._group, None


def run_blocking(steps: Collectives[Result], group: AnyGroup) -> Result:
    """Run a program to its end over the ranks of `group`, all of which must call this.

    A group of one uses no network. On an accelerator, results are ordered on the current stream, and the host
    does not wait for them.

    Args:
        steps: The program.
        group: The process group. No other collective may be in flight on it.

    Returns:
        The program's result.

    Raises:
        WireError: A collective failed.
        ProgramError: The program yielded something that the group cannot run.

    Example::

        def mean(x):
            total = yield AllReduce(x)
            return total / dist.get_world_size()


        run_blocking(mean(torch.ones(3)), dist.group.WORLD)
    """
    communicator = BorrowedGroup(group)
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


def run_abreast(programs: Iterable[Collectives[None]], group: AnyGroup) -> None:
    """Run many short programs over the ranks of `group`, with up to two of them in flight.

    The order of collectives depends on the order of the programs alone. Each turn waits for the oldest
    collective, resumes its program, and queues that program's next collective behind the others. A program
    that ends is replaced by the next one.

    Args:
        programs: The programs, in the same order on every rank.
        group: The process group. No other collective may be in flight on it.

    Raises:
        WireError: A collective failed.
        ProgramError: A program yielded something that the group cannot run.
    """
    communicator = BorrowedGroup(group)
    waiting = iter(programs)
    in_flight: deque[_Turn] = deque()

    def resume(steps: Collectives[None], received: Any) -> None:
        try:
            op = steps.send(received)
        except StopIteration:
            return
        in_flight.append(_Turn(steps, op, communicator))

    try:
        while True:
            while len(in_flight) < _ABREAST and (steps := next(waiting, None)) is not None:
                resume(steps, None)
            if not in_flight:
                return
            # The oldest, not the first to complete: which one completes first differs between ranks.
            oldest = in_flight.popleft()
            resume(oldest.steps, oldest.wait())
    finally:
        for turn in in_flight:
            turn.steps.close()


class _Turn:
    """A program and its collective in flight."""

    def __init__(self, steps: Collectives[Any], op: Collective | Await, communicator: BorrowedGroup) -> None:
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
        rank, size = self._communicator.world_rank, self._communicator.size
        return WireError(
            f"rank {rank} waited {waited:.1f} s for {self._op} among {size} ranks, and it failed: a rank"
            " died, stalled, or did not make the same call. Check the other ranks' logs, and restart from the"
            f" last checkpoint. (Backend error: {reason})"
        )
