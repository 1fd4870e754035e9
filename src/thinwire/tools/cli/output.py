"""The command line's output: consoles, JSON, pages and tables.

Data is printed to stdout, everything else to stderr. rich respects NO_COLOR.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from thinwire.errors import OptionError, StateError
from thinwire.tools.bench.results import Cell, plain
from thinwire.tools.bench.summary import Row, rows
from thinwire.tools.bench.text import DETAILS, SPEED, speed_of

_WIDE = 160  # the width without a terminal
_PLAIN = {"highlight": False, "markup": False, "emoji": False, "soft_wrap": True}
out = Console(**_PLAIN, width=None if sys.stdout.isatty() else _WIDE)  # type: ignore[arg-type] # all are flags
err = Console(**_PLAIN, stderr=True)  # type: ignore[arg-type]


def print_json(data: Any) -> None:
    """Print one JSON document to stdout."""
    click.echo(json.dumps(plain(data), indent=2, allow_nan=False))


def write_page(path: Path, page: str, *, as_json: bool) -> None:
    """Write an HTML page, and print its path, or as JSON its path and size.

    Raises:
        StateError: The file cannot be written.
    """
    data = page.encode("utf-8", "replace")  # a log may contain half a character
    try:
        path.write_bytes(data)
    except OSError as error:
        raise StateError(
            f"{path} cannot be written ({error.strerror}): choose another place by --out"
        ) from error
    if as_json:
        print_json({"path": str(path), "bytes": len(data)})
    else:
        err.print("open in a browser:", style="dim")
        out.print(str(path.resolve()))


def check_writable(path: Path) -> None:
    """Raise OptionError if `path` cannot be written. Call it before hours of measuring."""
    if not path.parent.is_dir():
        raise OptionError(f"out={str(path)!r} is in a folder that does not exist: create {path.parent} first")
    if path.is_dir():
        raise OptionError(f"out={str(path)!r} is a folder: pass the name of a file in it")
    if path.exists() and not path.is_file():  # a benchmark replaces the file, and must not replace a device
        raise OptionError(f"out={str(path)!r} is a device: pass the name of a file")
    try:
        with path.open("ab") if path.exists() else tempfile.TemporaryFile(dir=path.parent):
            return  # permissions alone are not enough: root has all of them, and /proc holds no files
    except OSError as error:
        raise OptionError(
            f"out={str(path)!r} cannot be written ({error.strerror}): choose another place"
        ) from error


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
