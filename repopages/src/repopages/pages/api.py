"""The detailed analysis of a file: every definition with its signature, docstring and members."""

import re
import textwrap
from collections.abc import Sequence

from repopages.pages.book import Page, is_row, parse
from repopages.pages.markup import anchor, code, counted, escape, fenced, listed, table
from repopages.reading.docstrings import Docstring, Link, inline, markdown
from repopages.reading.model import Item

EXAMPLES = ("example", "examples", "usage")
"""Titles of the sections of a docstring that contain code."""

_FIELDS = {
    "param": "Parameters",
    "attribute": "Attributes",
    "returns": "Returns",
    "yields": "Yields",
    "raises": "Raises",
    "warns": "Warns",
}
_WIDTH = 96
_MOST_VALUE = 80


def detailed(page: Page) -> str:
    """Return all definitions of a file, nested ones too, in the order of the file."""
    facts = page.facts
    if facts.role == "data":
        return _keys(page)
    values = [item for item in facts.items if is_row(item)]
    blocks = [item for item in facts.items if not is_row(item)]
    parts = [_values(page, values, "", level=3)] if values else []
    parts += [_described(page, item, item.name, level=3) for item in blocks]
    return "\n\n".join(parts)


def _described(page: Page, item: Item, name: str, level: int, around: Item | None = None) -> str:
    """Return one definition and all inside it."""
    link = page.linker(name, item)
    mark = anchor(page.book.anchors(page.path)[name])
    kind = item.kind if item.public else f"{item.kind}, internal"
    span = page.line(item.line) if item.end <= item.line else f"{page.line(item.line)} to {item.end}"
    parts = [
        f"{'#' * min(level, 6)} {mark}{code(name)}",
        f"*{escape(kind)}*, {'line' if item.end <= item.line else 'lines'} {span}"
        + _context(page, item, link),
        # A class is shown with the signature of its constructor.
        "" if around and _constructs(item, around) else _signature(page, item),
        *_text(parse(item.doc), link),
    ]
    values = [member for member in item.members if is_row(member)]
    if values:
        parts.append(_values(page, values, f"{name}.", level + 1))
    inner = [member for member in item.members if not is_row(member)]
    parts += [_described(page, member, f"{name}.{member.name}", level + 1, item) for member in inner]
    return "\n\n".join(part for part in parts if part)


def _constructs(item: Item, around: Item) -> bool:
    written = item.signature.removesuffix(" -> None")
    return item.name in ("__init__", "__new__") and around.signature == written


def _context(page: Page, item: Item, link: Link) -> str:
    """Return bases and decorators as the rest of a sentence."""
    made = ""
    if item.bases:
        made += f". Bases: {listed([link(base) for base in item.bases])}"
    if item.decorators:
        sign = "@" if page.facts.language in ("Python", "TypeScript", "JavaScript") else ""
        made += f". Decorators: {listed([code(sign + decorator) for decorator in item.decorators])}"
    return made


def _signature(page: Page, item: Item) -> str:
    """Return a signature as a block of code, one parameter per line if it is long."""
    words = {"Python": {"function": "def ", "method": "def ", "class": "class ", "exception": "class "}}
    written = " ".join(item.signature.split())
    if not written or (written == "()" and item.kind in ("class", "exception")):
        return ""
    if item.kind == "property":
        written = f"{item.name}: {written.removeprefix('->').strip()}"
    elif written.startswith(("(", "<", "[")) or item.name not in written:
        gap = "" if written.startswith(("(", "<", "[")) else " "
        written = f"{words.get(page.facts.language, {}).get(item.kind, '')}{item.name}{gap}{written}"
    return fenced(
        wrapped(written, "," * (page.facts.language == "Python")), re.sub(r"[^\w+#.-]", "", page.facts.lexer)
    )


def wrapped(signature: str, last: str = ",") -> str:
    """Return a signature with each parameter on a line, if it is too long for one.

    Args:
        signature: The signature on one line.
        last: The sign after the last parameter.
    """
    opened = signature.find("(")
    if len(signature) <= _WIDTH or opened < 0:
        return signature
    parts, depth, start, quote = list[str](), 0, opened + 1, ""
    for place, letter in enumerate(signature[opened:], opened):
        if quote or letter in "\"'":
            quote = "" if letter == quote else quote or letter
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        if not quote and (depth == 0 or (depth == 1 and letter == ",")) and place > opened:
            parts.append(signature[start:place].strip())
            start = place + 1
            if depth == 0:
                break
    body = ",\n".join(f"    {part}" for part in parts if part)
    return (
        f"{signature[: opened + 1]}\n{body}{last}\n){signature[start:]}" if body and depth == 0 else signature
    )


def _text(doc: Docstring, link: Link) -> list[str]:
    """Return a docstring: summary, text, parameters and results, examples, notes."""
    if not doc.summary and not doc.fields and not doc.texts:
        return []
    parts = [inline(doc.summary, link), markdown(doc.body, link)]
    for kind, title in _FIELDS.items():
        held = [field for field in doc.fields if field[0] == kind]
        if held:
            parts.append(f"**{title}**\n\n" + "\n".join(_field(field, link) for field in held))
    parts += [example(doc.texts[title], link) for title in EXAMPLES if title in doc.texts]
    for title, text in doc.texts.items():
        if title not in EXAMPLES:
            parts.append(f"**{escape(title.capitalize())}**\n\n{markdown(text, link)}")
    return parts


def _field(field: Sequence[str], link: Link) -> str:
    """Return a parameter, a result or an error as an item of a list."""
    kind, name, type_, text = field
    head = link(name) if kind in ("raises", "warns") and name else code(name) if name else ""
    head += f" ({link(type_)})" if type_ and name else link(type_) if type_ else ""
    blocks = markdown(text, link)
    made = f"{head}: {blocks}" if head and blocks else head or blocks
    return "- " + textwrap.indent(made, "  ").lstrip()


def example(text: str, link: Link) -> str:
    """Return an example of a docstring: code as a block, text around it as text."""
    return f"**Example**\n\n{markdown(text, link)}"


def _values(page: Page, items: Sequence[Item], prefix: str, level: int) -> str:
    """Return constants, attributes or members of an enumeration as a table."""
    rows, anchors = [], page.book.anchors(page.path)
    kinds = {(item.kind, item.public) for item in items}
    for item in items:
        name = f"{prefix}{item.name}"
        kind = item.kind if item.public else f"{item.kind}, internal"
        rows.append(
            [
                anchor(anchors[name]) + code(_declared(item)),
                kind if len(kinds) > 1 else "",
                page.line(item.line),
                inline(parse(item.doc).summary, page.linker(name, item)),
            ]
        )
    made = without_empty(["name", "kind", "line", "meaning"], rows)
    if prefix:
        return made
    title = " and ".join(sorted({f"{item.kind}s" for item in items})).capitalize()
    return f"{'#' * level} {title}\n\n{made}"


def _declared(item: Item) -> str:
    """Return a constant or an attribute with its type and value, as far as they say more than its name."""
    written, value = " ".join(item.signature.split()), _shortened(item.value)
    if item.name in re.findall(r"\w+", written):
        return _shortened(written)  # the whole declaration, as in C or Rust
    typed = f"{item.name}: {written}" if written and written != item.value else item.name
    return f"{typed} = {value}" if value and value != item.name else typed


def without_empty(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table without the columns that are empty in every row."""
    kept = [column for column in range(len(head)) if any(row[column] for row in rows)]
    return table([head[column] for column in kept], [[row[column] for column in kept] for row in rows])


def value_of(item: Item) -> str:
    """Return the value of a constant or a key, cut if it is long."""
    written = _shortened(item.value or item.signature)
    if re.fullmatch(r"\d+ (keys?|elements?)", written):
        return written  # a count, in place of a value that is not shown
    return code(written) if written else ""


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MOST_VALUE else f"{text[: _MOST_VALUE - 1]}…"


def _keys(page: Page) -> str:
    """Return the keys below each key at the top of a data file."""
    parts = []
    anchors = page.book.anchors(page.path)
    for item in page.facts.items[:40]:
        inner = list(item.walk())[1:]
        if inner:
            rows = [
                [
                    (anchor(anchors[name]) if number < 40 else "") + code(name.removeprefix(f"{item.name}.")),
                    value_of(key),
                    page.line(key.line),
                    inline(parse(key.doc).summary, page.linker(name, key)),
                ]
                for number, (name, key) in enumerate(inner)
            ]
            held = counted(len(inner), "key")
            made = without_empty(["key", "value", "line", "comment"], rows)
            parts.append(f"### {code(item.name)}\n\n{held} below it.\n\n{made}")
    return "\n\n".join(parts)
