"""The HTML page of a training log, which shows the costs and the error of compression."""

from html import escape

from thinwire.telemetry.log import Log
from thinwire.tools.report.frame import cells, fact, frame, plot, table
from thinwire.tools.report.training_figures import figures
from thinwire.tools.report.training_summary import Summary, summarise
from thinwire.tools.report.training_words import (
    COLUMNS,
    LEGEND,
    event_text,
    facts,
    notes,
    parameter_rows,
    trust,
    verdict,
    whose,
    worth,
)


def render(log: Log, name: str) -> str:
    """Return the whole page as HTML.

    Args:
        log: The training log.
        name: The name of its file.
    """
    summary = summarise(log)
    listed = "".join(fact(*one) for one in facts(log, summary))
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
