"""Puts a benchmark's advice, plots and tables on one page that needs nothing else."""

import json
from html import escape
from importlib.resources import files
from string import Template

from plotly.offline import get_plotlyjs

from thinwire.bench.results import Cell, Results, plain
from thinwire.bench.summary import advice, rows
from thinwire.bench.words import COST, LEGEND, LOSS, SPEED, cost_of, loss_of, speed_of
from thinwire.report.figures import (
    Figure,
    Palette,
    loss_by_bytes,
    loss_by_time,
    speed_up_by_link,
    step_breakdown,
)


def render(results: Results) -> str:
    """The whole page as text."""
    measured = [cell for cell in results.cells if rows(cell)]
    palette = Palette(measured)
    template = Template((files("thinwire.report") / "page.html").read_text(encoding="utf-8"))
    return template.substitute(
        plotly=get_plotlyjs(),
        advice="".join(f"<p class='advice'>{escape(advice(cell))}</p>" for cell in results.cells),
        overview=_plot("Speed-up by link", speed_up_by_link(measured, palette)) if measured else "",
        cells="".join(_section(cell, palette) for cell in measured),
        legend=escape(LEGEND),
        command=escape(results.command),
        machine="".join(_fact(name, value) for name, value in results.machine.items()),
        settings="".join(
            _fact(name, str(value)) for name, value in results.settings.items() if name not in results.machine
        ),
    )


def _section(cell: Cell, palette: Palette) -> str:
    title = f"{cell.workload}, {cell.parameters / 1e6:.1f} M parameters, {cell.network}"
    plots = (
        _plot("Loss against wall time", loss_by_time(cell, palette)),
        _plot("Loss against bytes", loss_by_bytes(cell, palette)),
        _plot("Where a step goes", step_breakdown(cell)),
    )
    return (
        f"<section><h2>{escape(title)}</h2><div class='plots'>{''.join(plots)}</div>{_table(cell)}</section>"
    )


def _plot(title: str, figure: Figure) -> str:
    """A heading, an empty box, and what to draw in it; `<` cannot end the script it stands in."""
    description = json.dumps(plain(figure), allow_nan=False).replace("<", "\\u003c")
    return (
        f"<figure><h3>{escape(title)}</h3><div class='plot' role='img' aria-label='{escape(title)}'></div>"
        f"<script type='application/json'>{description}</script></figure>"
    )


def _table(cell: Cell) -> str:
    columns = (*SPEED, *LOSS, *COST)
    head = "".join(f"<th scope='col'>{escape(name)}</th>" for name in ("", *columns))
    body = ""
    for row in rows(cell):
        if row.unavailable:
            values = f"<td colspan='{len(columns)}'>not possible: {escape(row.unavailable)}</td>"
        else:
            figures = (*speed_of(row), *loss_of(row), *cost_of(row))
            values = "".join(f"<td>{escape(figure)}</td>" for figure in figures)
        body += f"<tr class='{escape(row.kind)}'><th scope='row'>{escape(row.name)}</th>{values}</tr>"
    return f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _fact(name: str, value: str) -> str:
    return f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>"
