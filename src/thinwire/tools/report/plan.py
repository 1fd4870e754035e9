"""The HTML page of a plan: curves over world sizes and rates of links, and what to use where."""

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from thinwire.plan.cost import Cost
from thinwire.plan.planner import Row
from thinwire.plan.recommend import Recommendation
from thinwire.plan.scale import Curve, Scale
from thinwire.plan.text import LEGEND
from thinwire.plan.units import show_rate, show_seconds
from thinwire.tools.report.frame import COLOURS, GREY, Figure, cells, frame, line, plot, table
from thinwire.tools.report.frame import command as command_line

_MEASURES: tuple[tuple[str, str, Callable[[Cost], float], str], ...] = (
    ("Step time", "ms per step", lambda cost: 1e3 * cost.step, "log"),
    ("Bytes", "MB sent by a rank, per step", lambda cost: cost.bytes / 1e6, "log"),
    ("Utilisation", "computing, % of a step", lambda cost: 100 * cost.utilisation, "linear"),
)


def render(found: Scale, command: str, model: str) -> str:
    """Return the whole page as HTML.

    Args:
        found: The plans.
        command: The command line that made them.
        model: The model, in words.
    """
    link = found.network.link
    there = f"{show_rate(float(f'{link.up:.3g}'))} for data, {show_seconds(2 * link.latency)} round trip"
    hosts = [str(count) for count in found.sizes]
    rates = [show_rate(rate) for rate in found.rates]
    parts = (
        f"<p class='quiet'>{escape(model)}. Predicted, not measured: see docs/plan.md for the formula.</p>",
        _advice(found),
        _section(f"By hosts, {there}", found.by_size, found.sizes, hosts, "hosts"),
        _section(
            f"By bandwidth, {found.sizes[-1]} hosts", found.by_rate, found.rates, rates, "bandwidth of a link"
        ),
        f"<p class='quiet'>{escape(LEGEND)}</p>",
        f"<h2>To reproduce</h2>\n{command_line(command)}",
    )
    return frame("thinwire: what would it cost?", "\n".join(parts))


def _advice(found: Scale) -> str:
    """Return a table of what to use, by world size and rate."""
    body = "".join(
        f"<tr><th scope='row'>{count} hosts</th>{cells(_use(one) for one in row)}</tr>"
        for count, row in zip(found.sizes, found.advice, strict=True)
    )
    return (
        f"<section class='uses'><h2>What to use</h2>{table([show_rate(rate) for rate in found.rates], body)}"
        "<p class='quiet'>don't: stay with plain DDP. The ratio is the predicted speed-up. After or: averaged"
        " models that are faster still, and change training more. Loss gaps of other kinds of models are not"
        " known for yours: measure them with thinwire bench.</p></section>"
    )


def _use(advice: Recommendation) -> str:
    """Return the program and its alternative in few letters, as there are many columns."""
    if advice.row is None:
        return "don't"
    return "\nor ".join(_short(row) for row in (advice.row, advice.alternative) if row)


def _short(row: Row) -> str:
    name = row.candidate.name.replace("period=", "").replace("program=", "").replace("()", "")
    return f"{name} {row.speed_up:.2g} x"


def _section(
    title: str, curves: Sequence[Curve], x: Sequence[float], labels: Sequence[str], axis: str
) -> str:
    drawn = "".join(
        plot(name, _figure(curves, x, labels, axis, (unit, value, kind)), entries=len(curves))
        for name, unit, value, kind in _MEASURES
    )
    return f"<section><h2>{escape(title)}</h2><div class='plots'>{drawn}</div></section>"


def _figure(
    curves: Sequence[Curve],
    x: Sequence[float],
    labels: Sequence[str],
    axis: str,
    measure: tuple[str, Callable[[Cost], float], str],
) -> Figure:
    unit, value, kind = measure
    data = []
    for number, curve in enumerate(curves):
        colour = GREY if number == 0 else COLOURS[(number - 1) % len(COLOURS)]
        drawn = line(
            curve.candidate.name,
            list(x),
            [value(cost) for cost in curve.costs],
            colour,
            hover="%{y:.3g} at %{x}",
        )
        drawn["line"] |= {"width": 5 if number == 0 else 2, "dash": _dash(number)}
        data.append(drawn)
    ticks = {"type": "log", "tickvals": list(x), "ticktext": list(labels), "title": {"text": axis}}
    upright: dict[str, Any] = {"title": {"text": unit}, "type": kind}
    return {"data": data, "layout": {"xaxis": ticks, "yaxis": upright}}


def _dash(number: int) -> str:
    """Return a line's pattern, as there are more lines than colours."""
    return "solid" if number <= len(COLOURS) else "dash"
