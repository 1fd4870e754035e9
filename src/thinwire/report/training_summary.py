"""What a training log comes to: the figures that stand above the plots."""

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise

from thinwire.telemetry.log import Audited, Log, Series
from thinwire.wire.meter import GRADIENTS

_STUCK = 3


@dataclass(frozen=True)
class Event:
    """What audits led to: the same thing, once or many times in a row."""

    audits: tuple[Audited, ...]

    @property
    def worst(self) -> Audited:
        """The audit with the largest error."""
        return _worst(self.audits)


@dataclass(frozen=True)
class Summary:
    """The figures of a run; bytes and seconds are of the rank that wrote the log.

    Attributes:
        steps: How many different ones.
        sent: Bytes in total.
        for_audits: Of these, the exact means of audits.
        own_when_audited: Of the exchanges that were audited, the programs' own bytes; `for_audits` is what
            the exact mean of the same took.
        wire: Seconds with a collective under way; None where nobody can tell.
        exposed: Seconds that backward waited; likewise.
        overflows: Steps that did not count and were taken again.
        overflows_in_a_row: The longest such stretch.
        stuck: Whether the log ends in the midst of several.
        resumes: Where the log goes back: from a step to an earlier one.
    """

    steps: int
    sent: int
    for_audits: int
    own_when_audited: int
    wire: float | None
    exposed: float | None
    overflows: int
    overflows_in_a_row: int
    stuck: bool
    resumes: tuple[tuple[int, int], ...]
    audits: int
    latest: Audited | None
    worst: Audited | None
    events: tuple[Event, ...] = field(repr=False)

    @property
    def sent_per_step(self) -> float:
        """Bytes, audits included."""
        return self.sent / max(self.steps, 1)

    @property
    def saving(self) -> float | None:
        """How many times as much the exact mean takes; None where no audit tells."""
        known = self.for_audits > 0 and self.own_when_audited > 0
        return self.for_audits / self.own_when_audited if known else None

    @property
    def exposed_share(self) -> float | None:
        """Of the time with a collective under way, how much backward waited."""
        return None if self.exposed is None or not self.wire else self.exposed / self.wire


def summarise(log: Log) -> Summary:
    """All figures of a log."""
    every = list(log.series.values())
    steps = log.series.get(GRADIENTS, Series()).steps
    repeats = [then == now for then, now in pairwise(steps)]
    for_audits = sum(sum(one.audit) for one in every)
    return Summary(
        steps=len(set(steps)),
        sent=sum(sum(one.own) for one in every) + for_audits,
        for_audits=for_audits,
        own_when_audited=sum(
            own for one in every for own, audit in zip(one.own, one.audit, strict=True) if audit
        ),
        wire=_known(second for one in every for second in one.wire),
        exposed=_known(second for one in every for second in one.exposed),
        overflows=sum(repeats),
        overflows_in_a_row=max((len(list(run)) for same, run in groupby(repeats) if same), default=0),
        stuck=repeats[-_STUCK:] == [True] * _STUCK,
        resumes=tuple((then, now) for then, now in pairwise(steps) if now < then),
        audits=len(log.audits),
        latest=log.audits[-1] if log.audits else None,
        worst=_worst(log.audits) if log.audits else None,
        events=events_of(log),
    )


def events_of(log: Log) -> tuple[Event, ...]:
    """What followed from audits; the same thing again and again is one event."""
    acted = (audit for audit in log.audits if audit.action)
    return tuple(Event(tuple(run)) for _, run in groupby(acted, key=lambda audit: audit.action))


def _worst(audits: Sequence[Audited]) -> Audited:
    return max(audits, key=lambda audit: audit.worst_error)


def _known(seconds: Iterable[float]) -> float | None:
    known = array("d", (second for second in seconds if not math.isnan(second)))
    return sum(known) if known else None
