"""The interface to a service that agrees on the live replicas of each exchange, and its communicator."""

import threading
from datetime import timedelta
from typing import Any, Protocol

from thinwire.engine.comm.borrowed_group import BorrowedGroup
from thinwire.engine.comm.communicator import NotConnectedError
from thinwire.engine.comm.messages import Turn
from thinwire.engine.comm.pending import Pending
from thinwire.engine.ops import Await, Collective
from thinwire.errors import ThinwireError


class QuorumService(Protocol):
    """A service that agrees on the live replicas of each exchange, such as torchft's Manager.

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
        """The reason why this replica cannot take part in the exchange that has begun, or None."""

    def begin(self, limit: timedelta) -> None:
        """Wait until enough replicas have called it, and connect to them.

        A replica behind the others' position receives a live peer's state before this returns.

        Args:
            limit: The time to wait for them.

        Raises:
            WireError: There were not enough replicas in time.
            MismatchError: The peer whose state was received is set up differently.
            StateError: The peer's state does not fit.
        """

    def vote(self, error: Exception | None) -> bool:
        """End the exchange, and return whether to commit it.

        Args:
            error: The failure on this replica, or None.

        Raises:
            WireError: Too many consecutive exchanges were not committed.
        """

    def fall_behind(self) -> None:
        """Let the next `begin` replace this replica's state by a live peer's."""

    def abort(self) -> None:
        """Close the connections, so that replicas that wait for this one fail at once."""

    def state_dict(self) -> dict[str, int]:
        """Return the service's counts, for a saved state."""

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from saved counts."""


class QuorumCommunicator(BorrowedGroup):
    """A communicator for one exchange on the group of a quorum service.

    A collective that the group rejects counts as failed, since a replica may die between two collectives.

    Args:
        service: The service, after its `begin`.
    """

    def __init__(self, service: QuorumService) -> None:
        super().__init__(_PlacedGroup(service), service.limit)
        self._service = service
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

    # `abort` and `release` race for the connections, which the service reuses. After a failure the engine
    # aborts on a thread of its own. If the training thread has gone on to the next `begin` by then, the abort
    # would close the connections of the next exchange. So the first of the two to come takes `_taken`: an
    # abort after `release` does nothing, and `release` waits for an abort that is closing connections.

    def abort(self) -> None:
        """Close the service's connections, unless the exchange is over or that was done before."""
        with self._lock:
            first, self._taken = not self._taken, True
        if first:
            try:
                self._service.abort()
            finally:
                self._aborted.set()

    def release(self) -> None:
        """Leave the connections to the next exchange. Waits for an `abort` in progress."""
        with self._lock:
            first, self._taken = not self._taken, True
        if not first:
            self._aborted.wait(self.limit.total_seconds())


class _PlacedGroup:
    """A group with the rank and size of a quorum."""

    def __init__(self, service: QuorumService) -> None:
        # Read once: they belong to the exchange that has begun, also for threads that end after it.
        self._rank, self._size = service.rank, service.size
        self._group = service.group

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)
