"""The HTML page of a benchmark, with its advice, plots and tables."""

from html import escape

from thinwire.bench.advice import advise
from thinwire.bench.results import Cell, Results
from thinwire.bench.summary import Row, rows
from thinwire.bench.words import DETAILS, LEGEND, SPEED, speed_of
from thinwire.report.figures import Palette, loss_by_bytes, loss_by_time, speed_up_by_link, step_breakdown
from thinwire.report.frame import cells, fact, frame, plot, table


def render(results: Results) -> str:
    """Return the whole page as HTML."""
    measured = [cell for cell in results.cells if rows(cell)]
    palette = Palette(measured)
    settings = {name: str(one) for name, one in results.settings.items() if name not in results.machine}
    parts = (
        "".join(_advice(cell) for cell in results.cells),
        plot("Speed-up by link", speed_up_by_link(measured, palette)) if measured else "",
        "".join(_section(cell, palette) for cell in measured),
        f'<p class="quiet">{escape(LEGEND)}</p>',
        f"<h2>To reproduce</h2>\n<pre>{escape(results.command)}</pre>",
        f'<div class="facts">\n{_facts("Machine", results.machine)}\n{_facts("Settings", settings)}\n</div>',
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
        f"<section><h2>{escape(title)}</h2><div class='plots'>{''.join(plots)}</div>{_tables(cell)}</section>"
    )


def _tables(cell: Cell) -> str:
    """Return several tables, as in the terminal. A single one would be wider than a page."""
    shown = rows(cell)
    ran = [row for row in shown if not row.unavailable]
    tables = (
        _table(SPEED, [(row, _speed(row)) for row in shown]),
        *(_table(columns, [(row, cells(text_of(row))) for row in ran]) for columns, text_of in DETAILS),
    )
    return f"<div class='tables'>{''.join(tables)}</div>"


def _table(columns: tuple[str, ...], lines: list[tuple[Row, str]]) -> str:
    body = "".join(
        f"<tr class='{escape(row.kind)}'><th scope='row'>{escape(row.name)}</th>{values}</tr>"
        for row, values in lines
    )
    return table(columns, body)


def _speed(row: Row) -> str:
    if row.unavailable:
        return f"<td colspan='{len(SPEED)}'>not possible: {escape(row.unavailable)}</td>"
    return cells(speed_of(row))


def _facts(title: str, values: dict[str, str]) -> str:
    listed = "".join(fact(name, value) for name, value in values.items())
    return f"<div><h3>{title}</h3><dl>{listed}</dl></div>"
