"""Collectives issued to torch.distributed, on a process group of thinwire's own."""

import contextlib
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from thinwire.engine.comm.agreement import agreeing
from thinwire.engine.comm.collectives import Issuer
from thinwire.engine.comm.communicator import NotConnectedError
from thinwire.engine.comm.messages import Mailbox, Messaged, cut
from thinwire.engine.comm.process_group import HiddenGroup, new_group, on_gloo, time_limit
from thinwire.engine.comm.rendezvous import StoreRendezvous
from thinwire.engine.ops import Collective
from thinwire.errors import WireError

_REPORT_LIMIT = timedelta(seconds=3)
_PART_LIMIT = timedelta(seconds=5)
"""How long a rank waits with closing for the others: 4 MB, a buffer of NCCL, take 0.3 s at 100 Mbit/s."""


class GroupCommunicator(Issuer):
    """An issuer of collectives over the ranks of `parent`, on a process group of thinwire's own.

    `open` makes the group, and every rank must call it at the same point. A group of one needs no network
    and makes no process group.

    Args:
        parent: The ranks to communicate with.
        limit: The time within which a failure is raised. None takes that of `parent`. A part of it,
            `report_limit`, is kept for collecting the other ranks' reports of the failure, and collectives
            time out before it begins.
        device: The device of the tensors, to which an accelerator's groups are bound. None takes the one that
            `parent` is bound to, or the CPU.
    """

    registered = True

    def __init__(
        self,
        parent: dist.ProcessGroup,
        limit: timedelta | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.rendezvous = StoreRendezvous(parent, limit)
        self._rank, self._size = parent.rank(), parent.size()
        self.limit = limit or time_limit(parent)
        self.report_limit = min(_REPORT_LIMIT, self.limit / 5)
        self._parent = parent
        self._device = device or parent.bound_device_id or torch.device("cpu")
        self._name = ""
        self._group: dist.ProcessGroup | None = None
        self._on_gloo = False
        self._mailboxes: dict[dist.ProcessGroup, Mailbox] = {}
        self._hidden: list[HiddenGroup] = []
        self._subgroups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    @property
    def rank(self) -> int:
        """This rank."""
        return self._rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._size

    def open(self) -> None:
        """Make the process group. Later calls do nothing."""
        if self.size == 1 or self._group is not None:
            return
        self._name = f"thinwire_{self.rendezvous.count('group')}"
        # No rank goes on before all have connected. Otherwise rank 0, connected, may find its hook refused or
        # its model gone and close, while rank 1 still connects and fails with an error that names no cause.
        with agreeing(self.rendezvous, self.limit, f"connections of {self._name}"):
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

    def connect_subgroups(self, groups: Iterable[tuple[int, ...]]) -> None:
        """Make the groups for collectives among some ranks, on accelerators. Otherwise first use makes them.

        NCCL connects with the help of the device, which must not happen behind collectives that are in
        flight in backward. Gloo connects on the host alone.

        Args:
            groups: The ranks of each group, this one among them. Groups at one place exclude each other, so
                that ranks make theirs in the same order and none waits for one that waits for another.
        """
        for ranks in groups if self._device.type != "cpu" and self._group is not None else ():
            if len(ranks) > 1:
                self._subgroup(ranks)

    def part(self) -> None:
        """Wait a few seconds until the other ranks, which may be ending too, have received everything.

        An accelerator's group is aborted at its end, which stops the threads that send. Rank 0's last
        collective has ended when rank 0 has received everything. Its own last bytes may still be in NCCL's
        buffers, megabytes of them. On a slow link they take seconds to reach rank 1, which would wait for
        them for ever. So ranks that end together wait for each other. One that ends alone waits in vain.
        """
        with contextlib.suppress(RuntimeError):  # the store is gone, or no thread starts any more at exit
            if self._device.type != "cpu" and any(hidden.usable for hidden in self._hidden):
                self.rendezvous.part(_PART_LIMIT)

    def failure(self) -> str | None:
        """Return the error that an accelerator's backend has reported, if any."""
        found = (hidden.error() for hidden in self._hidden if hidden.usable)
        return next((text for text in found if text is not None), None)

    def abort(self) -> None:
        """Fail all collectives in flight at once: with Gloo on the other ranks too, with NCCL on this one."""
        for hidden in self._hidden:
            hidden.abort()
            if self._on_gloo and hidden.usable:
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

    def _route(self, op: Collective) -> tuple[dist.ProcessGroup, Mailbox | None]:
        group = self._group
        if group is None:
            raise WireError(f"{op} was issued on a closed wire: its DDP model is gone")
        if op.ranks is not None:
            group = self._subgroup(op.ranks)
        if not self.in_any_order(op):
            return group, None
        if group not in self._mailboxes:
            self._mailboxes[group] = Mailbox(group)
        return group, self._mailboxes[group]

    def _subgroup(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """Return the group of some ranks, which these make together on its first use."""
        if ranks not in self._subgroups:
            name = f"{self._name}_among_{'_'.join(map(str, ranks))}"
            self._subgroups[ranks] = self._connect_hidden(ranks, name).group
        return self._subgroups[ranks]

    def _connect_hidden(self, ranks: Sequence[int], name: str) -> HiddenGroup:
        hidden = HiddenGroup(self._connect(ranks, name))
        self._hidden.append(hidden)
        return hidden

    def _connect(self, ranks: Sequence[int], name: str) -> dist.ProcessGroup:
        rendezvous, limit, device = self.rendezvous, self.limit - self.report_limit, self._device
        try:
            return rendezvous.within(
                self.limit,
                lambda: new_group(self._parent, ranks, name, rendezvous.store, limit, device),
                holds_store=device.type == "cpu",  # NCCL waits for its peers, without a limit
            )
        except WireError:
            raise
        except RuntimeError as error:
            failure = error
        rendezvous.ask(lambda store: store.check([name]), self.report_limit)  # raises if the store has failed
        raise NotConnectedError(
            f"rank {rendezvous.ranks[self.rank]} could not connect to {rendezvous.text(ranks)}: {failure}"
        ) from failure
