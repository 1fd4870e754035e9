"""Plans over many world sizes and rates of links, and their HTML page."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from thinwire.plan.candidates import PLAIN_DDP, Candidate
from thinwire.plan.cost import Cost
from thinwire.plan.gaps import Known
from thinwire.plan.network import FRAMING, Network
from thinwire.plan.planner import Planner, Row
from thinwire.plan.recommend import Limits, Recommendation, recommend
from thinwire.plan.text import LEGEND
from thinwire.plan.units import show_rate, show_seconds
from thinwire.tools.report.frame import COLOURS, GREY, Figure, cells, frame, line, plot, table
from thinwire.tools.report.frame import command as command_line

RATES = (1e8, 2.5e8, 5e8, 1e9, 2.5e9, 5e9, 1e10, 2.5e10)
"""Bits per second, 100 Mbit/s to 25 Gbit/s."""

_MEASURES: tuple[tuple[str, str, Callable[[Cost], float], str], ...] = (
    ("Step time", "ms per step", lambda cost: 1e3 * cost.step, "log"),
    ("Bytes", "MB sent by a rank, per step", lambda cost: cost.bytes / 1e6, "log"),
    ("Utilisation", "computing, % of a step", lambda cost: 100 * cost.utilisation, "linear"),
)


@dataclass(frozen=True)
class Curve:
    """One candidate's costs over world sizes or rates."""

    candidate: Candidate
    costs: tuple[Cost, ...]


@dataclass(frozen=True)
class Scale:
    """Plans over world sizes at one link, and over rates at one world size.

    Attributes:
        network: The link that the user described, with the largest world size.
        sizes: The world sizes.
        rates: The rates of links, headers included.
        by_size: A curve over world sizes for each candidate, plain DDP first.
        by_rate: A curve over rates for each candidate, at the largest world size.
        advice: The recommendation for each world size and rate, as `advice[size][rate]`.
    """

    network: Network
    sizes: tuple[int, ...]
    rates: tuple[float, ...]
    by_size: list[Curve]
    by_rate: list[Curve]
    advice: list[list[Recommendation]]


def scale(
    planner: Planner,
    candidates: Sequence[Candidate],
    networks: Sequence[Network],
    known: Known,
    limits: Limits,
) -> Scale:
    """Plan for every world size and rate.

    Args:
        planner: The planner.
        candidates: The ways to train that are compared with plain DDP.
        networks: The network that the user described, once for each world size.
        known: Measured loss gaps.
        limits: The constraints of recommendations.
    """
    every = [PLAIN_DDP, *candidates]
    largest = networks[-1]
    by_size = [
        Curve(candidate, tuple(planner.cost(candidate, there) for there in networks)) for candidate in every
    ]
    faster = [at_rate(largest, rate) for rate in RATES]
    by_rate = [
        Curve(candidate, tuple(planner.cost(candidate, there) for there in faster)) for candidate in every
    ]
    advice = []
    for network in networks:
        there = [at_rate(network, rate) for rate in RATES]
        found = [
            recommend(planner.quick_rows(candidates, network, known), network, limits) for network in there
        ]
        advice.append(found)
    return Scale(largest, tuple(network.ranks for network in networks), RATES, by_size, by_rate, advice)


def at_rate(network: Network, rate: float) -> Network:
    """Return the network with another rate of all links in both directions."""
    return replace(network, link=replace(network.link, up=FRAMING * rate, down=FRAMING * rate))


def render(found: Scale, command: str, model: str) -> str:
    """Return the whole page as HTML."""
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
    """Return a table of recommendations by world size and rate."""
    body = "".join(
        f"<tr><th scope='row'>{count} hosts</th>{cells(_use(advice) for advice in row)}</tr>"
        for count, row in zip(found.sizes, found.advice, strict=True)
    )
    return (
        f"<section class='uses'><h2>What to use</h2>{table([show_rate(rate) for rate in found.rates], body)}"
        "<p class='quiet'>don't: stay with plain DDP. The ratio is the predicted speed-up. After or: averaged"
        " models that are faster still, and change training more. Loss gaps of other kinds of models are not"
        " known for yours: measure them with thinwire bench.</p></section>"
    )


def _use(advice: Recommendation) -> str:
    """Return the program and its alternative in few letters, because the table has many columns."""
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
    """Return a line's pattern. There are more lines than colours."""
    return "solid" if number <= len(COLOURS) else "dash"
