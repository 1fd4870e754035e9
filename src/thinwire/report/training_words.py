"""The texts of a training log's figures."""

import math
from collections.abc import Iterator

from thinwire.engine.meter import ratio_text
from thinwire.report.training_summary import Event, Summary
from thinwire.telemetry.log import Audited, Log

COLUMNS = ("error", "largest error", "at step", "residual", "audited at step")

LEGEND = (
    "Bytes and seconds are those of the rank that wrote the log. in flight: time with a collective in flight."
    " exposed: time that backward waited for the network. error: |compressed mean - exact mean| / |exact"
    " mean|. With error feedback the compressed mean also contains residuals of earlier steps. An error of 1"
    " then means that the delayed part is as large as the new one, not that anything is lost. residual: the"
    " norm of all ranks' residuals, which are still to be sent. It levels off in sound training. An audited"
    " step sends the exact mean in addition to its own bytes. Dotted lines mark audits after which the"
    " program was replaced or training stopped."
)


def whose(log: Log) -> str:
    """Return the rank that wrote the log, or nothing if the log does not record it."""
    if log.rank is None or log.world_size is None:
        return ""
    among = f" of {log.world_size}" if log.rank < log.world_size else f", in a group of {log.world_size}"
    return f", rank {log.rank}{among}"


def worth(summary: Summary) -> str:
    """Return a text about the bytes sent and the time waited."""
    each = size(summary.sent_per_step)
    text = f"{_count(summary.steps, 'step')} sent {size(summary.sent)} in total, {each} a step"
    if summary.compression is not None:
        text += (
            f", {ratio_text(summary.compression)} plain DDP, which would have sent {size(summary.ddp or 0)}"
        )
    if summary.for_audits:
        text += f"; {summary.for_audits / summary.sent:.0%} of it for audits"
    if summary.saving is not None:
        text += f". In audited steps, the exact mean took {summary.saving:.3g} times the bytes of the program"
    if summary.exposed is None or summary.wire is None:
        return f"{text}. The time on the network is not known, because it is not measured on accelerators."
    per_step = _seconds(summary.exposed / max(summary.steps, 1))
    share = "" if summary.exposed_share is None else f", {summary.exposed_share:.0%} of that"
    return (
        f"{text}. The network was busy for {_seconds(summary.wire)}; backward waited for it for"
        f" {_seconds(summary.exposed)}{share}, {per_step} a step."
    )


def trust(summary: Summary) -> str:
    """Return a text about the errors that audits have measured."""
    latest, worst = summary.latest, summary.worst
    if latest is None or worst is None:
        return (
            "Not known: this log has no audits. With attach(..., audit_every=1000) every thousandth step also"
            " computes the exact mean and records the error."
        )
    acted = sum(len(event.audits) for event in summary.events)
    found = f"{acted:,} above the limit" if acted else "none led to a warning or a fallback"
    text = (
        f"{_count(summary.audits, 'audit')}, {found}. Latest, of step {latest.step:,}: error"
        f" {number(latest.error)}, worst {number(latest.worst_error)} of {latest.worst}."
    )
    if worst is latest:
        return text if summary.audits == 1 else f"{text} None was worse."
    return f"{text} Worst of all: {number(worst.worst_error)} of {worst.worst} at step {worst.step:,}."


def event_text(event: Event) -> str:
    """Return a text about an event: the action, its steps and its cause."""
    first, last, worst = event.audits[0], event.audits[-1], event.worst
    if first is last:
        return f"Step {first.step:,}: {first.action}, because {_why(first)}."
    return (
        f"Steps {first.step:,} to {last.step:,}: {first.action} {len(event.audits):,} times; at worst, at"
        f" step {worst.step:,}, because {_why(worst)}."
    )


def notes(log: Log, summary: Summary) -> Iterator[str]:
    """Yield remarks about overflows, resumed runs and damage of the log."""
    if summary.overflows:
        stretch = summary.overflows_in_a_row
        in_a_row = f", up to {stretch:,} in a row" if stretch > 1 else ""
        end = " The log ends with overflows: training makes no progress." if summary.stuck else ""
        yield (
            f"{_count(summary.overflows, 'overflow')}{in_a_row}: a gradient was infinite or NaN, and the step"
            f" was skipped.{end}"
        )
    if summary.repeats:
        yield (
            f"{_count(summary.repeats, 'row')} repeat the step before. The log is of an older thinwire, which"
            " did not record overflows. Either these steps overflowed, or several ranks wrote to this file,"
            " and bytes and times are sums over ranks."
        )
    if summary.resumes:
        then, now = summary.resumes[-1]
        yield (
            f"The log goes back {_count(len(summary.resumes), 'time')}, most recently from step {then:,} to"
            f" step {now:,}: training was resumed. Bytes and times include the repeated steps."
        )
    if log.cut:
        yield "The last line is incomplete, as after a kill, and is ignored."


def parameter_rows(log: Log) -> list[tuple[str, list[str]]]:
    """Return each parameter's figures as named by COLUMNS, the largest error first."""
    rows = []
    for name, one in sorted(log.parameters.items(), key=lambda item: item[1].errors[-1], reverse=True):
        largest = max(one.errors)
        at = one.steps[one.errors.index(largest)]
        figures = [number(one.errors[-1]), number(largest), f"{at:,}"]
        rows.append((name, [*figures, number(one.residual), f"{one.steps[-1]:,}"]))
    return rows


def number(value: float) -> str:
    """Format an error to three digits. It is infinite if only the exact mean is zero."""
    return f"{value:.3g}" if math.isfinite(value) else "infinite"


def size(count: float) -> str:
    """Format a number of bytes to three digits.

    >>> size(0), size(5968), size(25_900_000), size(1.2e12), size(999_999)
    ('0 B', '5.97 kB', '25.9 MB', '1.2 TB', '1 MB')
    """
    units = ["B", "kB", "MB", "GB", "TB", "PB"]
    while float(f"{count:.3g}") >= 1000 and len(units) > 1:
        count /= 1000
        del units[0]
    return f"{count:.3g} {units[0]}"


def _seconds(seconds: float) -> str:
    for unit, length in (("h", 3600), ("min", 60), ("s", 1)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _why(audit: Audited) -> str:
    if not math.isfinite(audit.worst_error):
        return f"the exact mean of {audit.worst} was zero and the compressed one was not"
    return (
        f"the mean of {audit.worst} was off by {number(audit.worst_error)} of the exact one (all"
        f" {audit.of}: {number(audit.error)})"
    )
