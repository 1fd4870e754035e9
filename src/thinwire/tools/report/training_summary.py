"""The summary of a training log, shown above the plots."""

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from statistics import fmean, median

from thinwire.engine.meter import GRADIENTS, MODELS
from thinwire.telemetry.log import Audited, Log, Series

_STUCK = 3
_AS_MUCH = 1.02
"""The ratio of plain DDP's bytes to those sent up to which a step counts as exact."""
_FEWEST_EXACT = 3
"""Exact steps from which their time is compared."""


@dataclass(frozen=True)
class Event:
    """Consecutive audits that led to the same action."""

    audits: tuple[Audited, ...]

    @property
    def worst(self) -> Audited:
        """The audit with the largest error."""
        return _worst(self.audits)


@dataclass(frozen=True)
class Summary:
    """The figures of a run. Bytes and seconds are those of the rank that wrote the log.

    Attributes:
        steps: The number of different steps.
        sent: Bytes in total.
        for_audits: The part of `sent` that audits took for exact means.
        ddp: Bytes that plain DDP would have sent. None if none would have been sent.
        own_when_audited: Bytes that programs sent in audited exchanges, to compare with `for_audits`.
        wire: Seconds with a collective in flight. None if not measured.
        exposed: Seconds that backward waited for the network. None if not measured.
        overflows: The number of skipped steps.
        overflows_in_a_row: The largest number of consecutive skipped steps.
        stuck: Whether the log ends with several skipped steps.
        resumes: Pairs of a step and the earlier step that follows it in the log.
        audits: The number of audits.
        latest: The latest audit, or None.
        worst: The audit with the largest error, or None.
        events: The actions that followed from audits.
        began: Seconds since the epoch at the end of the first step. None if not known.
        ended: Seconds since the epoch at the end of the last step. None if not known.
        step: Typical seconds of a step that exchanges less than plain DDP. None if not known.
        exact_step: Typical seconds of a step that exchanges as much as plain DDP. None without such steps.
        exact_steps: The number of such steps.
    """

    steps: int
    sent: int
    for_audits: int
    ddp: int | None
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
    began: float | None = None
    ended: float | None = None
    step: float | None = None
    exact_step: float | None = None
    exact_steps: int = 0

    @property
    def speed_up(self) -> float | None:
        """Seconds of an exact step over those of a compressed one. None if either is not known."""
        return self.exact_step / self.step if self.exact_step and self.step else None

    @property
    def sent_per_step(self) -> float:
        """Bytes per step, audits included."""
        return self.sent / max(self.steps, 1)

    @property
    def compression(self) -> float | None:
        """Bytes of plain DDP over those sent, audits included. None if not known."""
        return None if self.ddp is None or not self.sent else self.ddp / self.sent

    @property
    def saving(self) -> float | None:
        """Bytes of the exact mean over those of the program. None without audits."""
        known = self.for_audits > 0 and self.own_when_audited > 0
        return self.for_audits / self.own_when_audited if known else None


def summarise(log: Log) -> Summary:
    """Compute all figures of a log."""
    every = list(log.series.values())
    gradients = log.series.get(GRADIENTS, Series())
    steps, overflowed = gradients.steps, [fact == 1 for fact in gradients.overflowed]
    for_audits = sum(sum(series.audit) for series in every)
    compressed, exact = _step_seconds(gradients)
    averages = MODELS in log.series  # most steps exchange nothing, and the median would hide the others
    return Summary(
        steps=len(set(steps)),
        sent=sum(sum(series.own) for series in every) + for_audits,
        for_audits=for_audits,
        ddp=sum(gradients.ddp) or None,
        own_when_audited=sum(
            own for series in every for own, audit in zip(series.own, series.audit, strict=True) if audit
        ),
        wire=_known(second for series in every for second in series.wire),
        exposed=_known(second for series in every for second in series.exposed),
        overflows=sum(overflowed),
        overflows_in_a_row=max((len(list(run)) for fact, run in groupby(overflowed) if fact), default=0),
        stuck=overflowed[-_STUCK:] == [True] * _STUCK,
        resumes=tuple((then, now) for then, now in pairwise(steps) if now < then),
        audits=len(log.audits),
        latest=log.audits[-1] if log.audits else None,
        worst=_worst(log.audits) if log.audits else None,
        events=events_of(log),
        began=min(gradients.ended, default=None),
        ended=max(gradients.ended, default=None),
        step=(fmean(compressed) if averages else median(compressed)) if compressed else None,
        exact_step=median(exact) if len(exact) >= _FEWEST_EXACT else None,
        exact_steps=len(exact),
    )


def _step_seconds(gradients: Series) -> tuple[list[float], list[float]]:
    """Return the times of steps that sent less than plain DDP, and of those that sent as much.

    The time of a step is that from its forward pass to the next one. The first step after a start or a
    resume has none. Audited steps, which also send the exact mean, and skipped ones are left out.
    """
    found: tuple[list[float], list[float]] = ([], [])
    for place in range(1, len(gradients.steps)):
        follows = gradients.steps[place] == gradients.steps[place - 1] + 1
        seconds = gradients.ended[place] - gradients.ended[place - 1]
        if not follows or not seconds >= 0 or gradients.audit[place] or gradients.overflowed[place] == 1:
            continue
        exact = 0 < gradients.ddp[place] <= _AS_MUCH * gradients.own[place]
        found[exact].append(seconds)
    return found


def events_of(log: Log) -> tuple[Event, ...]:
    """Return the actions that followed from audits. Equal consecutive actions are one event."""
    acted = (audit for audit in log.audits if audit.action)
    return tuple(Event(tuple(run)) for _, run in groupby(acted, key=lambda audit: audit.action))


def _worst(audits: Sequence[Audited]) -> Audited:
    return max(audits, key=lambda audit: audit.worst_error)


def _known(seconds: Iterable[float]) -> float | None:
    known = array("d", (second for second in seconds if not math.isnan(second)))
    return sum(known) if known else None
