"""The HTML page of a benchmark, with its advice, one table for each network, and plots."""

import math
from html import escape
from typing import Any

from thinwire.tools.bench.advice import advise
from thinwire.tools.bench.results import Cell, Results
from thinwire.tools.bench.summary import Row, rows
from thinwire.tools.bench.text import (
    COMPACT,
    DETAILS,
    LEGEND,
    SHORT_LEGEND,
    SPEED,
    compact_of,
    plain_name,
    speed_of,
)
from thinwire.tools.report.figures import (
    Palette,
    loss_by_bytes,
    loss_by_time,
    speed_up_by_link,
    step_breakdown,
)
from thinwire.tools.report.frame import cells, command, fact, fold, frame, plot, table


def render(results: Results) -> str:
    """Return the whole page as HTML."""
    measured = [cell for cell in results.cells if rows(cell)]
    palette = Palette(measured)
    settings = {name: value for name, value in results.settings.items() if name not in results.machine}
    facts = f"{_facts('Machine', results.machine)}{_facts('Settings', settings)}"
    parts = (
        "".join(_advice(cell) for cell in results.cells),
        "".join(_section(cell, palette) for cell in measured),
        plot("Speed-up by link", speed_up_by_link(measured, palette)) if len(measured) > 1 else "",
        f"<h2>To reproduce</h2>\n{command(results.command)}",
        fold("What the figures mean", f"<p class='quiet'>{escape(LEGEND)}</p>"),
        fold("Machine and settings", f"<div class='facts'>{facts}</div>"),
    )
    return frame("thinwire: is it worth it?", "\n".join(parts))


def _advice(cell: Cell) -> str:
    advice = advise(cell)
    line = f"<code>{escape(advice.line)}</code>" if advice.line else ""
    return f"<div class='advice'><p>{escape(advice.text)}</p>{line}</div>"


def _section(cell: Cell, palette: Palette) -> str:
    title = f"{cell.workload}, {cell.parameters / 1e6:.1f} M parameters, {cell.network}"
    figures = {
        "Loss against wall time": loss_by_time(cell, palette),
        "Loss against bytes": loss_by_bytes(cell, palette),
        "Time per step": step_breakdown(cell),
    }
    plots = [plot(title, figure, entries=len(cell.tracks)) for title, figure in figures.items()]
    return (
        f"<section><h2>{escape(title)}</h2>{_tables(cell)}<div class='plots'>{''.join(plots)}</div></section>"
    )


def _tables(cell: Cell) -> str:
    """Return one table, the contestant that reaches plain DDP's loss first on top, and all other figures."""
    shown = sorted(rows(cell), key=_rank)
    ran = [row for row in shown if not row.unavailable]
    columns = ("program", *SPEED, *(name for names, _ in DETAILS for name in names))
    every = [(row, cells([_program(row), *speed_of(row), *_details(row)])) for row in ran]
    return (
        f"{_table(COMPACT, [(row, _compact(row)) for row in shown])}"
        f"<p class='quiet'>{escape(SHORT_LEGEND)}</p>{fold('All figures', _table(columns, every))}"
    )


def _rank(row: Row) -> tuple[bool, float, float]:
    """Return the order of rows: by time to plain DDP's loss, then by the time of a step."""
    reached = math.inf if row.seconds_to_loss is None else row.seconds_to_loss
    return bool(row.unavailable), reached, row.step[1] if row.step else math.inf


def _program(row: Row) -> str:
    return row.text if row.kind == "thinwire" else "-"


def _details(row: Row) -> list[str]:
    return [value for _, text_of in DETAILS for value in text_of(row)]


def _table(columns: tuple[str, ...], lines: list[tuple[Row, str]]) -> str:
    body = "".join(
        f"<tr class='{escape(row.kind)}'><th scope='row'>{escape(plain_name(row))}</th>{values}</tr>"
        for row, values in lines
    )
    return table(columns, body)


def _compact(row: Row) -> str:
    if row.unavailable:
        return f"<td colspan='{len(COMPACT)}'>not possible: {escape(row.unavailable)}</td>"
    return cells(compact_of(row))


def _facts(title: str, values: dict[str, Any]) -> str:
    listed = "".join(fact(name.replace("_", " "), _plain(value)) for name, value in values.items())
    return f"<div><h3>{title}</h3><dl>{listed}</dl></div>"


def _plain(value: Any) -> str:
    """Return a setting as a reader expects it, not as Python writes it."""
    if value is None:
        return "default"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
