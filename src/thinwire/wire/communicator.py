"""From a collective's description to torch.distributed, on a process group of thinwire's own."""

import contextlib
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from thinwire.errors import ProgramError, WireError
from thinwire.wire.agree import Meeting, ranks_text
from thinwire.wire.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Await,
    Broadcast,
    Collective,
    Exchange,
    Reduce,
    ReduceScatter,
)
from thinwire.wire.simulate import deliver

# torch 2.13 renamed these two and warns about the old names; older versions have only those.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_FUTURE_POLL = 0.0005
_WORTH_HALVING = 1 << 16
"""Bytes from which two collectives side by side are faster than one."""
_ROLL_CALL = timedelta(seconds=3)


class NotConnectedError(WireError):
    """Not all ranks of a group came to make it."""


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
        self._subgroups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def open(self) -> None:
        """Make the process group; the second call does nothing."""
        if self.size == 1 or self._group is not None:
            return
        name = f"thinwire_{self.meeting.count('group')}"
        self._group = self._connect(self._parent, range(self.size), name)
        self.meeting = Meeting(self._group)

    def borrow(self) -> None:
        """Instead of `open`: use the caller's own group, which `close` will leave alone.

        Only for those who wait for each collective before anybody else can issue one there.
        """
        if self.size > 1:
            self._group = self._parent

    def subgroup(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """A process group of some of the ranks, this one among them, for the caller to keep.

        Those ranks alone make it, but every rank must ask for as many as the others do: they are numbered.
        """
        name = f"thinwire_subgroup_{self.meeting.count('subgroup')}_from_{ranks[0]}"
        return self._connect(self._parent, ranks, name)

    def close(self) -> None:
        """Leave the process group; collectives still under way on other ranks fail there."""
        own = [] if self._group in (None, self._parent) else [self._group]
        groups = [*self._subgroups.values(), *own]
        self._group, self._subgroups = None, {}
        for group in groups:
            # The user's own dist.destroy_process_group() may have come first.
            if group in distributed_c10d._world.pg_map:
                with contextlib.suppress(RuntimeError, ValueError):
                    dist.destroy_process_group(group)

    def issue(self, op: Collective | Await) -> Pending:
        """Put a collective on the wire and return at once; the first among some ranks connects them first."""
        if isinstance(op, Await):
            return _PendingFuture(op.future, self.limit)
        if not isinstance(op, Collective):
            raise ProgramError(f"a program yielded {op!r}: it must yield collectives of thinwire.wire.ops")
        rank, size = op.place(self.rank, self.size)
        op.check(size)
        if size == 1 or (op.tensor.numel() == 0 and not isinstance(op, Exchange)):
            return _Arrived(deliver(op, [op.tensor] * size)[rank])
        if self._group is None:
            raise WireError(f"{op} was issued on a closed wire: its DDP model is gone")
        group = self._group if op.ranks is None else self._among(op.ranks, self._group)
        if op.tensor.device.type == "cpu" and isinstance(op, AllGather | AllToAll | ReduceScatter):
            return _exchange_rows(op, group, size)
        return _start(op, group, size)

    def _among(self, ranks: tuple[int, ...], whole: dist.ProcessGroup) -> dist.ProcessGroup:
        """The process group of some of the ranks; they make it together the first time it is asked for."""
        if ranks not in self._subgroups:
            self._subgroups[ranks] = self._connect(whole, ranks, f"among_{'_'.join(map(str, ranks))}")
        return self._subgroups[ranks]

    def _connect(self, whole: dist.ProcessGroup, ranks: Sequence[int], name: str) -> dist.ProcessGroup:
        try:
            return _new_group(whole, ranks, name, self.meeting.store, self.limit - self.roll_call)
        except RuntimeError as error:
            raise NotConnectedError(
                f"rank {self.rank} could not connect to {ranks_text(list(ranks))}: {error}"
            ) from error


def _exchange_rows(op: Collective, group: dist.ProcessGroup, size: int) -> Pending:
    """On Gloo: what is large goes as two collectives side by side.

    One alone leaves a direction of the link idle part of the time (docs/design/decisions.md). And Gloo's own
    reduce-scatter sends a whole all-reduce, so it is an all-to-all and a sum.
    """
    carrier = _carrier(op)
    gather = isinstance(op, AllGather)
    flat = carrier.view(-1) if gather else carrier.view(size, -1)
    halves = flat.chunk(2, dim=-1) if op.nbytes >= _WORTH_HALVING else [flat]
    works, received = [], []
    for half in halves:
        rows = half.new_empty((size, half.shape[-1]))
        if gather:
            works.append(_all_gather(rows.view(-1), half, group, True))
        else:
            works.append(dist.all_to_all_single(rows, half.contiguous(), group=group, async_op=True))
        received.append(rows)

    def result() -> torch.Tensor:
        joined = received[0] if len(received) == 1 else torch.cat(received, dim=1)
        back = (
            torch.view_as_complex(joined.view(size, -1, 2))
            if op.tensor.is_complex()
            else joined.view(op.tensor.dtype)
        )
        rows = back.view(size, *(op.tensor.shape if gather else op.tensor.shape[1:]))
        return rows.sum(0, dtype=rows.dtype) if isinstance(op, ReduceScatter) else rows

    return _Later(works, result)


def _start(op: Collective, group: dist.ProcessGroup, size: int) -> Pending:
    tensor = _carrier(op)
    match op:
        case AllReduce():
            return _Later([dist.all_reduce(tensor, group=group, async_op=True)], lambda: op.tensor)
        case AllGather():
            gathered = op.tensor.new_empty((size, *op.tensor.shape))
            work = _all_gather(_as(tensor, gathered).flatten(), tensor.flatten(), group, True)
            return _Later([work], lambda: gathered)
        case AllToAll():
            received = torch.empty_like(op.tensor)
            work = dist.all_to_all_single(_as(tensor, received), tensor, group=group, async_op=True)
            return _Later([work], lambda: received)
        case Exchange(sends=sends, receives=receives):
            pieces = op.tensor.new_empty(sum(receives))
            work = dist.all_to_all_single(
                _as(tensor, pieces), tensor, list(receives), list(sends), group=group, async_op=True
            )
            return _Later([work], lambda: pieces)
        case ReduceScatter():
            own = torch.empty_like(op.tensor[0])
            work = _reduce_scatter(_as(tensor, own), tensor, group=group, async_op=True)
            return _Later([work], lambda: own)
        case Reduce(dst=dst):
            work = dist.reduce(tensor, group=group, group_dst=dst, async_op=True)
            return _Later([work], lambda: op.tensor)
        case Broadcast(src=src):
            work = dist.broadcast(tensor, group=group, group_src=src, async_op=True)
            return _Later([work], lambda: op.tensor)
    raise ProgramError(f"{op} is not a collective that thinwire knows: see thinwire.wire.ops")


def _new_group(
    parent: dist.ProcessGroup, members: Sequence[int], name: str, store: dist.Store, limit: timedelta
) -> dist.ProcessGroup:
    """A process group over some ranks of `parent`, with no other rank's help.

    `dist.new_group` needs every rank of the world, or with `use_local_synchronization` takes its name from
    the number of groups alive in this process: ranks that drop a model at different times, or that belong
    to different numbers of subgroups, then wait for each other under different names, and a name used again
    meets the old group's addresses in the store. So the name is ours, and used once in the life of `store`.
    """
    everybody = dist.get_process_group_ranks(parent)
    ranks = [everybody[member] for member in members]
    backend = dist.get_backend(parent)
    full_name: Any = f"{parent.group_name}_{name}"  # newer torch types names
    group: dist.ProcessGroup
    group, _ = distributed_c10d._new_process_group_helper(
        len(ranks),
        ranks.index(everybody[parent.rank()]),
        ranks,
        dist.get_backend_config(parent) if backend == dist.Backend.UNDEFINED else backend,
        store,
        full_name,
        timeout=limit,
        group_desc="thinwire",
    )
    distributed_c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


class _Later:
    """Torch's works, and what comes of them."""

    def __init__(self, works: Sequence[dist.Work | None], value: Callable[[], Any]) -> None:
        self._works = [work for work in works if work is not None]
        assert len(self._works) == len(works), "torch.distributed returns no work to ranks outside the group"
        self._value = value

    def done(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> Any:
        for work in self._works:
            work.wait()
        return self._value()


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
