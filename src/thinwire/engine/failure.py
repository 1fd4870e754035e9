"""Reports of failures between ranks, so that an error names the rank that caused it."""

import contextlib
from collections.abc import Iterable

from thinwire.engine.communicator import Communicator

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


def unresponsive(communicator: Communicator, op: object) -> str:
    """Describe which rank caused a failure, or which ranks have reported one and which have not.

    A rank whose program failed is the cause, even if others are silent. Ranks outside the collective may have
    no failure to report. They are named only if all ranks of the collective have reported, since one outside
    must then be the cause.

    Args:
        communicator: The ranks to ask.
        op: The collective that failed.

    Returns:
        One or more sentences for the error message.
    """
    rank, size, rendezvous = communicator.rank, communicator.size, communicator.rendezvous
    if rendezvous is None:
        return "A rank died, stalled, or did not take part: check the logs of the other ranks."
    try:
        reports = rendezvous.reports(communicator.report_limit)
    except RuntimeError:
        return "The store does not answer either: its host, often rank 0's, has died or is frozen."
    others = {
        peer: f"Rank {rendezvous.ranks[peer]} {text}." for peer, text in reports.items() if peer != rank
    }
    if causes := [text for peer, text in others.items() if reports[peer].startswith(CAUSE)]:
        return " ".join(causes)
    silent = [peer for peer in range(size) if peer not in reports]
    taking_part = getattr(op, "ranks", None) or range(size)
    silent = [peer for peer in silent if peer in taking_part] or silent
    if silent:
        return f"No word from {rendezvous.text(silent)}: dead, stalled, or not taking part in this step."
    return " ".join(others.values())
