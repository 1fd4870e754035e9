"""A cell's figures as tables that fit 80 columns."""

from rich.table import Table

from thinwire.bench.results import Cell
from thinwire.bench.summary import Row, rows
from thinwire.bench.words import COST, LOSS, SPEED, cost_of, loss_of, speed_of


def tables(cell: Cell) -> list[Table]:
    """How fast, how well, at what cost; one line per contestant in each."""
    shown = rows(cell)
    ran = [row for row in shown if row.step]
    return [
        _table(SPEED, [(row, speed_of(row)) for row in shown]),
        _table(LOSS, [(row, loss_of(row)) for row in ran]),
        _table(COST, [(row, cost_of(row)) for row in ran]),
    ]


def _table(columns: tuple[str, ...], lines: list[tuple[Row, list[str]]]) -> Table:
    made = Table(box=None, pad_edge=False)
    made.add_column("", overflow="fold")
    for name in columns:
        made.add_column(name, justify="right", no_wrap=True)
    for row, figures in lines:
        made.add_row(row.name, *figures, style="bold" if row.kind == "thinwire" else "")
    return made


def title(cell: Cell) -> str:
    """What was trained, and where."""
    return f"{cell.workload}, {cell.parameters / 1e6:.1f} M parameters, {cell.network}"
