"""From raw tracks to the figures that answer the question: pure, derived anew each time."""

import math
import statistics
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from thinwire.bench.results import Cell, Results, Track

WARM_UP = 3
CLOSE_ENOUGH = 0.005
"""A loss counts as reached within half a per cent: runs of different rounding never meet exactly."""


def close_to(loss: float) -> float:
    """The highest loss that counts as this one."""
    return loss + CLOSE_ENOUGH * abs(loss)


@dataclass(frozen=True)
class Row:
    """One contestant's figures in one cell: seconds, bytes per rank and step, ratios.

    Attributes:
        step: Median step time, with its quartiles.
        speed_up: Plain DDP's step time over its own: the median of the rounds' ratios, with quartiles.
        torch_speed_up: The same against torch's own hook of that name.
        floor: max(compute, bytes / bandwidth): what a perfect overlap would take.
        over_floor: Step time over that floor.
        waiting: For the network: exposed time, or where that is not known all beyond computing alone.
        overhead: The rest of the step: encoding that does not hide, copies, threads in each other's way.
        loss: Held out, after equal steps.
        loss_at_time: When the fastest contestant was done.
        seconds_to_loss: Until plain DDP's final loss was reached, within half a per cent; None: never.
    """

    name: str
    kind: str
    unavailable: str | None = None
    step: tuple[float, float, float] | None = None
    speed_up: tuple[float, float, float] | None = None
    torch_speed_up: float | None = None
    compute: float | None = None
    floor: float | None = None
    over_floor: float | None = None
    device_bytes: float | None = None
    meter_bytes: float | None = None
    encode: float | None = None
    wire: float | None = None
    exposed: float | None = None
    waiting: float | None = None
    overhead: float | None = None
    loss: float | None = None
    loss_at_time: float | None = None
    seconds_to_loss: float | None = None
    peak_memory: int | None = None


def rows(cell: Cell) -> list[Row]:
    """The figures of everyone who took part, plain DDP first."""
    plain = next((track for track in cell.tracks if track.kind == "ddp"), None)
    alone = next((track for track in cell.tracks if track.kind == "alone"), None)
    if plain is None or alone is None:
        return []
    compute = statistics.median(_settled(alone.step_seconds))
    racing = [track for track in cell.tracks if track.kind != "alone"]
    rounds = len(plain.step_seconds)
    deadline = min(sum(track.step_seconds[:rounds]) for track in racing if not track.unavailable)
    return [_row(track, cell, plain, compute, deadline) for track in racing]


def _row(track: Track, cell: Cell, plain: Track, compute: float, deadline: float) -> Row:
    if track.unavailable:
        return Row(track.name, track.kind, unavailable=track.unavailable)
    rounds = len(plain.step_seconds)
    step = _quartiles(_settled(track.step_seconds[:rounds]))
    on_wire = _median(track.meter_bytes or track.device_bytes)
    floor = max(compute, 8 * on_wire / cell.rate) if cell.rate and on_wire is not None else compute
    beyond, exposed = max(0.0, step[1] - compute), _median(track.exposed_seconds)
    waiting = beyond if exposed is None else min(beyond, exposed)
    rival = next((one for one in cell.tracks if one.name == track.rival and not one.unavailable), None)
    return Row(
        track.name,
        track.kind,
        step=step,
        speed_up=_quartiles(_ratios(plain, track)),
        torch_speed_up=statistics.median(_ratios(rival, track)) if rival else None,
        compute=min(compute, step[1]),
        floor=floor,
        over_floor=step[1] / floor,
        device_bytes=_median(track.device_bytes),
        meter_bytes=_median(track.meter_bytes),
        encode=_median(track.encode_seconds),
        wire=_median(track.wire_seconds),
        exposed=exposed,
        waiting=waiting,
        overhead=beyond - waiting,
        loss=dict(track.losses)[len(plain.step_seconds)],
        loss_at_time=loss_at(track, deadline),
        seconds_to_loss=seconds_to(track, close_to(plain.losses[-1][1])),
        peak_memory=track.peak_memory,
    )


def curve(track: Track) -> list[tuple[float, float, float]]:
    """(wall seconds, bytes sent, loss) at each evaluation: the contestant's own time, as if it ran alone."""
    sent = track.meter_bytes or track.device_bytes or [math.nan] * len(track.step_seconds)
    return [(sum(track.step_seconds[:step]), sum(sent[:step]), loss) for step, loss in track.losses]


def loss_at(track: Track, seconds: float) -> float:
    """The loss after so many seconds, on the line between evaluations."""
    points = [(time, loss) for time, _, loss in curve(track)]
    for (before, high), (after, low) in pairwise(points):
        if before <= seconds <= after:
            return high + (low - high) * ((seconds - before) / (after - before) if after > before else 1.0)
    return points[-1][1]


def seconds_to(track: Track, loss: float) -> float | None:
    """When the loss first fell to `loss`, on the line between evaluations."""
    points = [(time, loss) for time, _, loss in curve(track)]
    if points[0][1] <= loss:
        return 0.0
    for (before, high), (after, low) in pairwise(points):
        if low <= loss < high:
            return before + (after - before) * (high - loss) / (high - low)
    return None


def advice(cell: Cell) -> str:
    """What to use here, and why, in a sentence."""
    here = f"On {cell.network}"
    if cell.error:
        return f"{here}: no advice, the run failed ({cell.error})."
    table = [row for row in rows(cell) if row.step and row.speed_up]
    if not table:
        return f"{here}: no advice, nothing was measured."
    plain, *others = table
    if plain.loss is None or not math.isfinite(plain.loss):
        return f"{here}: no advice, plain DDP's own loss is not finite; choose a smaller learning rate."
    spent = f"plain DDP spends {_share_beyond(plain):.0%} of a step beyond computing"
    better = [row for row in others if _is_better(row, plain)]
    best = min(better, key=lambda row: row.seconds_to_loss or 0.0, default=None)
    if best is None or best.speed_up is None or best.seconds_to_loss is None or not plain.seconds_to_loss:
        return f"{here}, stay with plain DDP: {spent}, and nothing else came to its loss clearly sooner."
    ratio = best.seconds_to_loss / plain.seconds_to_loss
    text = (
        f"{here}, use {best.name}: {spent}; {best.name} steps {best.speed_up[1]:.2f} x as fast and reaches"
        f" DDP's loss in {ratio:.2f} x the time"
    )
    left = _share_on_wire(best, cell)
    return text + (f". {left:.0%} of its step is bytes on the link: fewer would help." if left > 0.3 else ".")


def _is_better(row: Row, plain: Row) -> bool:
    """Three of four of its steps are faster, and it comes to plain DDP's loss sooner."""
    if row.speed_up is None or row.seconds_to_loss is None or plain.seconds_to_loss is None:
        return False
    return row.speed_up[0] > 1.0 and row.seconds_to_loss < plain.seconds_to_loss


def _share_beyond(row: Row) -> float:
    return ((row.waiting or 0.0) + (row.overhead or 0.0)) / row.step[1] if row.step else 0.0


def _share_on_wire(row: Row, cell: Cell) -> float:
    sent = row.meter_bytes or row.device_bytes
    return 8 * sent / cell.rate / row.step[1] if sent and cell.rate and row.step else 0.0


def summarize(results: Results) -> list[dict[str, Any]]:
    """Rows and advice of every cell, as plain values."""
    return [
        {
            "workload": cell.workload,
            "hosts": cell.hosts,
            "link": cell.link,
            "network": cell.network,
            "error": cell.error,
            "advice": advice(cell),
            "rows": [asdict(row) for row in rows(cell)],
        }
        for cell in results.cells
    ]


def _settled(values: list[float]) -> list[float]:
    return values[WARM_UP:]


def _median(values: list[float]) -> float | None:
    return statistics.median(_settled(values)) if values else None


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high


def _ratios(other: Track, own: Track) -> list[float]:
    """The other's time over its own, round by round; overtime has no rounds."""
    pairs = zip(_settled(other.step_seconds), _settled(own.step_seconds), strict=False)
    return [theirs / ours for theirs, ours in pairs]
