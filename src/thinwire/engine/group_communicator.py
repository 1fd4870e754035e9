"""Collectives issued to torch.distributed, on a process group of thinwire's own."""

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from thinwire.engine.collectives import PLAIN, check_dtype, start
from thinwire.engine.communicator import NotConnectedError
from thinwire.engine.messages import Mailbox, Messaged, Turn, cut
from thinwire.engine.ops import Await, Collective, Exchange
from thinwire.engine.pending import Arrived, Pending, PendingFuture
from thinwire.engine.process_group import HiddenGroup, new_group, on_gloo, time_limit
from thinwire.engine.rendezvous import StoreRendezvous
from thinwire.engine.simulate import deliver
from thinwire.errors import ProgramError, WireError

_REPORT_LIMIT = timedelta(seconds=3)


class GroupCommunicator:
    """An issuer of collectives over the ranks of `parent`, on a process group of thinwire's own.

    `open` makes the group, and every rank must call it at the same point. A group of one needs no network
    and makes no process group.

    Args:
        parent: The ranks to communicate with.
        limit: The time within which a failure is raised. None takes that of `parent`. A part of it,
            `report_limit`, is kept for collecting the other ranks' reports of the failure, and collectives
            time out before it begins.
    """

    def __init__(self, parent: dist.ProcessGroup, limit: timedelta | None = None) -> None:
        self.rendezvous = StoreRendezvous(parent, limit)
        self.rank = parent.rank()
        self.size = parent.size()
        self.limit = limit or time_limit(parent)
        self.report_limit = min(_REPORT_LIMIT, self.limit / 5)
        self._parent = parent
        self._name = ""
        self._group: dist.ProcessGroup | None = None
        self._on_gloo = False
        self._mailboxes: dict[dist.ProcessGroup, Mailbox] = {}
        self._hidden: list[HiddenGroup] = []
        self._subgroups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def open(self) -> None:
        """Make the process group. Later calls do nothing."""
        if self.size == 1 or self._group is not None:
            return
        self._name = f"thinwire_{self.rendezvous.count('group')}"
        hidden = self._connect_hidden(range(self.size), self._name)
        self._group = hidden.group
        self._on_gloo = on_gloo(hidden.group)
        self.rendezvous = StoreRendezvous(hidden.group, self.limit, hidden.store)

    def subgroup(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """Make a process group of some of the ranks, this one among them, for the caller to keep.

        Only those ranks take part. Subgroups are numbered, so every rank must make the same number of calls.

        Args:
            ranks: The members, as ranks of the whole group.

        Returns:
            The process group, which `close` does not destroy.

        Raises:
            NotConnectedError: A member did not connect in time.
        """
        return self._connect(ranks, f"thinwire_subgroup_{self.rendezvous.count('subgroup')}_from_{ranks[0]}")

    def abort(self) -> None:
        """Fail all collectives in flight at once, on this rank and the others. Only Gloo can do so."""
        for hidden in [one for one in self._hidden if self._on_gloo and one.usable]:
            cut(hidden.group)

    def close(self) -> None:
        """Destroy the process group. Collectives still in flight on other ranks fail there."""
        hidden, self._hidden = self._hidden, []
        self._group, self._subgroups, self._mailboxes = None, {}, {}
        while hidden:
            hidden.pop().destroy()

    def in_any_order(self, op: Collective) -> bool:
        """Return whether a collective is sent as messages, which are matched by tags and need no order."""
        return self._on_gloo and op.tensor.device.type == "cpu" and isinstance(op, Messaged)

    def issue(self, op: Collective | Await, turn: Turn | None = None) -> Pending:
        """Issue a collective and return without waiting for it.

        The first collective among a given subset of ranks makes their process group.

        Args:
            op: The collective, or a future to wait for.
            turn: The bucket and stage by which ranks match it, if it may be issued in any order.

        Returns:
            The collective in flight.

        Raises:
            ProgramError: `op` is not a valid collective.
            WireError: The communicator is closed.
            NotConnectedError: A rank of the subset did not connect in time.
        """
        if isinstance(op, Await):
            return PendingFuture(op.future, self.limit)
        if not isinstance(op, Collective):
            raise ProgramError(f"a program yielded {op!r}: it must yield collectives of thinwire.engine.ops")
        rank, size = op.place(self.rank, self.size)
        op.check(size)
        if size == 1 or (op.tensor.numel() == 0 and not isinstance(op, Exchange)):
            return Arrived(deliver(op, [op.tensor] * size)[rank])
        if self._group is None:
            raise WireError(f"{op} was issued on a closed wire: its DDP model is gone")
        if op.tensor.dtype not in PLAIN:
            check_dtype(op)
        group = self._group if op.ranks is None else self._among(op.ranks)
        if isinstance(op, Messaged) and self.in_any_order(op):
            return self._mailbox(group).exchange(op, turn)
        return start(op, group, size)

    def _mailbox(self, group: dist.ProcessGroup) -> Mailbox:
        if group not in self._mailboxes:
            self._mailboxes[group] = Mailbox(group)
        return self._mailboxes[group]

    def _among(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """Return the process group of some of the ranks. These ranks make it on its first use."""
        if ranks not in self._subgroups:
            name = f"{self._name}_among_{'_'.join(map(str, ranks))}"
            self._subgroups[ranks] = self._connect_hidden(ranks, name).group
        return self._subgroups[ranks]

    def _connect_hidden(self, ranks: Sequence[int], name: str) -> HiddenGroup:
        hidden = HiddenGroup(self._connect(ranks, name))
        self._hidden.append(hidden)
        return hidden

    def _connect(self, ranks: Sequence[int], name: str) -> dist.ProcessGroup:
        rendezvous, limit = self.rendezvous, self.limit - self.report_limit
        try:
            return rendezvous.within(
                self.limit, lambda: new_group(self._parent, ranks, name, rendezvous.store, limit)
            )
        except WireError:
            raise
        except RuntimeError as error:
            failure = error
        rendezvous.ask(lambda store: store.check([name]), self.report_limit)  # raises if the store has failed
        raise NotConnectedError(
            f"rank {rendezvous.ranks[self.rank]} could not connect to {rendezvous.text(ranks)}: {failure}"
        ) from failure
