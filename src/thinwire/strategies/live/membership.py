"""The interface to a service that agrees on the replicas of each exchange, and its communicator."""

import threading
from datetime import timedelta
from typing import Any, Protocol

from thinwire.engine.comm.borrowed_group import BorrowedGroup
from thinwire.engine.comm.communicator import NotConnectedError
from thinwire.engine.comm.messages import Turn
from thinwire.engine.comm.pending import Pending
from thinwire.engine.ops import Await, Collective
from thinwire.errors import ThinwireError


class Membership(Protocol):
    """A service that agrees on the replicas of each exchange. torchft's Manager is one.

    An exchange is one `begin`, collectives among `size` replicas, and one `vote`.
    """

    name: str
    """This replica's name, for logs of the others."""
    limit: timedelta
    """The time within which a collective fails."""
    patience: timedelta
    """The time to wait for enough replicas."""
    group: Any
    """The group that carries collectives, with the methods of `AnyGroup` except rank and size."""

    @property
    def rank(self) -> int:
        """This replica's place in the exchange that has begun."""

    @property
    def size(self) -> int:
        """The number of replicas in the exchange that has begun."""

    @property
    def minimum(self) -> int:
        """The number of replicas that an exchange needs to be committed."""

    @property
    def position(self) -> int:
        """The number of exchanges that this replica has committed, or received the result of."""

    @property
    def error(self) -> str | None:
        """Why this replica cannot take part in the exchange that has begun, or None."""

    def begin(self, limit: timedelta) -> None:
        """Wait until enough replicas have called it, and connect to them.

        A replica behind the others' position receives a live peer's state before this returns.

        Args:
            limit: The time to wait for them.

        Raises:
            WireError: There were not enough replicas in time.
            MismatchError: The peer whose state it received is set up differently.
            StateError: That state does not fit.
        """

    def vote(self, error: Exception | None) -> bool:
        """End the exchange, and return whether to commit it.

        Args:
            error: What went wrong on this replica, or None.

        Raises:
            WireError: Too many exchanges in a row were not committed.
        """

    def fall_behind(self) -> None:
        """Let the next `begin` replace this replica's state by a live peer's."""

    def abort(self) -> None:
        """Close the connections, so that replicas that wait for this one fail at once."""


class LiveCommunicator(BorrowedGroup):
    """A communicator for one exchange on the group of a membership.

    A collective that the group rejects is one that failed: a replica may die at any moment, also between two
    collectives. `abort` closes the connections, once. (The engine does so on a thread of its own. Without the
    mark it could close those of the next exchange.)

    Args:
        membership: The membership, after its `begin`.
    """

    def __init__(self, membership: Membership) -> None:
        super().__init__(_Placed(membership), membership.limit)
        self._membership = membership
        self._lock = threading.Lock()
        self._taken = False
        self._aborted = threading.Event()

    def issue(self, op: Collective | Await, turn: Turn | None = None) -> Pending:
        """Issue a collective; raise NotConnectedError if the group rejects it."""
        try:
            return super().issue(op, turn)
        except ThinwireError:
            raise
        except (RuntimeError, AssertionError) as error:  # torchft asserts that its group is configured
            raise NotConnectedError(str(error)) from error

    def abort(self) -> None:
        """Close the membership's connections, unless the exchange is over or that was done before."""
        with self._lock:
            first, self._taken = not self._taken, True
        if first:
            try:
                self._membership.abort()
            finally:
                self._aborted.set()

    def release(self) -> None:
        """Leave the connections to the next exchange. Waits for an `abort` in progress."""
        with self._lock:
            first, self._taken = not self._taken, True
        if not first:
            self._aborted.wait(self.limit.total_seconds())


class _Placed:
    """A group with the rank and size of a membership."""

    def __init__(self, membership: Membership) -> None:
        # Read once: they are those of the exchange that has begun, also for threads that end after it.
        self._rank, self._size = membership.rank, membership.size
        self._group = membership.group

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)
