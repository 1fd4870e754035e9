"""The interface between the engine and the process group that carries its collectives."""

from datetime import timedelta
from typing import Protocol

from thinwire.engine.messages import Turn
from thinwire.engine.ops import Await, Collective
from thinwire.engine.pending import Pending
from thinwire.engine.rendezvous import StoreRendezvous
from thinwire.errors import WireError


class NotConnectedError(WireError):
    """A process group that could not be made, because some of its ranks did not connect."""


class Communicator(Protocol):
    """An issuer of collectives. It is all that the engine needs of a process group.

    `GroupCommunicator` makes a process group of its own. `BorrowedGroup` uses a group of any kind that the
    caller owns.
    """

    @property
    def rank(self) -> int:
        """This rank. It may change between steps if replicas join or leave."""

    @property
    def size(self) -> int:
        """The number of ranks. It may change between steps."""

    @property
    def limit(self) -> timedelta:
        """The time within which a failure is raised."""

    @property
    def report_limit(self) -> timedelta:
        """The part of `limit` that is kept for collecting the other ranks' reports of a failure."""

    @property
    def rendezvous(self) -> StoreRendezvous | None:
        """The ranks' store, through which they report failures, or None without one."""

    def in_any_order(self, op: Collective) -> bool:
        """Return whether ranks may issue a collective at different points of their order.

        Args:
            op: The collective.

        Returns:
            True if ranks match it by its tag, False if they match it by the order of issue.
        """

    def issue(self, op: Collective | Await, turn: Turn | None = None) -> Pending:
        """Issue a collective and return without waiting for it.

        Args:
            op: The collective, or a future to wait for.
            turn: Its bucket and stage, by which ranks match it if they issue in any order. None if all ranks
                issue in the same order.

        Returns:
            The collective in flight.

        Raises:
            ProgramError: `op` is not a valid collective.
            WireError: The communicator is closed.
        """

    def abort(self) -> None:
        """Fail all collectives in flight at once, if the backend can do so."""

    def close(self) -> None:
        """Release the process group. Collectives still in flight on other ranks fail there."""
