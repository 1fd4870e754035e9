"""The tables of `thinwire plan`."""

from typing import Any

from thinwire.bench.parsing import attach_line
from thinwire.cli.output import err, out, print_json
from thinwire.cli.table import text_table
from thinwire.plan.network import Network
from thinwire.plan.planner import Row
from thinwire.plan.recommend import Recommendation
from thinwire.plan.words import LEGEND, TIME, TRADE, as_data, sources, time_of, trade_of
from thinwire.units import show_bytes, show_seconds

SIZES = ("plain DDP", "bytes", "computing", "step", "speed-up", "bytes", "computing", "use")

Plan = tuple[Network, list[Row], Recommendation]


def line_of(advice: Recommendation) -> str | None:
    """Return the line of Python that follows a recommendation, or None for plain DDP."""
    return attach_line(advice.row.candidate.text) if advice.row else None


def show_plan(rows: list[Row], advice: Recommendation, *, as_json: bool) -> None:
    """Print the plan for one network."""
    line = line_of(advice)
    if as_json:
        print_json(as_data(rows, advice, line))
        return
    out.print()
    for columns, text_of in ((TIME, time_of), (TRADE, trade_of)):
        lines = [(row.candidate.name, text_of(row), row is advice.row) for row in rows]
        out.print(text_table(columns, lines), "", soft_wrap=False)
    out.print(advice.text, style="bold")
    if line:
        out.print(f"\n    {line}\n", style="bold")
    for source in sources(rows):
        err.print(f"loss gaps of {source}", style="dim")
    err.print(LEGEND, style="dim")


def show_sizes(plans: list[Plan], *, as_json: bool) -> None:
    """Print one line for each world size: plain DDP and the recommendation."""
    if as_json:
        found: list[dict[str, Any]] = [
            {"hosts": network.ranks, **as_data(rows, advice, line_of(advice))}
            for network, rows, advice in plans
        ]
        print_json(found)
        return
    lines = []
    for network, rows, advice in plans:
        best = advice.row or rows[0]
        figures = [*_size_of(rows[0]), *_size_of(best)]
        figures.insert(4, f"{best.speed_up:.2f} x")
        lines.append((f"{network.ranks} hosts", [*figures, best.candidate.name], False))
    out.print()
    out.print(text_table(SIZES, lines), "", soft_wrap=False)
    err.print(
        "computing: the share of a step that is not communication. The second bytes and computing are those"
        " of the program to use.",
        style="dim",
    )


def _size_of(row: Row) -> list[str]:
    return [show_seconds(row.cost.step), show_bytes(row.cost.bytes), f"{row.cost.utilisation:.0%}"]
