"""A row's figures as people read them, the same in the terminal and on the page."""

from thinwire.bench.summary import Row

SPEED = ("step", "speed-up", "vs torch", "vs floor")
LOSS = ("loss", "loss at time", "to DDP's loss")
COST = ("meter", "device", "encode", "wire", "exposed", "memory")

LEGEND = (
    "step: median time of forward, backward and update. speed-up: against plain DDP, median of the"
    " rounds' ratios (quartiles). vs torch: speed-up against torch's own hook of that name. vs floor:"
    " step over max(compute, bytes / bandwidth). meter, device: bytes per rank and step, counted by"
    " thinwire and read off the network device. encode, wire, exposed: time within the program, with a"
    " collective under way, and of backward waiting. loss: held out, after equal steps; at time: when"
    " the first was done with them. to DDP's loss: own time to come within 0.5 % of plain DDP's final"
    " loss, going on for as long as plain DDP took. memory: peak of a rank that trains just this."
)


def speed_of(row: Row) -> list[str]:
    """The figures in the order of SPEED, as text."""
    if row.step is None or row.speed_up is None:
        return ["not possible", *[""] * (len(SPEED) - 1)]
    low, middle, high = row.speed_up
    return [
        _milliseconds(row.step[1]),
        f"{middle:.2f} x ({low:.2f}-{high:.2f})",
        _times(row.torch_speed_up),
        _times(row.over_floor),
    ]


def loss_of(row: Row) -> list[str]:
    """The figures in the order of LOSS, as text."""
    reached = "never" if row.seconds_to_loss is None else f"{row.seconds_to_loss:.1f} s"
    return [f"{row.loss:.4f}", f"{row.loss_at_time:.4f}", reached]


def cost_of(row: Row) -> list[str]:
    """The figures in the order of COST, as text."""
    sizes = [_bytes(row.meter_bytes), _bytes(row.device_bytes)]
    times = [_milliseconds(row.encode), _milliseconds(row.wire), _milliseconds(row.exposed)]
    return [*sizes, *times, _bytes(row.peak_memory)]


def megabytes(count: float) -> str:
    """A number of bytes in MB, to three digits.

    >>> megabytes(25_900_000), megabytes(130), megabytes(0)
    ('25.9 MB', '0.00013 MB', '0 MB')
    """
    return f"{count / 1e6:.3g} MB"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.{0 if seconds > 0.01 else 2}f} ms"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f} x"


def _bytes(count: float | None) -> str:
    return "-" if count is None else megabytes(count)
