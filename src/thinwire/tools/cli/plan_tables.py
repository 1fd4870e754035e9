"""The tables of `thinwire plan`."""

from typing import Any

from thinwire.plan.load import Timing
from thinwire.plan.network import Network
from thinwire.plan.planner import Row
from thinwire.plan.recommend import Recommendation
from thinwire.plan.text import LEGEND, TIME, TRADE, Lines, as_data, sources, time_of, trade_of
from thinwire.plan.units import show_bytes, show_seconds
from thinwire.tools.bench.parsing import attach_line
from thinwire.tools.cli.output import err, out, print_json
from thinwire.tools.cli.table import text_table

SIZES = ("plain DDP", "bytes", "computing", "step", "speed-up", "bytes", "computing", "use", "or")

Plan = tuple[Network, list[Row], Recommendation]


def lines_of(advice: Recommendation) -> Lines:
    """Return the lines of Python that follow a recommendation and its alternative, None for plain DDP."""
    best, other = (
        attach_line(row.candidate.text) if row else None for row in (advice.row, advice.alternative)
    )
    return best, other


def show_plan(rows: list[Row], advice: Recommendation, timing: Timing, *, as_json: bool) -> None:
    """Print the plan for one network."""
    lines = lines_of(advice)
    if as_json:
        print_json({**as_data(rows, advice, lines), "timing": timing.as_data()})
        return
    out.print()
    for columns, text_of in ((TIME, time_of), (TRADE, trade_of)):
        shown = [(row.candidate.name, text_of(row), row is advice.row) for row in rows]
        out.print(text_table(columns, shown), "", soft_wrap=False)
    out.print(advice.text, style="bold")
    line, other = lines
    if line:
        out.print(f"\n    {line}", style="bold")
    if other:
        out.print(f"    {other}  # the alternative")
    out.print()
    out.print(str(timing), style="bold" if timing.busy else "")
    for source in sources(rows):
        err.print(f"loss gaps of {source}", style="dim")
    err.print(LEGEND, style="dim")


def show_sizes(plans: list[Plan], timing: Timing, *, as_json: bool) -> None:
    """Print one line for each world size: plain DDP and the recommendation."""
    if as_json:
        found: list[dict[str, Any]] = [
            {"hosts": network.ranks, **as_data(rows, advice, lines_of(advice)), "timing": timing.as_data()}
            for network, rows, advice in plans
        ]
        print_json(found)
        return
    lines = []
    for network, rows, advice in plans:
        best = advice.row or rows[0]
        figures = [*_size_of(rows[0]), *_size_of(best)]
        figures.insert(4, f"{best.speed_up:.2f} x")
        other = advice.alternative
        also = f"{other.candidate.name} {other.speed_up:.2f} x" if other else "-"
        lines.append((f"{network.ranks} hosts", [*figures, best.candidate.name, also], False))
    out.print()
    out.print(text_table(SIZES, lines), "", soft_wrap=False)
    out.print(str(timing), style="bold" if timing.busy else "")
    err.print(
        "computing: the share of a step that is not communication. The second bytes and computing are those"
        " of the program to use. or: averaged models that are faster still, and change training more.",
        style="dim",
    )


def _size_of(row: Row) -> list[str]:
    return [show_seconds(row.cost.step), show_bytes(row.cost.bytes), f"{row.cost.utilisation:.0%}"]
