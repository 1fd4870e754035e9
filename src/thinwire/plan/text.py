"""The texts of a plan's figures, shared by the terminal and the HTML page."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from thinwire.plan.planner import Row
from thinwire.plan.recommend import Recommendation
from thinwire.plan.units import show_bytes, show_rate, show_seconds

TIME = ("period", "bytes", "step", "speed-up", "exposed", "encode")
TRADE = ("memory", "pays below", "loss gap")

Lines = tuple[str | None, str | None]
"""The lines of Python for a recommendation and its alternative, each None if it has no line."""

LEGEND = (
    "period: steps from one exchange to the next. bytes: sent by a rank, per step. step: predicted time with"
    " its interval. speed-up: plain DDP's step over its own. exposed: time between the end of backward and"
    " the last result. encode: time in the program. memory: beyond plain DDP's, at most. pays below: the rate"
    " of the link above which plain DDP is as fast. loss gap: measured after equal steps on the model named,"
    " not on yours, unless --gaps passed a results file of thinwire bench; unknown is not zero, and none"
    " measured is no promise."
)


def time_of(row: Row) -> list[str]:
    """Return the figures named by TIME as text."""
    cost = row.cost
    interval = f"{show_seconds(cost.step)} ({show_seconds(row.low)} to {show_seconds(row.high)})"
    return [
        str(row.candidate.period),
        show_bytes(cost.bytes),
        interval,
        f"{row.speed_up:.2f} x",
        show_seconds(cost.exposed),
        show_seconds(cost.encode) if row.candidate.argument is not None else "-",
    ]


def trade_of(row: Row) -> list[str]:
    """Return the figures named by TRADE as text."""
    return [
        show_bytes(row.memory) if row.memory else "-",
        pays_below(row.crossover),
        "unknown" if row.gap is None else str(row.gap),
    ]


def pays_below(crossover: float | None) -> str:
    """Return a crossover as text.

    >>> pays_below(0.0), pays_below(5.739e9), pays_below(math.inf), pays_below(None)
    ('never', '5.74gbit', 'any rate', '-')
    """
    if crossover is None:
        return "-"
    if crossover == 0:
        return "never"
    return "any rate" if math.isinf(crossover) else show_rate(float(f"{crossover:.3g}"))


def sources(rows: Sequence[Row]) -> list[str]:
    """Return the sources of loss gaps: one line for each command, with the programs that it measured."""
    commands: dict[str, list[str]] = {}
    for row in rows:
        if row.gap is not None and row.gap.command and not row.gap.elsewhere:
            commands.setdefault(row.gap.command, []).append(row.candidate.name)
    return [f"{', '.join(names)}: {command}" for command, names in commands.items()]


def as_data(rows: Sequence[Row], advice: Recommendation, lines: Lines) -> dict[str, Any]:
    """Return a plan as plain values, for JSON."""
    return {
        "recommendation": advice.text,
        "program": advice.row.candidate.name if advice.row else None,
        "line": lines[0],
        "alternative": advice.alternative.candidate.name if advice.alternative else None,
        "alternative_line": lines[1],
        "rows": [
            {
                "name": row.candidate.name,
                "text": row.candidate.text,
                "period": row.candidate.period,
                **asdict(row.cost),
                "low": row.low,
                "high": row.high,
                "speed_up": row.speed_up,
                "memory": row.memory,
                "gap": None if row.gap is None else {**asdict(row.gap), "text": str(row.gap)},
                "crossover": row.crossover,
            }
            for row in rows
        ],
    }
