"""A cell's figures as a table for the terminal."""

from rich.table import Table

from thinwire.bench.results import Cell
from thinwire.bench.summary import Row, rows
from thinwire.cli.output import megabytes

COLUMNS = (
    "step",
    "speed-up",
    "vs torch",
    "vs floor",
    "meter",
    "device",
    "encode",
    "wire",
    "exposed",
    "loss",
    "loss at time",
    "to DDP's loss",
    "memory",
)

LEGEND = (
    "step: median time of forward, backward, update. speed-up: against plain DDP, by rounds (quartiles). vs torch:"
    " against torch's own hook of that name. vs floor: step over max(compute, bytes / bandwidth). meter, device:"
    " bytes per rank and step, counted by thinwire and read off the network device. loss: held out, after all"
    " steps; at time: when the fastest was done; to DDP's loss: seconds until within 0.5 % of plain DDP's final"
    " loss. memory: peak of a rank that trains just this."
)


def table(cell: Cell) -> Table:
    """One line per contestant."""
    shown = Table(title=f"{cell.workload} ({cell.parameters / 1e6:.1f} M parameters), {cell.network}", box=None)
    shown.add_column("", no_wrap=True)
    for name in COLUMNS:
        shown.add_column(name, justify="right", no_wrap=True)
    for row in rows(cell):
        shown.add_row(row.name, *cells(row), style="bold" if row.kind == "thinwire" else "")
    return shown


def cells(row: Row) -> list[str]:
    """The figures in the order of COLUMNS, as text."""
    if row.unavailable or row.step is None or row.speed_up is None:
        return ["not possible", *[""] * (len(COLUMNS) - 1)]
    low, middle, high = row.speed_up
    return [
        _milliseconds(row.step[1]),
        f"{middle:.2f} x ({low:.2f}-{high:.2f})",
        _times(row.torch_speed_up),
        _times(row.over_floor),
        _bytes(row.meter_bytes),
        _bytes(row.device_bytes),
        _milliseconds(row.encode),
        _milliseconds(row.wire),
        _milliseconds(row.exposed),
        f"{row.loss:.4f}",
        f"{row.loss_at_time:.4f}",
        "never" if row.seconds_to_loss is None else f"{row.seconds_to_loss:.1f} s",
        _bytes(row.peak_memory),
    ]


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.0f} ms"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f} x"


def _bytes(count: float | None) -> str:
    return "-" if count is None else megabytes(count)
