"""The figures of a benchmark, derived from its raw tracks."""

import math
import statistics
from dataclasses import dataclass
from itertools import pairwise

from thinwire.tools.bench.results import REAL_LINK, Cell, Track

WARM_UP = 3
CLOSE_ENOUGH = 0.005
"""A loss within this relative distance is reached. Rounding makes equality impossible."""
BASELINE = "BF16"
"""The second baseline after plain DDP."""
_PARTS = 4
_BY_STEP = (
    "cpu_seconds",
    "device_bytes",
    "meter_bytes",
    "encode_seconds",
    "wire_seconds",
    "exposed_seconds",
)

Quartiles = tuple[float, float, float]
"""Lower quartile, median and upper quartile."""
Points = list[tuple[int, float]]
"""Finished steps and the held-out loss after each."""


def close_to(loss: float) -> float:
    """Return the highest loss that is close enough to `loss`."""
    return loss + CLOSE_ENOUGH * abs(loss)


@dataclass(frozen=True, kw_only=True)
class Losses:
    """The losses of a contestant.

    Attributes:
        loss: Held-out loss after equal steps, the mean over seeds.
        loss_spread: Its standard deviation over seeds. None with one seed.
        loss_gap: Its relative distance to plain DDP's loss, the mean over seeds.
        gap_spread: The standard deviation of that distance over seeds. None with one seed.
        loss_at_time: Held-out loss when the fastest contestant had finished its steps.
        steps_to_loss: Steps to plain DDP's final loss, within half a per cent, the median over seeds. None if
            more than half of them never reached it.
        seconds_to_loss: Time to plain DDP's final loss, in the same way.
    """

    loss: float | None = None
    loss_spread: float | None = None
    loss_gap: float | None = None
    gap_spread: float | None = None
    loss_at_time: float | None = None
    steps_to_loss: float | None = None
    seconds_to_loss: float | None = None


@dataclass(frozen=True, kw_only=True)
class Floors:
    """The lower bounds of a contestant's step time.

    Attributes:
        compute: The step time without communication.
        link_floor: The time that the link needs for the bytes, bytes / bandwidth. None if unlimited.
        floor: The shortest step that a synchronous exchange of gradients allows,
            max(compute, first gradient + bytes / bandwidth + optimizer). For averaged models, whose exchanges
            can overlap with whole steps, max(compute, bytes / bandwidth).
        over_floor: Step time over `floor`.
        core_floor: The larger of `floor` and the time that the machine's cores need for all ranks' processor
            time. None if that is not known, or ranks do not share a machine.
        over_core_floor: Step time over `core_floor`. What exceeds 1 is waste, and not a shared core.
    """

    compute: float | None = None
    link_floor: float | None = None
    floor: float | None = None
    over_floor: float | None = None
    core_floor: float | None = None
    over_core_floor: float | None = None


@dataclass(frozen=True)
class Row(Floors, Losses):
    """One contestant's figures in one cell. Times are in seconds, bytes are per rank and step.

    The figures of averaged models are means over whole periods, those of schedules and warm-ups over all
    rounds. Those of other contestants are medians of single steps.

    Attributes, besides those of `Floors` and `Losses`:
        name: The contestant's name in tables.
        kind: "ddp", "thinwire" or "torch".
        text: The program as the user wrote it.
        unavailable: Why it could not run, or None.
        step: Step time.
        cpu: Processor time of a rank in a step.
        speed_up: Plain DDP's step time over its own, as quartiles of the rounds' ratios.
        bf16_speed_up: The median of the same ratio against `BF16()`. None if that did not run.
        torch_speed_up: The median of the same ratio against torch's counterpart. None if there is none.
        bucket_mb: The size of DDP's buckets. None for DDP's default.
        device_bytes: Bytes sent, as counted by the network device.
        meter_bytes: Bytes sent, as counted by thinwire.
        encode: Time spent in the program.
        wire: Time with a collective in flight.
        exposed: Time that backward waited for the network.
        waiting: The exposed time, or all time beyond `compute` if that is not known.
        overhead: The rest of the step: encoding that is not overlapped, copies, contention of threads.
        peak_memory: Peak bytes of a process that trains only this contestant.
    """

    name: str
    kind: str
    text: str = ""
    unavailable: str | None = None
    step: Quartiles | None = None
    cpu: float | None = None
    speed_up: Quartiles | None = None
    bf16_speed_up: float | None = None
    torch_speed_up: float | None = None
    bucket_mb: float | None = None
    device_bytes: float | None = None
    meter_bytes: float | None = None
    encode: float | None = None
    wire: float | None = None
    exposed: float | None = None
    waiting: float | None = None
    overhead: float | None = None
    peak_memory: int | None = None


@dataclass(frozen=True)
class _Limits:
    """The inputs of every contestant's lower bounds in a cell."""

    rate: int | None
    compute: float
    first_gradient: float | None
    optimizer: float | None
    ranks_per_core: float | None

    @classmethod
    def of(cls, cell: Cell, alone: Track) -> "_Limits":
        compute, rounds = statistics.median(_blocks(alone.step_seconds, 1)), len(alone.step_seconds)
        first, optimizer = (
            _typical(alone, name, rounds) for name in ("first_gradient_seconds", "optimizer_seconds")
        )
        # Hosts of the lab share this machine. Those of a real network have their own.
        shared = cell.cores if cell.link != REAL_LINK else 0
        return cls(cell.rate, compute, first, optimizer, cell.hosts / shared if shared else None)

    def floors(self, track: Track, sent: float | None) -> tuple[float | None, float]:
        """Return `link_floor` and `floor` of a contestant that sends some bytes in a step."""
        if not self.rate or sent is None:
            return None, self.compute
        link = 8 * sent / self.rate
        if track.averages_models or self.first_gradient is None or self.optimizer is None:
            return link, max(self.compute, link)
        return link, max(self.compute, self.first_gradient + link + self.optimizer)

    def core_floor(self, floor: float, cpu: float | None) -> float | None:
        """Return `core_floor` of a contestant with this floor and processor time."""
        if self.ranks_per_core is None or cpu is None:
            return None
        return max(floor, cpu * self.ranks_per_core)


def rows(cell: Cell) -> list[Row]:
    """Return the figures of all contestants of a cell, plain DDP first. Empty if the cell failed."""
    plain = next((track for track in cell.tracks if track.kind == "ddp"), None)
    alone = next((track for track in cell.tracks if track.kind == "alone"), None)
    if plain is None or alone is None:
        return []
    limits = _Limits.of(cell, alone)
    racing = [track for track in cell.tracks if track.kind != "alone"]
    # Losses at equal time are compared at the end of the fastest contestant, which all others have reached.
    deadline = min(elapsed(track, _steps(plain)) for track in racing if not track.unavailable)
    return [_row(track, cell, plain, limits, deadline) for track in racing]


def _row(track: Track, cell: Cell, plain: Track, limits: _Limits, deadline: float) -> Row:
    if track.unavailable:
        return Row(track.name, track.kind, track.text, unavailable=track.unavailable)
    rounds = len(plain.step_seconds)
    step = _quartiles(_blocks(track.step_seconds[:rounds], track.cycle))
    typical = {name: _typical(track, name, rounds) for name in _BY_STEP}
    link, floor = limits.floors(track, typical["meter_bytes"] or typical["device_bytes"])
    core_floor = limits.core_floor(floor, typical["cpu_seconds"])
    beyond, exposed = max(0.0, step[1] - limits.compute), typical["exposed_seconds"]
    waiting = beyond if exposed is None else min(beyond, exposed)
    others = {other.name: other for other in cell.tracks if not other.unavailable}
    losses, gaps, reached = _final_losses(track, plain), _gaps(track, plain), _steps_to_plain(track, plain)
    return Row(
        track.name,
        track.kind,
        track.text,
        step=step,
        cpu=typical["cpu_seconds"],
        speed_up=_quartiles(_ratios(plain, track)),
        bf16_speed_up=_speed_up(others.get(BASELINE), track),
        torch_speed_up=_speed_up(others.get(track.rival or ""), track),
        bucket_mb=track.bucket_mb,
        compute=min(limits.compute, step[1]),
        link_floor=link,
        floor=floor,
        over_floor=step[1] / floor,
        core_floor=core_floor,
        over_core_floor=None if core_floor is None else step[1] / core_floor,
        device_bytes=typical["device_bytes"],
        meter_bytes=typical["meter_bytes"],
        encode=typical["encode_seconds"],
        wire=typical["wire_seconds"],
        exposed=exposed,
        waiting=waiting,
        overhead=beyond - waiting,
        loss=statistics.fmean(losses),
        loss_spread=_deviation(losses),
        loss_gap=statistics.fmean(gaps),
        gap_spread=_deviation(gaps),
        loss_at_time=loss_at(track, deadline),
        steps_to_loss=reached,
        seconds_to_loss=None if reached is None else elapsed(track, reached),
        peak_memory=track.peak_memory,
    )


def curve(track: Track) -> list[tuple[float, float, float]]:
    """Return (wall seconds, bytes sent, loss) at each evaluation, in the contestant's own time."""
    sent = track.meter_bytes or track.device_bytes or [math.nan] * len(track.step_seconds)
    return [(elapsed(track, step), _total(sent, step, track.cycle), loss) for step, loss in track.losses]


def elapsed(track: Track, steps: float) -> float:
    """Return a contestant's own time after some steps. Steps that were not timed take its typical time."""
    return _total(track.step_seconds, steps, track.cycle)


def _total(values: list[float], steps: float, cycle: int | None) -> float:
    """Return the sum of the first values. A fraction of a step counts in part."""
    whole = min(int(steps), len(values))
    rest = steps - whole
    each = values[whole] if whole < len(values) else statistics.median(_blocks(values, cycle))
    return sum(values[:whole]) + (rest * each if rest else 0.0)


def loss_at(track: Track, seconds: float) -> float:
    """Return the loss after `seconds`, interpolated linearly between evaluations."""
    points = [(time, loss) for time, _, loss in curve(track)]
    for (before, high), (after, low) in pairwise(points):
        if before <= seconds <= after:
            return high + (low - high) * ((seconds - before) / (after - before) if after > before else 1.0)
    return points[-1][1]


def steps_to(points: Points, loss: float) -> float | None:
    """Return the steps after which `loss` was first reached, interpolated, or None if it never was."""
    if points[0][1] <= loss:
        return 0.0
    for (before, high), (after, low) in pairwise(points):
        if low <= loss < high:
            return before + (after - before) * (high - loss) / (high - low)
    return None


def _steps_to_plain(track: Track, plain: Track) -> float | None:
    """Return the steps to plain DDP's loss, the median over seeds, or None if most never reached it."""
    found = [
        math.inf if (steps := steps_to(own, close_to(base[-1][1]))) is None else steps
        for own, base in zip(_by_seed(track), _by_seed(plain), strict=False)
    ]
    middle = statistics.median(found)
    return middle if math.isfinite(middle) else None


def _by_seed(track: Track) -> list[Points]:
    return [track.losses, *track.seed_losses]


def _steps(plain: Track) -> int:
    """Return the steps after which losses are compared, the last of plain DDP's."""
    return plain.losses[-1][0]


def _typical(track: Track, name: str, rounds: int) -> float | None:
    """Return the median of single steps, or of means over a cycle. Overtime is left out."""
    values = getattr(track, name)[:rounds]
    return statistics.median(_blocks(values, track.cycle)) if values else None


def _blocks(values: list[float], cycle: int | None) -> list[float]:
    """Return values that can be compared: those of single steps, or means over whole cycles.

    Costs that do not repeat are averaged over every fourth step. These four means have all stages of a
    schedule in them, so that their spread is that of the measurement.
    """
    # The first steps allocate memory and rebuild DDP's buckets.
    settled = values[WARM_UP:] or values
    if cycle is None:
        return [statistics.fmean(settled[first::_PARTS]) for first in range(min(_PARTS, len(settled)))]
    if cycle == 1 or len(settled) < cycle:
        return settled
    whole = range(0, len(settled) - cycle + 1, cycle)
    return [statistics.fmean(settled[first : first + cycle]) for first in whole]


def _quartiles(values: list[float]) -> Quartiles:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high


def _ratios(other: Track, own: Track) -> list[float]:
    """Return the other's step time over its own in each round or cycle. Overtime is left out."""
    rounds = min(len(other.step_seconds), len(own.step_seconds))
    theirs = _blocks(other.step_seconds[:rounds], own.cycle)
    ours = _blocks(own.step_seconds[:rounds], own.cycle)
    return [their / our for their, our in zip(theirs, ours, strict=True)]


def _speed_up(other: Track | None, own: Track) -> float | None:
    return statistics.median(_ratios(other, own)) if other else None


def _final_losses(track: Track, plain: Track) -> list[float]:
    """Return the losses after equal steps, one for each seed."""
    return [dict(points)[_steps(plain)] for points in _by_seed(track)]


def _gaps(track: Track, plain: Track) -> list[float]:
    """Return the relative distances to plain DDP's loss after equal steps, one for each seed."""
    pairs = zip(_final_losses(track, plain), _final_losses(plain, plain), strict=False)
    return [(own - base) / abs(base) if base else math.nan for own, base in pairs]


def _deviation(values: list[float]) -> float | None:
    if len(values) == 1:
        return None
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan
