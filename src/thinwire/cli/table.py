"""A cell's figures as a table for the terminal."""

from rich.table import Table

from thinwire.bench.results import Cell
from thinwire.bench.summary import rows
from thinwire.bench.words import COLUMNS, figures_of


def table(cell: Cell) -> Table:
    """One line per contestant."""
    shown = Table(
        title=f"{cell.workload} ({cell.parameters / 1e6:.1f} M parameters), {cell.network}", box=None
    )
    shown.add_column("", no_wrap=True)
    for name in COLUMNS:
        shown.add_column(name, justify="right")
    for row in rows(cell):
        shown.add_row(row.name, *figures_of(row), style="bold" if row.kind == "thinwire" else "")
    return shown
