"""The texts of a plan's figures, shared by the terminal and the HTML page."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from thinwire.plan.candidates import Candidate
from thinwire.plan.devices import UTILISATION, Device, DeviceSpeeds
from thinwire.plan.network import Network
from thinwire.plan.planner import Planner, Row
from thinwire.plan.recommend import Recommendation
from thinwire.plan.units import show_bytes, show_rate, show_seconds
from thinwire.programs.allreduce import BF16

TIME = ("period", "bytes", "step", "speed-up", "exposed", "encode")
DEVICE = ("step", "compute", "delay", "copies", "exposed", "launches", "memory", "link", "DDP", "bf16")
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

DEVICE_LEGEND = (
    "step = compute + delay + copies + exposed. compute: the step without communication. delay: encoding"
    " during backward, which uses the same device. copies: gradients into DDP's buckets and back. exposed:"
    " time between the end of backward and the last result. launches: kernels of the program, and their time."
    " memory: bytes that they read and write on the device, and their time. link: bytes that a rank sends,"
    " and the time with a collective in flight. DDP, bf16: speed-up over plain DDP, and over DDP with bf16"
    " gradients (BF16, or torch's bf16_compress_hook)."
)


def predicted(device: Device, tokens: float | None) -> str:
    """Return the sentences which say that a plan for a device is not measured, and what it assumes.

    Args:
        device: The device.
        tokens: Tokens for each device and step, or None if the user passed the time of a step.
    """
    compute = "compute from --compute"
    if tokens is not None:
        peak = f"{UTILISATION:.0%} of {device.flops / 1e12:g} TFLOPS"
        compute = f"compute = 6 x parameters x {tokens:g} tokens / ({peak})"
    return (
        "Predicted from data sheets, not measured: run `thinwire doctor --accelerator` on the device.\n"
        f"{device.title}: memory at {device.memory_rate / 1e9:g} GB/s,"
        f" {1e6 * device.launch_seconds:g} us a launch (assumed), {compute}. Source: {device.source}"
    )


def device_terms(planner: Planner, rows: Sequence[Row], network: Network) -> list[dict[str, float]]:
    """Return the terms of each row on a device, from which its step can be computed again."""
    speeds = planner.speeds
    assert isinstance(speeds, DeviceSpeeds)
    narrow = planner.cost(Candidate("BF16", BF16()), network).step
    found = []
    for row in rows:
        cost, period = row.cost, row.candidate.period
        layouts = [] if row.candidate.argument is None else planner.layouts(row.candidate, network.ranks)
        work = speeds.terms(layouts, planner.step)
        launches, moved = work.launches / period, sum(work.moved) / period
        found.append(
            {
                "delay": max(0.0, cost.step - cost.compute - cost.copies - cost.exposed - cost.stragglers),
                "launches": launches,
                "launch_seconds": launches * speeds.device.launch_seconds,
                "memory_bytes": moved,
                "memory_seconds": moved / speeds.device.memory_rate,
                "speed_up_bf16": narrow / cost.step,
            }
        )
    return found


def device_of(row: Row, terms: dict[str, float]) -> list[str]:
    """Return the figures named by DEVICE as text."""
    cost = row.cost
    return [
        show_seconds(cost.step),
        show_seconds(cost.compute),
        show_seconds(terms["delay"]),
        show_seconds(cost.copies),
        show_seconds(cost.exposed),
        f"{terms['launches']:,.0f}, {show_seconds(terms['launch_seconds'])}",
        f"{show_bytes(terms['memory_bytes'])}, {show_seconds(terms['memory_seconds'])}",
        f"{show_bytes(cost.bytes)}, {show_seconds(cost.wire)}",
        f"{row.speed_up:.2f} x",
        f"{terms['speed_up_bf16']:.2f} x",
    ]


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
