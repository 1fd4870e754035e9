"""The interface between the engine and the process group that carries its collectives, and its failures."""

import contextlib
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Protocol

from thinwire.engine.comm.messages import Turn
from thinwire.engine.comm.pending import Pending
from thinwire.engine.comm.rendezvous import StoreRendezvous
from thinwire.engine.ops import Await, Collective
from thinwire.errors import WireError


class NotConnectedError(WireError):
    """A process group that could not be made, because some of its ranks did not connect."""


class Communicator(Protocol):
    """An issuer of collectives. It is all that the engine needs of a process group.

    `GroupCommunicator` makes a process group of its own, with the backend of the model's. `BorrowedGroup`
    uses a group of any kind that the caller owns. Both derive from `Issuer`, which maps each collective to a
    method of the group. Another transport implements this protocol, or the few methods of `AnyGroup`.
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

    def failure(self) -> str | None:
        """Return an accelerator's error that makes collectives end without their result, if it has one."""

    def part(self) -> None:
        """Wait a moment for ranks that end too. Called before `close` if an accelerator ran collectives."""

    def abort(self) -> None:
        """Fail all collectives in flight at once, if the backend can do so."""

    def close(self) -> None:
        """Release the process group. Collectives still in flight on other ranks fail there."""


CAUSE = "failed: "
"""How the report of a rank begins that did not fail by waiting for another."""


def world_ranks(communicator: Communicator, ranks: Iterable[int]) -> tuple[int, ...]:
    """Return ranks as errors name them: those of the world, or of the group if that has no store."""
    rendezvous = communicator.rendezvous
    return tuple(ranks if rendezvous is None else (rendezvous.ranks[rank] for rank in ranks))


def report(communicator: Communicator, text: str) -> None:
    """Report a failure of this rank to the others, if they have a store."""
    if communicator.rendezvous is not None:
        with contextlib.suppress(RuntimeError):  # the store's host is gone too, so no rank could read it
            communicator.rendezvous.report(text, communicator.report_limit)


def unresponsive(communicator: Communicator, ranks: Sequence[int] | None) -> str:
    """Describe which rank caused a failure, or which ranks have reported one and which have not.

    A rank whose program failed is the cause, even if others are silent. Ranks outside the collective may have
    no failure to report. They are named only if all ranks of the collective have reported, since one outside
    must then be the cause.

    Args:
        communicator: The communicator whose collective failed.
        ranks: The ranks of the collective. None: all.
    """
    rank, size, rendezvous = communicator.rank, communicator.size, communicator.rendezvous
    if rendezvous is None:
        return "A rank died, stalled, or did not take part: check the logs of the other ranks."
    try:
        reports = rendezvous.reports(communicator.report_limit)
    except RuntimeError:
        return "The store does not answer either: its host, often rank 0's, has died or is frozen."
    # All ranks that failed report within this time: a rank whose program failed closes its connections, which
    # fails its peers' collectives at once. Who is silent at the end of it is dead, frozen, or elsewhere.
    others = {
        peer: f"Rank {rendezvous.ranks[peer]} {text}." for peer, text in reports.items() if peer != rank
    }
    if causes := [text for peer, text in others.items() if reports[peer].startswith(CAUSE)]:
        return " ".join(causes)
    silent = [peer for peer in range(size) if peer not in reports]
    taking_part = ranks or range(size)
    silent = [peer for peer in silent if peer in taking_part] or silent
    if silent:
        named, they = rendezvous.text(silent).capitalize(), "it" if len(silent) == 1 else "they"
        return f"{named} did not respond: {they} died, stalled, or skipped this step."
    return " ".join(others.values())
