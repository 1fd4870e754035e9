"""The components that all pages share: a frame that needs no network access, plots, tables and facts.

A plot is a plain description in plotly's format, with data and layout. A script in the frame draws it.
"""

import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from plotly.offline import get_plotlyjs

from thinwire.tools.bench.results import plain

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#b15928")
GREY = "#888888"
_FITTING, _REM_BASE, _REM_BY_ENTRY = 7, 15.0, 1.5

Figure = dict[str, Any]


def frame(title: str, body: str) -> str:
    """Return a whole page as HTML.

    Args:
        title: The title as plain text.
        body: The content as HTML.
    """
    # plotly.js (4.8 MB) is inlined: the page must be interactive without network access. A smaller library
    # would have to be vendored and kept up to date here.
    template = Template((files("thinwire.tools.report") / "page.html").read_text(encoding="utf-8"))
    return template.substitute(title=escape(title), body=body, plotly=get_plotlyjs())


def plot(title: str, figure: Figure, *, entries: int = 0) -> str:
    """Return the HTML of a plot: a heading, an empty box and the description to draw in it.

    `<` is escaped, so that text in the description cannot end its script element.

    Args:
        title: The heading as plain text.
        figure: The description of data and layout.
        entries: The number of lines or bars with a name, which make the plot higher if there are many.
    """
    height = f" style='height: {_REM_BASE + _REM_BY_ENTRY * entries:g}rem'" if entries > _FITTING else ""
    description = json.dumps(plain(figure), allow_nan=False).replace("<", "\\u003c")
    return (
        f"<figure><h3>{escape(title)}</h3><div class='plot'{height} role='img'"
        f" aria-label='{escape(title)}'></div>"
        f"<script type='application/json'>{description}</script></figure>"
    )


def line(name: str, x: Sequence[Any], y: Sequence[Any], colour: str, *, hover: str) -> dict[str, Any]:
    """Return plotly's description of a line with small dots."""
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
    """Return the HTML of a table that scrolls separately from the page.

    Args:
        columns: The headings of all columns except the first, which holds the rows' names.
        body: The rows as HTML.
    """
    head = "".join(f"<th scope='col'>{escape(name)}</th>" for name in ("", *columns))
    return f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def cells(values: Iterable[str]) -> str:
    """Return the HTML of the values in a table's row."""
    return "".join(f"<td>{escape(value)}</td>" for value in values)


def fold(title: str, body: str) -> str:
    """Return the HTML of a section that the reader unfolds.

    Args:
        title: The heading as plain text.
        body: The content as HTML.
    """
    return f"<details><summary>{escape(title)}</summary>{body}</details>"


def command(text: str) -> str:
    """Return the HTML of a command line, which wraps, and of which one click selects all."""
    return f"<pre class='command'>{escape(text)}</pre>"


def fact(name: str, value: str) -> str:
    """Return the HTML of a name and its value, for a `<dl>`."""
    return f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>"
