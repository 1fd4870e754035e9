"""Comments: their text without marks, the comment above a definition and the one at the top of a file."""

import re
import textwrap
from dataclasses import dataclass, field

_LICENCE = re.compile(
    r"copyright|licen[cs]e|SPDX|all rights reserved|permission is hereby|redistributions? |without warranty"
    r"|provided .?as.is|in the hope that it will be useful|neither the name of|retain the above"
    r"|this notice may not|must not be misrepresented|altered source versions|freely, subject to"
    r"|received a copy of|author\(?s?\)?:|this software|liability|auto-?generated|do not edit",
    re.IGNORECASE,
)
# A tab behind `//` is the indentation of code, in Go.
_MARKS = re.compile(r"\s*(?:(?:\*/|/\*\*<|/\*[*!]?|\*(?!\w)|#+)[ \t]?|//[/!]?<? ?)")
_TOOLS = re.compile(
    r"\s*(?:!|-\*-|vim:|eslint|jshint|global |@ts-|prettier|istanbul|NOLINT|clang-format|shellcheck|go:"
    r"|\+build|@flow|@jest|[@#]__\w+__|use strict|sourceMappingURL|cspell|tslint|noqa|region|endregion)"
)
_BANNER = re.compile(
    r"\W*(?:module )?(?:dependencies|exports|variables|constants|imports|includes|prototypes?)\W*", re.I
)
"""What stands above a part of a file, and says nothing of the file."""

_RULE = re.compile(r"[-=*#~_/+\s]*")
_TAG = re.compile(
    r"[@\\](?P<tag>\w+)\b(?:\[\w+(?:,\w+)?\])?[ \t]*(?:\{(?P<type>(?:[^{}]|\{[^{}]*\})*)\}[ \t]*)?"
)
_INLINE = re.compile(r"\{@(?:link|linkcode|linkplain|code|see)\s+([^}\s|]+)[^}]*\}")
_ERROR = re.compile(r"(?P<name>[\w.:]*(?:[A-Z]|::|[eE]rror)[\w.:]*)(?:[ \t]+(?P<text>.*))?$")
_SAID = {
    "see": "See also",
    "sa": "See also",
    "deprecated": "Deprecated",
    "since": "Since",
    "note": "Note",
    "remark": "Note",
    "remarks": "Note",
    "warning": "Warning",
    "attention": "Attention",
    "todo": "To do",
    "pre": "Precondition",
    "post": "Postcondition",
    "type": "Type",
}
"""Tags whose text is a paragraph, with the words that begin it."""

_PROSE = ("brief", "file", "fileoverview", "description", "details", "overview", "summary", "short")
_TITLES = {
    "Args": ("param", "arg", "argument", "tparam", "template"),
    "Returns": ("return", "returns", "result", "retval"),
    "Raises": ("throw", "throws", "exception", "raises"),
    "Example": ("example",),
}

_SILENT = frozenset(
    re.findall(
        r"\w+",
        "abstract access addtogroup api async author authors callback class const constant constructor date"
        " default defgroup enum export extends fn func function global hideconstructor ignore implements"
        " ingroup inheritDoc inheritdoc interface internal kind lends memberof method mixin module name"
        " nosideeffects override package private prop property protected public readonly static this typedef"
        " namespace version",
    )
)
"""Tags that say what the definition itself shows, or that are for tools."""


@dataclass
class Comments:
    """The comments of one file by their rows, with those that share a row with code kept apart."""

    ending: dict[int, tuple[int, str]] = field(default_factory=dict)
    trailing: dict[int, str] = field(default_factory=dict)

    def add(self, text: str, row: int, end: int, alone: bool) -> None:
        """Add a comment.

        Args:
            text: The comment as written.
            row: Its first row.
            end: Its last row.
            alone: Whether nothing stands before it on its row.
        """
        if alone:
            self.ending[end] = (row, text)
        elif end == row:
            self.trailing[row] = text

    def above(self, row: int) -> str:
        """Return the text of the comment that ends on the row above, without its marks.

        A blank line may follow a comment for documentation, `/** ... */`.
        """
        blank = row - 1 not in self.ending and row - 1 not in self.trailing
        _, before = self.ending.get(row - 2, (0, ""))
        return _clean(self._block(row - 2 if blank and before.startswith("/**") else row - 1))

    def beside(self, row: int) -> str:
        """Return the text of the comment behind code on a row, without its marks."""
        return _clean([self.trailing[row]]) if row in self.trailing else ""

    def top(self, code: int, attached: int | None) -> str:
        """Return the text of the first comment above all code that is neither a licence nor a tool's mark.

        Args:
            code: Row of the first code, which may be a guard or an import.
            attached: Row of the first definition, which owns the comment directly above it.
        """
        starts = sorted((row, end) for end, (row, _) in self.ending.items() if end < code or code < 0)
        rows = {row for row, _ in starts}
        ends = [end for _, end in starts if end + 1 not in rows]
        for end in ends:
            paragraphs = _clean(self._block(end)).split("\n\n")
            kept = [text for text in paragraphs if not _LICENCE.search(text)]
            if any(text.strip() and not _BANNER.fullmatch(text) for text in kept) and end + 1 != attached:
                return "\n\n".join(kept).strip()
        return ""

    def _block(self, end: int) -> list[str]:
        """Return the comments that end on a row and those that adjoin them above, first one first."""
        found: list[str] = []
        while end in self.ending:
            row, text = self.ending[end]
            # A block comment is one whole; line comments above each other are one text.
            if found and text.lstrip().startswith("/*"):
                break
            found.append(text)
            if text.lstrip().startswith("/*"):
                break
            end = row - 1
        return found[::-1]


def _clean(block: list[str]) -> str:
    lines = [line for text in block for line in text.strip().removesuffix("*/").rstrip("*").splitlines()]
    lines = [_MARKS.sub("", line.rstrip(), count=1) for line in lines]
    lines = ["" if _RULE.fullmatch(line) else line for line in lines if not _TOOLS.match(line)]
    text = textwrap.dedent("\n".join(lines)).strip("\n")
    text = _INLINE.sub(r"`\1`", text)
    return _sections(text) if _TAG.search(text) else text


def _sections(text: str) -> str:
    """Return a text of JSDoc or Doxygen with its tags as the sections of a docstring."""
    plain: list[str] = []
    sections: dict[str, list[str]] = {}
    current = plain
    for line in text.splitlines():
        found = _TAG.match(line.strip())
        if found:
            current = _tagged(found, line.strip()[found.end() :], plain, sections)
        elif current is sections.get("Example"):
            current.append(f"    {line}")
        elif current is plain or not line.strip():
            current = plain
            plain.append(line)
        else:
            current.append(f"        {line.strip()}")
    parts = ["\n".join(plain).strip("\n")]
    parts += [f"{title}:\n" + "\n".join(_fenced(title, held)) for title, held in sections.items() if held]
    return "\n\n".join(part for part in parts if part)


def _tagged(found: re.Match[str], rest: str, plain: list[str], sections: dict[str, list[str]]) -> list[str]:
    """Add a tag to its section, and return the lines that its text goes on in."""
    tag, of_type = found["tag"], " ".join((found["type"] or "").split())
    title = next((title for title, words in _TITLES.items() if tag in words), "")
    if title == "Args":
        name, _, meaning = rest.partition(" ")
        name = name.strip("[]").partition("=")[0]
        rest = f"{name}{f' ({of_type})' if of_type else ''}: {meaning.strip(' -')}"
    elif title == "Raises":
        error = None if of_type else _ERROR.match(rest)
        name, meaning = (error["name"], error["text"] or "") if error else (of_type, rest)
        rest = f"{name}: {meaning.strip(' -')}" if name else meaning
    elif title != "Example":
        rest = ", ".join(filter(None, [f"`{of_type}`" if of_type else "", rest]))
    if title:
        held = sections.setdefault(title, [])
        held += [f"    {rest}"] if rest else []
        return held
    if tag in _SILENT or (tag == "file" and re.fullmatch(r"[\w./-]*", rest)):
        return []  # and what follows is not kept
    if tag in ("code", "endcode"):
        plain += ["", "```cpp"] if tag == "code" else ["```", ""]
    elif tag in _SAID:
        plain += ["", f"{_SAID[tag]}: {rest}" if rest else f"{_SAID[tag]}."]
    else:
        plain.append(rest if tag in _PROSE else found.string)
    return plain


def _fenced(title: str, lines: list[str]) -> list[str]:
    """Return an example of JSDoc as a block of code, if it does not mark its code itself."""
    if title != "Example" or any(line.strip().startswith("```") for line in lines):
        return lines
    return ["    ```javascript", *lines, "    ```"]
