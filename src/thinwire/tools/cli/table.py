"""Tables of a cell's figures that fit 80 columns."""

from rich.table import Table

from thinwire.tools.bench.results import Cell
from thinwire.tools.bench.summary import Row, rows
from thinwire.tools.bench.text import DETAILS, SPEED, speed_of


def tables(cell: Cell) -> list[Table]:
    """Return tables of speed, floors, loss and cost, with one line for each contestant."""
    shown = rows(cell)
    ran = [row for row in shown if row.step]
    return [
        _table(SPEED, [(row, speed_of(row)) for row in shown]),
        *(_table(columns, [(row, text_of(row)) for row in ran]) for columns, text_of in DETAILS),
    ]


def _table(columns: tuple[str, ...], lines: list[tuple[Row, list[str]]]) -> Table:
    return text_table(columns, [(row.name, figures, row.kind == "thinwire") for row, figures in lines])


def text_table(columns: tuple[str, ...], lines: list[tuple[str, list[str], bool]]) -> Table:
    """Return a table of texts.

    Args:
        columns: The headings of all columns except the first.
        lines: For each line its name, the texts of the columns, and whether it is bold.
    """
    made = Table(box=None, pad_edge=False)
    made.add_column("", overflow="fold")
    for name in columns:
        made.add_column(name, justify="right", no_wrap=True)
    for name, figures, bold in lines:
        made.add_row(name, *figures, style="bold" if bold else "")
    return made


def title(cell: Cell) -> str:
    """Return a title with the workload and the network."""
    return f"{cell.workload}, {cell.parameters / 1e6:.1f} M parameters, {cell.network}"
