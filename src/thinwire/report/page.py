"""Puts a benchmark's advice, plots and tables on one page that needs nothing else."""

from html import escape

from thinwire.bench.results import Cell, Results
from thinwire.bench.summary import advice, rows
from thinwire.bench.words import COST, LEGEND, LOSS, SPEED, cost_of, loss_of, speed_of
from thinwire.report.figures import Palette, loss_by_bytes, loss_by_time, speed_up_by_link, step_breakdown
from thinwire.report.frame import cells, fact, frame, plot, table


def render(results: Results) -> str:
    """The whole page as text."""
    measured = [cell for cell in results.cells if rows(cell)]
    palette = Palette(measured)
    settings = {name: str(one) for name, one in results.settings.items() if name not in results.machine}
    parts = (
        "".join(f"<p class='advice'>{escape(advice(cell))}</p>" for cell in results.cells),
        plot("Speed-up by link", speed_up_by_link(measured, palette)) if measured else "",
        "".join(_section(cell, palette) for cell in measured),
        f'<p class="quiet">{escape(LEGEND)}</p>',
        f"<h2>To repeat it</h2>\n<pre>{escape(results.command)}</pre>",
        f'<div class="facts">\n{_facts("Machine", results.machine)}\n{_facts("Settings", settings)}\n</div>',
    )
    return frame("thinwire: is it worth it?", "\n".join(parts))


def _section(cell: Cell, palette: Palette) -> str:
    title = f"{cell.workload}, {cell.parameters / 1e6:.1f} M parameters, {cell.network}"
    plots = (
        plot("Loss against wall time", loss_by_time(cell, palette)),
        plot("Loss against bytes", loss_by_bytes(cell, palette)),
        plot("Where a step goes", step_breakdown(cell)),
    )
    return (
        f"<section><h2>{escape(title)}</h2><div class='plots'>{''.join(plots)}</div>{_table(cell)}</section>"
    )


def _table(cell: Cell) -> str:
    columns = (*SPEED, *LOSS, *COST)
    body = ""
    for row in rows(cell):
        if row.unavailable:
            values = f"<td colspan='{len(columns)}'>not possible: {escape(row.unavailable)}</td>"
        else:
            values = cells((*speed_of(row), *loss_of(row), *cost_of(row)))
        body += f"<tr class='{escape(row.kind)}'><th scope='row'>{escape(row.name)}</th>{values}</tr>"
    return table(columns, body)


def _facts(title: str, values: dict[str, str]) -> str:
    listed = "".join(fact(name, value) for name, value in values.items())
    return f"<div><h3>{title}</h3><dl>{listed}</dl></div>"
