"""The way from a collective to a process group, the same for thinwire's own groups and for a caller's.

Methods of the group itself are called, not the functions of torch.distributed, because groups that it did not
make, such as torchft's, have only the methods.
"""

from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist

from thinwire.engine.comm.messages import Mailbox, Messaged, Turn
from thinwire.engine.comm.pending import Arrived, Issued, Pending, PendingFuture
from thinwire.engine.comm.process_group import gather_options
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
from thinwire.engine.simulate import deliver
from thinwire.errors import ProgramError

# torch 2.13 renamed these two and warns about the old names; older versions have only those.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_PLAIN = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int64}
"""Dtypes that every backend sends and adds as they are."""


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


class Issuer(ABC):
    """The common part of all communicators: `issue`, and checks before any rank sends a byte."""

    limit: timedelta
    registered: ClassVar[bool] = False
    """Whether torch.distributed made the group, and its functions work on it."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """This rank."""

    @property
    @abstractmethod
    def size(self) -> int:
        """The number of ranks."""

    def in_any_order(self, op: Collective) -> bool:
        """Return whether ranks match a collective by its tag, not by the order in which they issue."""
        return False

    def issue(self, op: Collective | Await, turn: Turn | None = None) -> Pending:
        """Issue a collective and return without waiting for it.

        Args:
            op: The collective, or a future to wait for.
            turn: The bucket and stage by which ranks match it, if it may be issued in any order.

        Returns:
            The collective in flight.

        Raises:
            ProgramError: `op` is not a valid collective, or the group cannot run it.
            WireError: The communicator is closed.
            NotConnectedError: A rank of the collective did not connect in time.
        """
        if isinstance(op, Await):
            return PendingFuture(op.future, self.limit)
        rank, size = self._place(op)
        # Ranks skip an empty tensor alike, since all have the same shape. An empty Exchange may receive.
        if size == 1 or (op.tensor.numel() == 0 and not isinstance(op, Exchange)):
            return Arrived(deliver(op, [op.tensor] * size)[rank])
        group, mailbox = self._route(op)
        if mailbox is not None and isinstance(op, Messaged):
            return mailbox.exchange(op, turn)
        tensor = _carrier(op.tensor)
        # NCCL would copy a list of tensors, and has a reduce-scatter of its own.
        in_one_tensor = self.registered and tensor.device.type != "cpu"
        match op:  # options keep their defaults, with which every backend returns a work at once (`asyncOp`)
            case AllReduce():
                work = group.allreduce([tensor], dist.AllreduceOptions())
            case AllGather():
                gathered = op.tensor.new_empty((size, *op.tensor.shape))
                into = _carrier(gathered)
                if in_one_tensor:
                    work = _all_gather(into.flatten(), tensor.flatten(), group, True)
                else:
                    work = group.allgather([list(into.unbind())], [tensor], gather_options())
                return Issued([work], lambda: gathered)
            case ReduceScatter() if in_one_tensor:
                own = torch.empty_like(op.tensor[0])
                # Flat, as not every backend takes a row for each rank.
                work = _reduce_scatter(_carrier(own).view(-1), tensor.flatten(), group=group, async_op=True)
                return Issued([work], lambda: own)
            case AllToAll() | ReduceScatter():
                # Gloo's own reduce-scatter sends as much as an all-reduce.
                received = torch.empty_like(op.tensor)
                work = group.alltoall_base(_carrier(received), tensor, [], [], dist.AllToAllOptions())
                if isinstance(op, ReduceScatter):
                    return Issued([work], lambda: received.sum(0, dtype=received.dtype))
                return Issued([work], lambda: received)
            case Exchange(sends=sends, receives=receives):
                pieces = op.tensor.new_empty(sum(receives))
                splits = list(receives), list(sends)
                work = group.alltoall_base(_carrier(pieces), tensor, *splits, dist.AllToAllOptions())
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

    def _place(self, op: Collective) -> tuple[int, int]:
        """Validate a collective; return this rank's place among those that take part, and their number."""
        if not isinstance(op, Collective):
            raise ProgramError(f"a program yielded {op!r}: it must yield collectives of thinwire.engine.ops")
        if op.ranks is not None and not self.registered:
            raise ProgramError(
                f"{op} cannot run here: thinwire makes no subgroups of a caller's process group. Run the"
                " program on a process group of those ranks"
            )
        rank, size = op.place(self.rank, self.size)
        op.check(size)
        if isinstance(op, AllReduce | ReduceScatter | Reduce) and _sent_as_bytes(op.tensor):
            raise ProgramError(
                f"{op} cannot be summed: float8 and bool are sent as bytes; decode them before the sum"
            )
        return rank, size

    @abstractmethod
    def _route(self, op: Collective) -> tuple[Any, Mailbox | None]:
        """Return the process group of the ranks that take part, and its mailbox if `op` goes as messages."""


def _sent_as_bytes(tensor: torch.Tensor) -> bool:
    return tensor.dtype not in _PLAIN and tensor.element_size() == 1


def _carrier(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor in a dtype that every backend supports."""
    if tensor.dtype in _PLAIN:
        return tensor
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.view(torch.uint8) if _sent_as_bytes(tensor) else tensor
