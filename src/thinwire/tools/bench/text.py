"""The texts of a row's figures, shared by the terminal and the HTML page."""

from collections.abc import Callable

from thinwire.plan.units import show_bytes
from thinwire.tools.bench.results import Track
from thinwire.tools.bench.summary import Row
from thinwire.tools.bench.torch_baselines import ONE_BUCKET_MB

SPEED = ("step", "speed-up", "vs BF16", "vs torch")
FLOOR = ("buckets", "link floor", "floor", "vs floor", "CPU", "core floor", "vs core floor")
LOSS = ("loss", "vs DDP", "loss at time", "to DDP's loss")
COST = ("meter", "device", "encode", "wire", "exposed", "memory")

COMPACT = ("to DDP's loss", "step", "speed-up", "sent per step", "loss gap", "memory")

SHORT_LEGEND = (
    "to DDP's loss: training time until within 0.5 % of plain DDP's final loss. speed-up: plain DDP's step"
    " over its own. sent per step: by one rank. loss gap: after equal steps, against plain DDP."
)
LEGEND = (
    "step: median time of forward, backward and update; of averaged models the mean over a period. speed-up:"
    " against plain DDP, median of the rounds' ratios (quartiles). vs BF16, vs torch: the same against BF16()"
    " and against torch's counterpart. buckets: size of DDP's buckets. link floor: bytes /"
    " bandwidth. floor: max(compute, time of the first gradient + bytes / bandwidth + optimizer); of averaged"
    " models max(compute, bytes / bandwidth). vs floor: step over floor. CPU: processor time of a rank in a"
    " step. core floor: the larger of floor and CPU x ranks / cores, where ranks share this machine's cores."
    " vs core floor: step over core floor. loss: held-out loss after equal"
    " steps (± over seeds), of averaged models that of the average; vs DDP: against plain DDP's. loss at"
    " time: held-out loss when the fastest contestant has finished these steps. to DDP's loss: own time until"
    " within 0.5 % of plain DDP's final loss, the median over seeds, with overtime. meter, device: bytes per"
    " rank and step, counted by thinwire and by the network device. encode: time spent in the program."
    " wire: time with a collective in flight. exposed: time that backward waits for the network."
    " memory: peak of a rank that trains only this contestant."
)


def compact_of(row: Row) -> list[str]:
    """Return the figures named by COMPACT as text."""
    _, gap, _, reached = loss_of(row)
    sent = row.device_bytes if row.meter_bytes is None else row.meter_bytes
    speed_up = _times(row.speed_up[1] if row.speed_up else None)
    step = _milliseconds(row.step[1] if row.step else None)
    return [reached, step, speed_up, _bytes(sent), gap, _bytes(row.peak_memory)]


def plain_name(contestant: Row | Track) -> str:
    """Return a contestant's name without Python's brackets and quotes, for headings and legends.

    >>> plain_name(Track("DiLoCo(period=16,program=Int4())", "thinwire", ""))
    'DiLoCo, period 16, Int4'
    >>> plain_name(Track("PowerSGD(rank=4, factor_dtype='bf16')", "thinwire", ""))
    'PowerSGD, rank 4, factor dtype bf16'
    """
    if contestant.kind != "thinwire":
        return contestant.name
    name = contestant.name.replace("()", "").replace("program=", "")
    for sign, instead in (("(", ", "), (")", ""), ("=", " "), ("'", ""), ('"', ""), ("_", " ")):
        name = name.replace(sign, instead)
    return ", ".join(part.strip() for part in name.split(",") if part.strip())


def speed_of(row: Row) -> list[str]:
    """Return the figures named by SPEED as text."""
    if row.step is None or row.speed_up is None:
        return ["not possible", *[""] * (len(SPEED) - 1)]
    low, middle, high = row.speed_up
    return [
        _milliseconds(row.step[1]),
        f"{middle:.2f} x ({low:.2f}-{high:.2f})",
        _times(row.bf16_speed_up),
        _times(row.torch_speed_up),
    ]


def floor_of(row: Row) -> list[str]:
    """Return the figures named by FLOOR as text."""
    floors = [_milliseconds(row.link_floor), _milliseconds(row.floor)]
    cores = [_milliseconds(row.cpu), _milliseconds(row.core_floor), _times(row.over_core_floor)]
    return [_buckets(row.bucket_mb), *floors, _times(row.over_floor), *cores]


def loss_of(row: Row) -> list[str]:
    """Return the figures named by LOSS as text."""
    reached = "never" if row.seconds_to_loss is None else f"{row.seconds_to_loss:.1f} s"
    loss = f"{row.loss:.4f}" + ("" if row.loss_spread is None else f" ± {row.loss_spread:.4f}")
    gap = f"{percent(row.loss_gap or 0.0)} %"
    spread = "" if row.gap_spread is None else f" ± {100 * row.gap_spread:.2f}"
    return [loss, gap + spread, f"{row.loss_at_time:.4f}", reached]


def cost_of(row: Row) -> list[str]:
    """Return the figures named by COST as text."""
    sizes = [_bytes(row.meter_bytes), _bytes(row.device_bytes)]
    times = [_milliseconds(row.encode), _milliseconds(row.wire), _milliseconds(row.exposed)]
    return [*sizes, *times, _bytes(row.peak_memory)]


DETAILS: tuple[tuple[tuple[str, ...], Callable[[Row], list[str]]], ...] = (
    (FLOOR, floor_of),
    (LOSS, loss_of),
    (COST, cost_of),
)
"""The tables of contestants that ran, each as column names and a function from a row to their texts."""


def percent(ratio: float) -> str:
    """Format a relative difference in per cent, with its sign and two decimals.

    >>> percent(0.0123), percent(-0.00001)
    ('+1.23', '+0.00')
    """
    return f"{round(100 * ratio, 2) + 0.0:+.2f}"


def _buckets(size: float | None) -> str:
    if size is None:
        return "DDP's"
    return "one" if size >= ONE_BUCKET_MB else f"{size:g} MB"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.{0 if seconds > 0.01 else 2}f} ms"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f} x"


def _bytes(count: float | None) -> str:
    return "-" if count is None else show_bytes(count)
