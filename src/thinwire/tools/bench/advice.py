"""Advice from the figures of a benchmark: which contestant to use, and the line of Python for it."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from thinwire import Averaging
from thinwire.errors import OptionError
from thinwire.tools.bench.contestants import exchanges
from thinwire.tools.bench.load import Load
from thinwire.tools.bench.parsing import attach_line, parse_saved
from thinwire.tools.bench.results import Cell, Results
from thinwire.tools.bench.summary import Quartiles, Row, rows
from thinwire.tools.bench.text import percent

_SAME_LOSS = 3
"""Decimals of loss gaps that are compared. Differences below 0.1 % are chance."""
_STILL_FALLING = 0.02
"""The relative fall of plain DDP's loss over the last quarter of a run that makes it too short to judge."""


@dataclass(frozen=True)
class Advice:
    """A recommendation for one network.

    Attributes:
        text: The recommended contestant and the reasons, as sentences.
        line: The line of Python that attaches it. None for plain DDP and torch's hooks, or without advice.
    """

    text: str
    line: str | None = None


def advise(cell: Cell) -> Advice:
    """Return the advice for a cell.

    The contestant that reaches plain DDP's loss first wins. Contestants whose quartiles overlap are tied. Of
    these the safest wins: the one with the smallest loss gap after equal steps, then thinwire's before
    torch's, then the one that sends most.
    """
    here = f"On {cell.network}"
    if cell.error:
        return Advice(f"{here}: no advice, the run failed ({cell.error}).")
    table = [row for row in rows(cell) if row.step and row.speed_up]
    if not table:
        return Advice(f"{here}: no advice, nothing was measured.")
    plain, *others = table
    if plain.loss is None or not math.isfinite(plain.loss):
        return Advice(
            f"{here}: no advice, plain DDP's own loss is not finite; choose a smaller learning rate."
        )
    spent = f"plain DDP spends {_share_beyond(plain):.0%} of a step beyond computing"
    warning = _too_short(cell) + _too_few_exchanges(others, _steps(cell))
    warning += Load(cores=cell.cores, others=cell.other_cores).doubt()
    # Ties are decided by safety, not by a median within noise.
    tied = _fastest([row for row in others if _is_better(row, plain)])
    if not tied:
        reason = "no contestant reached its loss clearly sooner"
        return Advice(f"{here}, stay with plain DDP: {spent}, and {reason}.{warning}")
    best = min(tied, key=_danger)
    text = f"{here}, use {best.name}: {spent}; {_gains(best, plain, _steps(cell))}."
    text += _ties(best, tied) + _left_on_wire(best) + warning
    return Advice(text, _line(best))


def _line(best: Row) -> str | None:
    """Return the line that attaches a contestant, or None for plain DDP, torch's hooks and invalid texts."""
    try:
        return attach_line(best.text) if best.kind == "thinwire" else None
    except OptionError:
        return None


def _steps(cell: Cell) -> int:
    return next(track.losses[-1][0] for track in cell.tracks if track.kind == "ddp")


def _gains(best: Row, plain: Row, steps: int) -> str:
    assert best.speed_up is not None
    ratio = (best.seconds_to_loss or 0.0) / (plain.seconds_to_loss or 1.0)
    spread = "" if best.gap_spread is None else f" (± {best.gap_spread:.2%} over seeds)"
    return (
        f"{best.name} steps {best.speed_up[1]:.2f} x as fast and reaches DDP's loss in {ratio:.2f} x the"
        f" time; after {steps} equal steps its loss is {percent(best.loss_gap or 0.0)} % from DDP's{spread}"
    )


def _ties(best: Row, tied: list[Row]) -> str:
    others = [row.name for row in tied if row is not best]
    return f" {', '.join(others)}: as fast within quartiles, not safer." if others else ""


def _left_on_wire(best: Row) -> str:
    assert best.step is not None
    left = (best.link_floor or 0.0) / best.step[1]
    return f" {left:.0%} of its step is bytes on the link: fewer would help." if left > 0.3 else ""


def _too_short(cell: Cell) -> str:
    """Return a warning if the run is too short to judge final losses, or an empty text."""
    losses, steps = next(track.losses for track in cell.tracks if track.kind == "ddp"), _steps(cell)
    last = losses[-1][1]
    before = next((loss for step, loss in reversed(losses) if step <= 0.75 * steps), math.nan)
    fall = (before - last) / abs(before) if before else math.nan
    if not fall > _STILL_FALLING:
        return ""
    return (
        f" {steps} steps are too few to judge final losses: DDP's still fell by {fall:.0%} in the last"
        " quarter."
    )


def _too_few_exchanges(others: list[Row], steps: int) -> str:
    """Return a warning that names averaged models with too few exchanges to judge, or an empty text."""
    found = []
    for row in others:
        program = _averaged(row)
        made, needed = (0, 0) if program is None else exchanges(program, steps)
        if made < needed:
            found.append(f"{row.name} ({made} of {needed})")
    if not found:
        return ""
    return f" Too few exchanges of models to judge {', '.join(found)}: raise --steps."


def _averaged(row: Row) -> Averaging | None:
    """Return the configuration of averaged models that a row names, or None."""
    if row.kind != "thinwire":
        return None
    try:
        program = parse_saved(row.text)
    except OptionError:
        return None  # another version's program, or the user's, which is not imported for advice
    return program if isinstance(program, Averaging) else None


def _is_better(row: Row, plain: Row) -> bool:
    """Return whether the lower quartile of its speed-up exceeds 1 and it reaches plain DDP's loss sooner."""
    if row.speed_up is None or row.seconds_to_loss is None or plain.seconds_to_loss is None:
        return False
    return row.speed_up[0] > 1.0 and row.seconds_to_loss < plain.seconds_to_loss


def _fastest(better: list[Row]) -> list[Row]:
    """Return the contestant that reaches the loss first, and all whose quartiles overlap with it."""
    times = [(_to_loss(row), row) for row in better]
    latest = min(times, key=lambda pair: pair[0][1], default=None)
    return [row for time, row in times if latest and time[0] <= latest[0][2]]


def _to_loss(row: Row) -> Quartiles:
    """Return the time to plain DDP's loss by the quartiles of its steps, without a slow start."""
    assert row.step is not None
    assert row.steps_to_loss is not None
    low, middle, high = (row.steps_to_loss * seconds for seconds in row.step)
    return low, middle, high


def _danger(row: Row) -> tuple[float, bool, float]:
    gap = round(max(0.0, row.loss_gap or 0.0), _SAME_LOSS)
    return gap, row.kind == "torch", -(row.meter_bytes or row.device_bytes or 0.0)


def _share_beyond(row: Row) -> float:
    return ((row.waiting or 0.0) + (row.overhead or 0.0)) / row.step[1] if row.step else 0.0


def summarize(results: Results) -> list[dict[str, Any]]:
    """Return the rows and the advice of every cell as plain values, for JSON."""
    found = [(cell, advise(cell)) for cell in results.cells]
    return [
        {
            "workload": cell.workload,
            "hosts": cell.hosts,
            "link": cell.link,
            "network": cell.network,
            "error": cell.error,
            "advice": advice.text,
            "line": advice.line,
            "rows": [asdict(row) for row in rows(cell)],
        }
        for cell, advice in found
    ]
