"""The API section of a page, as directives of Sphinx's Python domain."""

import textwrap

from repopages.pages.names import Names, members_shown
from repopages.reading.docstrings import Docstring, Link, code, inline, markdown, parse
from repopages.reading.project import Entry
from repopages.reading.source import Item

_OUTER, _INNER = "::::::", "::::"
_EXAMPLES = ("example", "examples", "usage")


def described(entry: Entry, names: Names) -> str:
    """Return one public name with its signature, docstring and members."""
    link = names.linker(entry.module, entry)
    module, _, short = entry.name.rpartition(".")
    options = [f":module: {module}"]
    options += [f":canonical: {entry.canonical}"] if entry.canonical != entry.name else []
    body = [*_body(entry.item, link)]
    if entry.aliases:
        shown = ", ".join(f"`{alias}`" for alias in entry.aliases)
        body.append(f"Also importable as {shown}.")
    body += [_member(member, link) for member in members_shown(entry)]
    kind = entry.item.kind
    return _directive(_OUTER, kind, short + _shown_signature(entry.item), options, body)


def _member(item: Item, link: Link) -> str:
    options = []
    for decorator in item.decorators:
        short = decorator.rpartition(".")[2]
        if short in ("classmethod", "staticmethod", "abstractmethod"):
            options.append(f":{short}:")
    if item.kind in ("property", "attribute") and item.signature:
        options.append(f":type: {item.signature}")
    signature = item.signature if item.kind == "method" else ""
    return _directive(_INNER, item.kind, item.name + signature, options, _body(item, link))


def _shown_signature(item: Item) -> str:
    if item.kind in ("class", "exception"):
        return item.signature.partition(" -> ")[0] if item.signature != "()" else ""
    return item.signature if item.kind == "function" else ""


def _directive(fence: str, kind: str, signature: str, options: list[str], body: list[str]) -> str:
    head = f"{fence}{{py:{kind}}} {' '.join(signature.split())}"
    text = "\n\n".join(part for part in body if part)
    return "\n".join([head, *options, "", text, fence])


def _body(item: Item, link: Link) -> list[str]:
    doc = parse(item.doc)
    if not doc.summary:
        return ["No docstring."]
    return [
        inline(doc.summary, link),
        markdown(doc.body, link),
        _fields(doc, link),
        *(example(doc.texts[title]) for title in _EXAMPLES if title in doc.texts),
        *(f"**{title.capitalize()}.** {markdown(text, link)}" for title, text in _notes(doc)),
    ]


def _notes(doc: Docstring) -> list[tuple[str, str]]:
    return [(title, text) for title, text in doc.texts.items() if title not in _EXAMPLES]


def _fields(doc: Docstring, link: Link) -> str:
    """Return Args, Attributes, Returns and Raises as a field list."""
    names = {"param": "param", "attribute": "ivar", "raises": "raises"}
    lines = []
    for kind, name, text in doc.fields:
        head = f":{names[kind]} {name}:" if kind in names else f":{kind}:"
        blocks = (
            markdown(text, link) if "\n\n" in text or "\n- " in text else inline(" ".join(text.split()), link)
        )
        first, *rest = blocks.splitlines() or [""]
        lines += [f"{head} {first}".rstrip(), *(f"    {line}".rstrip() for line in rest)]
    return "\n".join(lines)


def example(text: str) -> str:
    """Return an example: code as a block, text around it as text."""
    text = textwrap.dedent(text).strip("\n")
    prompted = ">>> " in text
    if prompted and not text.startswith(">>> "):
        before, _, rest = text.partition(">>> ")
        intro = inline(" ".join(before.split()), _plain)
        return f"**Example.** {intro}\n\n{code('>>> ' + textwrap.dedent(rest))}"
    return f"**Example**\n\n{code(text)}"


def _plain(code: str) -> str:
    return f"`{code}`"
