"""From a collective's description to torch.distributed, on a process group of thinwire's own."""

import contextlib
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from thinwire.errors import ProgramError, WireError
from thinwire.wire.agree import Meeting
from thinwire.wire.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Await,
    Broadcast,
    Collective,
    Reduce,
    ReduceScatter,
)
from thinwire.wire.simulate import exchange

# torch 2.13 renamed these two and warns about the old names; older versions have only those.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_FUTURE_POLL = 0.0005
_ROLL_CALL = timedelta(seconds=3)


class Pending(Protocol):
    """A collective that was issued."""

    def done(self) -> bool:
        """Whether it has ended, well or badly; never blocks."""

    def wait(self) -> Any:
        """What the program receives; on an accelerator, ordered on the current stream."""


class Communicator:
    """Issues collectives over the ranks of `parent`, on a process group that nobody else uses.

    The group is made by `open`, which every rank must call at the same point. A group of one needs no
    network and makes none. A failure is reported within `limit`: of it, collectives get all but the time
    to ask around who is still there, `roll_call`.
    """

    def __init__(self, parent: dist.ProcessGroup, limit: timedelta | None = None) -> None:
        self.rank = parent.rank()
        self.size = parent.size()
        self.limit = limit or time_limit(parent)
        self.roll_call = min(_ROLL_CALL, self.limit / 5)
        self.meeting = Meeting(parent)
        self._parent = parent
        self._group: dist.ProcessGroup | None = None

    def open(self) -> None:
        """Make the process group; the second call does nothing."""
        if self.size == 1 or self._group is not None:
            return
        try:
            self._group = _new_group(self._parent, self.meeting, self.limit - self.roll_call)
        except RuntimeError as error:
            raise WireError(f"rank {self.rank} could not connect to the other ranks: {error}") from error
        self.meeting = Meeting(self._group)

    def close(self) -> None:
        """Leave the process group; collectives still under way on other ranks fail there."""
        group, self._group = self._group, None
        # The user's own dist.destroy_process_group() may have come first.
        if group is not None and group in distributed_c10d._world.pg_map:
            with contextlib.suppress(RuntimeError, ValueError):
                dist.destroy_process_group(group)

    def issue(self, op: Collective | Await) -> Pending:
        """Put a collective on the wire and return at once."""
        if isinstance(op, Await):
            return _PendingFuture(op.future, self.limit)
        if not isinstance(op, Collective):
            raise ProgramError(f"a program yielded {op!r}: it must yield collectives of thinwire.wire.ops")
        op.check(self.size)
        if self.size == 1 or op.tensor.numel() == 0:
            return _Arrived(exchange([op] * self.size)[self.rank])
        if self._group is None:
            raise WireError(f"{op} was issued on a closed wire: its DDP model is gone")
        return self._start(op, self._group)

    def _start(self, op: Collective, group: dist.ProcessGroup) -> Pending:
        tensor = _carrier(op)
        match op:
            case AllReduce():
                return _PendingWork(dist.all_reduce(tensor, group=group, async_op=True), op.tensor)
            case AllGather():
                gathered = op.tensor.new_empty((self.size, *op.tensor.shape))
                work = _all_gather(_as(tensor, gathered).flatten(), tensor.flatten(), group, True)
                return _PendingWork(work, gathered)
            case AllToAll():
                received = torch.empty_like(op.tensor)
                work = dist.all_to_all_single(_as(tensor, received), tensor, group=group, async_op=True)
                return _PendingWork(work, received)
            case ReduceScatter():
                return self._reduce_scatter(tensor, op.tensor, group)
            case Reduce(dst=dst):
                work = dist.reduce(tensor, group=group, group_dst=dst, async_op=True)
                return _PendingWork(work, op.tensor)
            case Broadcast(src=src):
                work = dist.broadcast(tensor, group=group, group_src=src, async_op=True)
                return _PendingWork(work, op.tensor)
        raise ProgramError(f"{op} is not a collective that thinwire knows: see thinwire.wire.ops")

    def _reduce_scatter(
        self, tensor: torch.Tensor, original: torch.Tensor, group: dist.ProcessGroup
    ) -> Pending:
        own = torch.empty_like(original[0])
        if tensor.device.type != "cpu":
            return _PendingWork(_reduce_scatter(_as(tensor, own), tensor, group=group, async_op=True), own)
        # Gloo's own reduce_scatter sends a whole all-reduce (measured: twice these bytes).
        rows = torch.empty_like(original)
        work = dist.all_to_all_single(_as(tensor, rows), tensor, group=group, async_op=True)
        return _PendingWork(work, rows, lambda: torch.sum(rows, 0, dtype=rows.dtype, out=own))


def _new_group(parent: dist.ProcessGroup, meeting: Meeting, limit: timedelta) -> dist.ProcessGroup:
    """A process group over the ranks of `parent`, with no other rank's help.

    `dist.new_group` needs every rank of the world, or with `use_local_synchronization` takes its name from
    the number of groups alive in this process: ranks that drop a model at different times, or that belong
    to different numbers of subgroups, then wait for each other under different names, and a name used again
    meets the old group's addresses in the store. So the name is ours: it counts the groups made over
    `parent` in the life of its store.
    """
    ranks = dist.get_process_group_ranks(parent)
    backend = dist.get_backend(parent)
    name: Any = f"{parent.group_name}_thinwire_{meeting.count('group')}"  # newer torch types names
    group: dist.ProcessGroup
    group, _ = distributed_c10d._new_process_group_helper(
        len(ranks),
        parent.rank(),
        ranks,
        dist.get_backend_config(parent) if backend == dist.Backend.UNDEFINED else backend,
        meeting.store,
        name,
        timeout=limit,
        group_desc="thinwire",
    )
    distributed_c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


class _PendingWork:
    def __init__(self, work: dist.Work | None, value: Any, finish: Callable[[], Any] | None = None) -> None:
        assert work is not None, "torch.distributed returns no work to ranks outside the group"
        self._work = work
        self._value = value
        self._finish = finish

    def done(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> Any:
        self._work.wait()
        return self._finish() if self._finish else self._value


class _PendingFuture:
    def __init__(self, future: "torch.futures.Future[Any]", limit: timedelta) -> None:
        self._future = future
        self._limit = limit

    def done(self) -> bool:
        return bool(self._future.done())

    def wait(self) -> Any:
        # torch's futures wait without a limit of their own.
        deadline = time.monotonic() + self._limit.total_seconds()
        while not self._future.done():
            if time.monotonic() > deadline:
                raise WireError("the future was not completed in time")
            time.sleep(_FUTURE_POLL)
        return self._future.wait()


class _Arrived:
    def __init__(self, value: Any) -> None:
        self._value = value

    def done(self) -> bool:
        return True

    def wait(self) -> Any:
        return self._value


def _carrier(op: Collective) -> torch.Tensor:
    """The op's tensor in a type that every backend carries, sharing its memory."""
    tensor = op.tensor
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    if tensor.element_size() == 1 and tensor.dtype not in (torch.uint8, torch.int8):
        if isinstance(op, AllReduce | ReduceScatter | Reduce):
            raise ProgramError(
                f"{op} cannot be summed: float8 and bool travel as bytes; decode them before the sum"
            )
        return tensor.view(torch.uint8)
    return tensor


def _as(carrier: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """The result tensor seen in the carrier's type."""
    if result.is_complex():
        return torch.view_as_real(result)
    return result.view(carrier.dtype)


def time_limit(group: dist.ProcessGroup) -> timedelta:
    """How long a collective of this group may take before it is an error."""
    device = group._device_types[0]
    options = group._get_backend(device).options
    return timedelta(seconds=options._timeout.total_seconds())
