"""Text from files as inert Markdown, and the few forms that pages are made of."""

import re
from collections.abc import Sequence
from html import escape as html

_SPECIAL = re.compile(r"([\\`*{}\[\]<>#~$&!^@]|(?<![^\W_])_|_(?![^\W_]))")
_START = re.compile(r"^(\s*)([-+=]|\d+(?=[.)]))")
MOST_ROWS = 40
"""Number of rows that a table shows."""


def escape(text: str) -> str:
    """Return text as one line that Markdown shows as it is: no markup, HTML, templates or links."""
    plain = " ".join(shown(text).split())
    made = _SPECIAL.sub(r"\\\1", plain).replace("|", "&#124;").replace("://", ":&#47;/")
    marked = _START.match(made)
    if marked and marked[2].isdigit():
        return f"{marked[2]}\\{made[marked.end() :]}"  # "1." would begin a list
    return _START.sub(r"\1\\\2", made)


def shown(text: str) -> str:
    """Return text without characters that no encoding has, which names of files may contain."""
    if text.isascii() and "\0" not in text:
        return text
    return text.encode("utf-8", "replace").decode("utf-8").replace("\0", "\ufffd")


def code(text: str) -> str:
    """Return a code span of any text."""
    text = " ".join(shown(text).split()) or " "
    if "|" in text:  # Markdown cannot have it in a code span of a table
        return f"<code>{escape(text)}</code>"
    ticks = "`" * (1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    pad = " " if text[0] == "`" or text[-1] == "`" or text == " " else ""
    return f"{ticks}{pad}{text}{pad}{ticks}"


def link(text: str, target: str) -> str:
    """Return a link with Markdown as its text, or the text alone if there is no target."""
    return f"[{text}]({target})" if target else text


def fenced(text: str, language: str = "text") -> str:
    """Return a block of code, whose fence is longer than any in the text."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return f"{fence}{language}\n{shown(text)}\n{fence}"


def anchor(name: str) -> str:
    """Return a place that links lead to."""
    return f'<a id="{html(shown(name))}"></a>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]], most: int = MOST_ROWS) -> str:
    """Return a table, followed by the number of rows that were left out.

    Args:
        head: Titles of the columns.
        rows: Markdown of the cells.
        most: Number of rows that are shown.
    """
    lines = [head, ["---"] * len(head), *(map(_cell, row) for row in rows[:most])]
    made = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return made if len(rows) <= most else f"{made}\n\nand {len(rows) - most:,} more."


def _cell(text: str) -> str:
    return re.sub(r"(?<!\\)\|", r"\\|", " ".join(text.split()))


def listed(parts: Sequence[str], most: int = MOST_ROWS) -> str:
    """Return parts of a sentence with commas, and the number of those that were left out."""
    more = [f"and {len(parts) - most:,} more"] if len(parts) > most else []
    return ", ".join([*parts[:most], *more])


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: "1 line", "2 lines"."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def slug(heading: str) -> str:
    """Return the anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
