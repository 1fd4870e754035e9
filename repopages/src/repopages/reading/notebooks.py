"""Notebooks: their cells as a script, with the outline of the Markdown and the facts of the Python in it."""

import ast
import json
import re
from dataclasses import replace
from typing import Any

from repopages.reading.documents import outline_markdown
from repopages.reading.model import Facts
from repopages.reading.outline import Outline, identifiers
from repopages.reading.python import read as read_python


def read_notebook(facts: Facts) -> Facts:
    """Return the facts of a notebook.

    Args:
        facts: Its path and text.

    Returns:
        The same with the cells as a script for `text`, in which lines are counted: code as it is, Markdown as
        comments, outputs as their size. Sections are the headings of its Markdown; imports and definitions
        those of its Python code.
    """
    try:
        notebook = json.loads(facts.text)
        cells = [cell for cell in notebook["cells"] if isinstance(cell, dict)]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return replace(facts, problem=f"not a notebook of version 4: {type(error).__name__}: {error}"[:200])
    document, shown, code = Outline(), [], []
    for number, cell in enumerate(cells, 1):
        source, kind = _source(cell.get("source")), str(cell.get("cell_type"))
        shown.append(f"# %% {'' if kind == 'code' else f'[{kind}] '}cell {number}")
        code.append("")
        rows = source.splitlines()
        if kind == "code":
            document.part.words |= identifiers(source)
            shown += rows
            code += _python(rows)
        else:
            if kind == "markdown":
                outline_markdown(source, document, len(shown))
            shown += [f"# {row}".rstrip() for row in rows]
            code += [""] * len(rows)
        size = len(json.dumps(cell.get("outputs") or []))
        if cell.get("outputs"):
            shown.append(f"# output of cell {number}: {size:,} bytes, not shown")
            code.append("")
    found = document.facts(replace(facts, text="\n".join(shown) + "\n", lexer="python"))
    return _with_python(found, "\n".join(code) + "\n") if _language(notebook) == "python" else found


def _source(source: Any) -> str:
    """Return the text of a cell, which is a text or a list of lines."""
    return "".join(map(str, source)) if isinstance(source, list) else str(source or "")


def _language(notebook: dict[str, Any]) -> str:
    metadata = notebook.get("metadata")
    for key in ("language_info", "kernelspec"):
        told = metadata.get(key) if isinstance(metadata, dict) else None
        if isinstance(told, dict):
            return "python" if "python" in str(told.get("name", "")).lower() else str(told.get("name", ""))
    return "python"


def _python(rows: list[str]) -> list[str]:
    """Return the rows of a cell as Python: without magics, and blank if it is no Python."""
    if rows and rows[0].startswith("%%"):
        return [""] * len(rows)
    plain = [re.sub(r"^(\s*)[%!?].*", r"\1pass", row) for row in rows]
    try:
        ast.parse("\n".join(plain))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return [""] * len(rows)
    return plain


def _with_python(facts: Facts, text: str) -> Facts:
    """Add what the reader of Python finds in the code cells."""
    found = read_python(replace(facts, language="Python", text=text))
    kept = ("language", "text", "doc", "title", "sections", "links")
    findings = tuple(sorted(facts.findings + found.findings, key=lambda finding: finding.line))
    return replace(found, findings=findings, **{name: getattr(facts, name) for name in kept})
