"""Collectives on a process group of any kind that the caller owns."""

from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from thinwire.engine.collectives import PLAIN, as_carrier, carrier, check_dtype
from thinwire.engine.messages import Turn
from thinwire.engine.ops import (
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
from thinwire.engine.pending import Arrived, Issued, Pending, PendingFuture
from thinwire.engine.process_group import gather_options, global_ranks
from thinwire.engine.rendezvous import StoreRendezvous
from thinwire.engine.simulate import deliver
from thinwire.errors import ProgramError

_LIMIT = timedelta(minutes=30)
_NO_TIME = timedelta(0)


class AnyGroup(Protocol):
    """The methods of c10d's ProcessGroup that thinwire uses. Unregistered groups work, too."""

    def rank(self) -> int:
        """Return this rank."""

    def size(self) -> int:
        """Return the number of ranks."""

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        """Sum in place."""

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any
    ) -> dist.Work:
        """Gather every rank's tensor."""

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - c10d's name
        outputs: list[int],
        inputs: list[int],
        opts: Any,
    ) -> dist.Work:
        """Exchange pieces of one tensor."""

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        """Send one rank's tensor to all."""

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        """Sum in place on one rank."""


class BorrowedGroup:
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

    def in_any_order(self, op: Collective) -> bool:
        """Return False: collectives are matched by the order in which they are issued."""
        return False

    def issue(self, op: Collective | Await, turn: Turn | None = None) -> Pending:
        """Issue a collective on the caller's group; see `Communicator`."""
        if isinstance(op, Await):
            return PendingFuture(op.future, self.limit)
        if not isinstance(op, Collective):
            raise ProgramError(f"a program yielded {op!r}: it must yield collectives of thinwire.engine.ops")
        if op.ranks is not None:
            raise ProgramError(
                f"{op} cannot run here: thinwire makes no subgroups of a caller's process group. Run the"
                " program on a process group of those ranks"
            )
        rank, size = self.rank, self.size
        op.check(size)
        if size == 1 or (op.tensor.numel() == 0 and not isinstance(op, Exchange)):
            return Arrived(deliver(op, [op.tensor] * size)[rank])
        if op.tensor.dtype not in PLAIN:
            check_dtype(op)
        return _start(op, self._group, size)

    def abort(self) -> None:
        """Do nothing, because the caller owns the group."""

    def close(self) -> None:
        """Do nothing, because the caller owns the group."""


def _start(op: Collective, group: AnyGroup, size: int) -> Pending:
    tensor = carrier(op)
    match op:
        case AllReduce():
            work = group.allreduce([tensor], dist.AllreduceOptions())
        case AllGather():
            gathered = op.tensor.new_empty((size, *op.tensor.shape))
            rows = list(as_carrier(tensor, gathered).unbind())
            work = group.allgather([rows], [tensor], gather_options())
            return Issued([work], lambda: gathered)
        case AllToAll() | ReduceScatter():
            received = torch.empty_like(op.tensor)
            work = group.alltoall_base(as_carrier(tensor, received), tensor, [], [], dist.AllToAllOptions())
            if isinstance(op, ReduceScatter):
                return Issued([work], lambda: received.sum(0, dtype=received.dtype))
            return Issued([work], lambda: received)
        case Exchange(sends=sends, receives=receives):
            pieces = op.tensor.new_empty(sum(receives))
            into = as_carrier(tensor, pieces)
            work = group.alltoall_base(into, tensor, list(receives), list(sends), dist.AllToAllOptions())
            return Issued([work], lambda: pieces)
        case Reduce(dst=dst):
            to_one = dist.ReduceOptions()
            to_one.rootRank = dst
            work = group.reduce([tensor], to_one)
        case Broadcast(src=src):
            from_one = dist.BroadcastOptions()
            from_one.rootRank = src
            work = group.broadcast([tensor], from_one)
        case _:
            raise ProgramError(f"{op} is not a supported collective: see thinwire.engine.ops")
    return Issued([work], lambda: op.tensor)
