"""The HTML page of a training log, which shows the costs and the error of compression."""

import math
from collections.abc import Iterator
from datetime import datetime, timezone
from html import escape

from thinwire.engine.meter import ratio_text
from thinwire.telemetry.log import Audited, Log
from thinwire.tools.report.frame import cells, fact, frame, plot, table
from thinwire.tools.report.training_figures import figures
from thinwire.tools.report.training_summary import Event, Summary, summarise

_GAIN = 1.02
"""Step times must differ by this ratio to be a gain."""
_STUCK = 3
"""Consecutive non-finite losses after which training has failed."""
_PROGRAMS = 4
"""The most programs that are listed."""

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


def render(log: Log, name: str) -> str:
    """Return the whole page as HTML."""
    summary = summarise(log)
    listed = "".join(fact(*pair) for pair in facts(log, summary))
    parts = (
        f"<p class='verdict'>{escape(verdict(log, summary))}</p>",
        f"<dl class='key'>{listed}{fact('Log', name + whose(log))}</dl>",
        *_headline(log, summary),
        _plots(log, summary),
        _parameters(log) if log.parameters else "",
        f"<p class='quiet'>{escape(LEGEND)}</p>",
    )
    return frame("thinwire: was it worth it?", "\n".join(parts))


def _headline(log: Log, summary: Summary) -> list[str]:
    sound = summary.audits and not summary.events
    acts = "".join(f"<li>{escape(event_text(event))}</li>" for event in summary.events)
    boxes = [
        f"<div class='advice'><b>What was sent?</b> {escape(worth(summary))}</div>",
        f"<div class='advice{'' if sound else ' heed'}'><b>Can it be trusted?</b> {escape(trust(summary))}"
        f"{f'<ul>{acts}</ul>' if acts else ''}</div>",
    ]
    said = "".join(f"<li>{escape(note)}</li>" for note in notes(log, summary))
    return [*boxes, f"<div class='advice heed'><b>About the log</b><ul>{said}</ul></div>"] if said else boxes


def _plots(log: Log, summary: Summary) -> str:
    drawn = "".join(plot(title, figure) for title, figure in figures(log, summary.events).items())
    return f"<section><h2>By step</h2><div class='plots by-two'>{drawn}</div></section>"


def _parameters(log: Log) -> str:
    body = "".join(
        f"<tr><th scope='row'>{escape(name)}</th>{cells(values)}</tr>" for name, values in parameter_rows(log)
    )
    return f"<section class='long'><h2>By parameter, latest audit</h2>{table(COLUMNS, body)}</section>"


def whose(log: Log) -> str:
    """Return the rank that wrote the log."""
    among = f" of {log.world_size}" if log.rank < log.world_size else f", in a group of {log.world_size}"
    return f", rank {log.rank}{among}"


def verdict(log: Log, summary: Summary) -> str:
    """Return whether compression paid and can be trusted, in a sentence or two."""
    spoilt = _spoilt(log, summary)
    if spoilt:
        return spoilt
    doubt = ""
    if summary.events:
        doubt = " But audits found errors above the limit: see below."
    if summary.speed_up is not None:
        own, exact = _seconds(summary.step or 0.0), _seconds(summary.exact_step or 0.0)
        times = f"a step takes {own}, with exact gradients {exact}"
        if summary.speed_up >= _GAIN:
            return f"It pays: {times}. That is {summary.speed_up:.2f} x as fast.{doubt}"
        return f"It does not pay: {times}. Train without compression here.{doubt}"
    if summary.compression is not None:
        less = f"It sends {ratio_text(summary.compression)} plain DDP."
    else:
        less = f"It sends {size(summary.sent_per_step)} a step."
    lacks = "times" if summary.step is None else "exact steps to compare with"
    return f"{less} Whether steps are faster is not known, because the log has no {lacks}.{doubt}"


def _spoilt(log: Log, summary: Summary) -> str:
    """Return the reason why training failed, or an empty text."""
    if summary.stuck:
        return "Training makes no progress: the log ends with overflows."
    loss = log.logged.get("loss")
    if loss is None:
        return ""
    finite = [place for place, value in enumerate(loss.values) if math.isfinite(value)]
    since = finite[-1] + 1 if finite else 0
    if len(loss.values) - since < _STUCK:  # a single one is of a skipped step
        return ""
    return f"Training failed: the loss is non-finite since step {loss.steps[since]:,}."


def facts(log: Log, summary: Summary) -> list[tuple[str, str]]:
    """Return the most important figures, each with its name."""
    return [
        ("Program", programs(log)),
        ("Loss", losses(log)),
        ("Step time", step_time(summary)),
        ("Steps", f"{summary.steps:,}{_span(log)}"),
        ("Dates", dates(summary)),
    ]


def programs(log: Log) -> str:
    """Return the programs that ran, with the steps at which they changed."""
    if not log.programs:
        return "not known: the log's first rows are missing"
    first, *later = log.programs
    shown = [first[1], *(f"from step {step:,} {text}" for step, text in later)]
    if len(shown) > _PROGRAMS:
        shown = [*shown[: _PROGRAMS - 1], f"{len(shown) - _PROGRAMS:,} more changes", shown[-1]]
    return ", ".join(shown)


def losses(log: Log) -> str:
    """Return the first and the latest loss, or how to log it."""
    loss = log.logged.get("loss")
    if loss is None:
        return "not logged: call watch.log(loss=loss) in each step"
    first, last = (_loss(loss.values[place]) for place in (0, -1))
    if len(loss.values) == 1:
        return f"{last} at step {loss.steps[-1]:,}"
    return f"{last} at step {loss.steps[-1]:,}, {first} at step {loss.steps[0]:,}"


def step_time(summary: Summary) -> str:
    """Return the time of a step, and that of exact steps, or how to get some."""
    if summary.step is None and summary.exact_step is None:
        return "not known: the log has no times of steps"
    if summary.step is None:
        return f"{_seconds(summary.exact_step or 0.0)}, all with exact gradients"
    own = _seconds(summary.step)
    if summary.exact_step is None or summary.speed_up is None:
        return (
            f"{own}. That of exact steps is not known: begin with some, as by"
            " attach(ddp, Schedule({0: Exact(), 20: Int8()}))"
        )
    return (
        f"{own}, with exact gradients {_seconds(summary.exact_step)} ({_count(summary.exact_steps, 'step')}"
        f" of this log): {summary.speed_up:.2f} x as fast"
    )


def dates(summary: Summary) -> str:
    """Return when the log began and ended, in UTC."""
    if summary.began is None or summary.ended is None:
        return "not known: no step exchanged gradients"
    try:
        began, ended = (
            datetime.fromtimestamp(instant, timezone.utc) for instant in (summary.began, summary.ended)
        )
    except (OverflowError, ValueError, OSError):
        return "not known: the times in the log are no dates"
    end = f"{ended:%H:%M}" if began.date() == ended.date() else f"{ended:%Y-%m-%d %H:%M}"
    return f"{began:%Y-%m-%d %H:%M} to {end} UTC ({_seconds(summary.ended - summary.began)})"


def _span(log: Log) -> str:
    steps = [step for series in log.series.values() for step in (min(series.steps), max(series.steps))]
    return f", {min(steps):,} to {max(steps):,}"


def _loss(value: float) -> str:
    return f"{value:.5g}" if math.isfinite(value) else "not finite"


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
    busy, waited = (_seconds(seconds / max(summary.steps, 1)) for seconds in (summary.wire, summary.exposed))
    return (
        f"{text}. In an average step a collective was in flight for {busy}, and backward waited {waited} for"
        f" results. In total, backward waited {_seconds(summary.exposed)}."
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
    for name, audited in sorted(log.parameters.items(), key=lambda item: item[1].errors[-1], reverse=True):
        largest = max(audited.errors)
        at = audited.steps[audited.errors.index(largest)]
        figures = [number(audited.errors[-1]), number(largest), f"{at:,}"]
        rows.append((name, [*figures, number(audited.residual), f"{audited.steps[-1]:,}"]))
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
