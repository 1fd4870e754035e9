"""What all pages are made of: the frame that draws them without a network, plots, tables, facts.

Plots are plotly's own plain descriptions, data and layout; the frame's script draws them.
"""

import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from plotly.offline import get_plotlyjs

from thinwire.bench.results import plain

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#b15928")
GREY = "#888888"

Figure = dict[str, Any]


def frame(title: str, body: str) -> str:
    """The whole page as text; the body is HTML already."""
    template = Template((files("thinwire.report") / "page.html").read_text(encoding="utf-8"))
    return template.substitute(title=escape(title), body=body, plotly=get_plotlyjs())


def plot(title: str, figure: Figure) -> str:
    """A heading, an empty box, and what to draw in it; `<` cannot end the script it stands in."""
    description = json.dumps(plain(figure), allow_nan=False).replace("<", "\\u003c")
    return (
        f"<figure><h3>{escape(title)}</h3><div class='plot' role='img' aria-label='{escape(title)}'></div>"
        f"<script type='application/json'>{description}</script></figure>"
    )


def line(name: str, x: Sequence[Any], y: Sequence[Any], colour: str, *, hover: str) -> dict[str, Any]:
    """A line with small dots."""
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": x,
        "y": y,
        "line": {"color": colour, "dash": "solid", "width": 2},
        "marker": {"size": 4},
        "hovertemplate": f"{hover}<extra>{name}</extra>",
    }


def table(columns: Iterable[str], body: str) -> str:
    """A table that scrolls on its own; the first column has the rows' names."""
    head = "".join(f"<th scope='col'>{escape(name)}</th>" for name in ("", *columns))
    return f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def cells(values: Iterable[str]) -> str:
    """The values of a table's row."""
    return "".join(f"<td>{escape(value)}</td>" for value in values)


def fact(name: str, value: str) -> str:
    """A line of a `<dl>`."""
    return f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>"
