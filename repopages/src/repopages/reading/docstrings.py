"""Docstrings as Markdown: Google's and NumPy's sections, reStructuredText's literals, plain paragraphs."""

import ast
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

Link = Callable[[str], str]
"""A function that turns the text of a code span into Markdown, with a link if it is a known name."""

_FIELDS = {
    "args": "param",
    "arguments": "param",
    "parameters": "param",
    "attributes": "attribute",
    "returns": "returns",
    "return": "returns",
    "yields": "yields",
    "raises": "raises",
}
_TEXTS = ("example", "examples", "usage", "performance", "safety", "note", "notes", "warning", "see also")
_HEADER = re.compile(r"(?P<title>[A-Z][a-z]+(?: [a-z]+)?):{1,2}$")
_RULE = re.compile(r"(=+|-+|~+)$")
_ENTRY = re.compile(r"(?P<name>\*{0,2}[\w.`\[\], ]+?)\s*(?:\([^)]*\)|: [\w.\[\], |]+)?:(?: (?P<text>.*))?$")
_SPECIAL = re.compile(r"([\\*_<>\[\]{}#|$~^])")
_SPAN = re.compile(r"(?::[\w:]+:)?(?P<ticks>`+)(?P<code>.+?)(?P=ticks)_{0,2}", re.DOTALL)


@dataclass
class Docstring:
    """A docstring in parts.

    Attributes:
        summary: Its first paragraph.
        body: The paragraphs after it, without sections.
        fields: Entries of Args, Attributes, Returns and Raises, as (kind, name, text).
        texts: Other sections by lower-case title, such as "example" and "performance".
    """

    summary: str = ""
    body: str = ""
    fields: list[tuple[str, str, str]] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)


def parse(doc: str) -> Docstring:
    """Split a docstring, as `ast.get_docstring` returns it, into its parts."""
    made, prose = Docstring(), []
    for title, lines in _sections(doc.splitlines()):
        if title in _FIELDS:
            made.fields += list(_entries(_FIELDS[title], lines))
        elif title:
            text = textwrap.dedent("\n".join(lines)).strip("\n")
            made.texts[title] = f"{made.texts[title]}\n\n{text}" if title in made.texts else text
        else:
            prose += lines
    text = "\n".join(prose).strip("\n")
    first, _, rest = text.partition("\n\n")
    made.summary, made.body = " ".join(first.split()), rest.strip("\n")
    return made


def _sections(lines: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield (title, lines) of every section; the title of plain text is empty."""
    title, held = "", list[str]()
    underlined = False
    for number, line in enumerate(lines):
        following = lines[number + 1] if number + 1 < len(lines) else ""
        name = line.rstrip(":").lower()
        known = name in _FIELDS or name in _TEXTS
        if known and (_HEADER.match(line) or _RULE.match(following)):
            yield title, held
            title, held, underlined = name, [], not _HEADER.match(line)
        elif title and underlined and not held and _RULE.match(line):
            continue  # the rule below a heading of NumPy's style
        elif title and not underlined and line and not line.startswith((" ", "\t")):
            # A section of Google's style ends where the indentation does; one of NumPy's at the next heading.
            yield title, held
            title, held = "", [line]
        else:
            held.append(line)
    yield title, held


def _entries(kind: str, lines: list[str]) -> Iterator[tuple[str, str, str]]:
    """Yield (kind, name, text) of a section's entries."""
    body = textwrap.dedent("\n".join(lines)).strip("\n").splitlines()
    if kind in ("returns", "yields"):
        yield kind, "", "\n".join(body)
        return
    name, held = "", list[str]()
    for line in body:
        entry = re.sub(r" : .*$", ":", line)  # NumPy's style has the type there
        found = None if line.startswith((" ", "\t")) else _ENTRY.match(entry) or _ENTRY.match(f"{entry}:")
        if found:
            if name:
                yield kind, name, _joined(held)
            name, held = found["name"].strip("`* "), [found["text"] or ""]
        else:
            held.append(line)
    if name:
        yield kind, name, _joined(held)


def _joined(lines: list[str]) -> str:
    first, *rest = lines
    return "\n".join([first, textwrap.dedent("\n".join(rest))]).strip("\n")


def inline(text: str, link: Link) -> str:
    """Return one paragraph as Markdown. Code spans are linked, everything else is taken literally."""
    made, end = [], 0
    # Between code spans every special character is escaped, so that `*args` or `<T>` in prose is no markup.
    for span in _SPAN.finditer(text):
        made += [_SPECIAL.sub(r"\\\1", text[end : span.start()]), link(" ".join(span["code"].split()))]
        end = span.end()
    rest = _SPECIAL.sub(r"\\\1", text[end:])
    return re.sub(r"(https?://[^\s)]+[^\s).,;])", r"<\1>", "".join([*made, rest]))


def markdown(text: str, link: Link) -> str:
    """Return paragraphs, lists and code blocks as Markdown.

    Args:
        text: Part of a docstring.
        link: Makes the code spans.
    """
    return "\n\n".join(block for block in _blocks(text, link) if block)


def _blocks(text: str, link: Link) -> Iterator[str]:
    for lines in _paragraphs(text):
        first = lines[0]
        if first.startswith((" ", ">>> ")) or any(line.lstrip()[:1] in "├└│|+" for line in lines[1:]):
            yield code("\n".join(lines))
        elif re.match(r"[-*+] |\d+[.)] ", first):
            yield _list(lines, link)
        elif len(lines) == 2 and _RULE.match(lines[1]):
            yield f"**{inline(first, link)}**"
        elif not first.startswith(".. "):
            joined = " ".join(line.strip() for line in lines)
            yield inline(re.sub(r"::$", ":", joined), link)


def _paragraphs(text: str) -> Iterator[list[str]]:
    """Yield runs of lines: a paragraph, a list, or an indented block with its blank lines."""
    held: list[str] = []
    # The last line is a mark that ends a run which is still open. It is cut off below.
    for line in [*textwrap.dedent(text).expandtabs().splitlines(), "end"]:
        indented = line.startswith(" ")
        in_code = bool(held) and held[0].startswith(" ")
        in_list = bool(held) and re.match(r"[-*+] |\d+[.)] ", held[0])
        more_code = in_code and (indented or not line)
        more_list = in_list and line and (indented or re.match(r"[-*+] |\d+[.)] ", line))
        if more_code or more_list:
            held.append(line)
        elif held and (in_code or in_list or not line or (indented and held[-1].endswith("::"))):
            yield _stripped(held)
            held = [line] if line else []
        elif line:
            held.append(line)
    if held[:-1]:
        yield _stripped(held[:-1])


def _stripped(lines: list[str]) -> list[str]:
    while lines and not lines[-1]:
        lines = lines[:-1]
    return lines


def _list(lines: list[str], link: Link) -> str:
    """Return list items, each on one line."""
    items: list[str] = []
    for line in lines:
        marked = re.match(r"(?:[-*+]|\d+[.)]) +(.*)", line)
        if marked:
            items.append(marked[1])
        else:
            items[-1] += f" {line.strip()}"
    return "\n".join(f"- {inline(item, link)}" for item in items)


def code(text: str) -> str:
    """Return a fenced block: Python if it parses, a session if it has prompts, text otherwise."""
    text = textwrap.dedent(text).strip("\n")
    if text.startswith(">>> "):
        language = "pycon"
    else:
        try:
            ast.parse(text)
            language = "python"
        except (SyntaxError, ValueError):
            language = "text"
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"
