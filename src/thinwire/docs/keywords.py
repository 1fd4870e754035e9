"""Keywords: every identifier and concept, with the page and section that explains it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from thinwire.docs.book import Book
from thinwire.docs.docstrings import parse
from thinwire.docs.names import members_shown
from thinwire.docs.project import Entry, Page
from thinwire.docs.relations import Text
from thinwire.docs.sections import anchor_of
from thinwire.docs.source import Module

_TERM = re.compile(r"\| \*\*(?P<terms>[^*]+)\*\* \| (?P<text>.*) \|$")


@dataclass(frozen=True, kw_only=True)
class Keyword:
    """One place that explains a word.

    Attributes:
        word: The identifier or concept.
        kind: "function", "class", "parameter", "import", "module", "concept" and so on.
        page: The page, without a suffix.
        anchor: The section or object on the page.
        section: Title of that section, or name of the object.
        summary: One line about it.
    """

    word: str
    kind: str
    page: str
    anchor: str
    section: str
    summary: str = ""

    @property
    def url(self) -> str:
        """Address within the site."""
        return f"{self.page}.html#{self.anchor}"


def keywords_of(book: Book, page: Page) -> list[Keyword]:
    """Return the keywords of one page, sorted and without repetition."""
    found = [one for module in page.modules for one in _of_module(book, page, module)]
    unique = {(one.word, one.kind, one.anchor): one for one in found}
    return sorted(unique.values(), key=lambda one: (one.word.lower(), one.word, one.kind, one.anchor))


def _of_module(book: Book, page: Page, module: Module) -> Iterator[Keyword]:
    document, summary = page.document, book.doc(module).summary
    own = "purpose" if module is page.main else anchor_of(module)
    yield Keyword(
        word=module.name, kind="module", page=document, anchor=own, section="Purpose", summary=summary
    )
    for entry in book.project.entries_of[module.name]:
        yield from _of_entry(page, entry)
    inside = "overview" if module is page.main else anchor_of(module)
    for item in book.other_items(module):
        text = parse(item.doc).summary
        yield Keyword(
            word=item.name, kind=item.kind, page=document, anchor=inside, section="Overview", summary=text
        )
    for local, dotted in module.imported.items():
        if dotted.partition(".")[0] != book.project.name and not local.startswith("_"):
            yield Keyword(
                word=local,
                kind="import",
                page=document,
                anchor="dependencies",
                section="Dependencies",
                summary=dotted,
            )


def _of_entry(page: Page, entry: Entry) -> Iterator[Keyword]:
    item, doc = entry.item, parse(entry.item.doc)
    place = {"page": page.document, "anchor": entry.name, "section": entry.name}
    yield Keyword(word=item.name, kind=item.kind, summary=doc.summary, **place)
    if entry.name.rpartition(".")[2] != item.name:
        yield Keyword(word=entry.name.rpartition(".")[2], kind=item.kind, summary=doc.summary, **place)
    described = {name: text for kind, name, text in doc.fields if kind in ("param", "attribute")}
    for name in dict.fromkeys([*item.parameters, *described]):
        text = " ".join(described.get(name, "").split())
        yield Keyword(word=name, kind="parameter", summary=text, **place)
    for member in members_shown(entry):
        name = f"{entry.name}.{member.name}"
        at = {"page": page.document, "anchor": name, "section": name}
        yield Keyword(word=member.name, kind=member.kind, summary=parse(member.doc).summary, **at)
        for parameter in member.parameters:
            yield Keyword(word=parameter, kind="parameter", **at)


def concepts(book: Book) -> list[Keyword]:
    """Return the terms of the glossary, and the pages whose docstrings use them."""
    found = []
    for text in book.relations.texts:
        if "glossary" in text.path.lower():
            found += list(_terms(book, text))
    return found


def _terms(book: Book, text: Text) -> Iterator[Keyword]:
    page = text.document
    for line in text.lines:
        row = _TERM.match(line)
        terms, meaning = (row["terms"].split(", "), row["text"]) if row else ([], "")
        for term in terms:
            yield Keyword(
                word=term,
                kind="concept",
                page=page,
                anchor=text.identifier,
                section=text.title,
                summary=meaning,
            )
            for one in _users(book, term):
                yield Keyword(
                    word=term,
                    kind="concept",
                    page=one.document,
                    anchor="overview",
                    section=one.name,
                    summary="",
                )


def _users(book: Book, term: str) -> list[Page]:
    """Return up to eight pages whose docstrings use a term most."""
    pattern = re.compile(rf"\b{re.escape(term)}s?\b", re.IGNORECASE)
    counts = {}
    for page in book.project.pages:
        docs = [text for one in page.modules for text in (one.doc, *(item.doc for item in one.items))]
        counts[page.name] = (sum(len(pattern.findall(text)) for text in docs), page)
    ranked = sorted(counts.values(), key=lambda one: (-one[0], one[1].name))
    return [page for count, page in ranked[:8] if count]


def headings(book: Book) -> list[Keyword]:
    """Return the headings of the Markdown pages."""
    return [
        Keyword(
            word=one.title,
            kind="section",
            page=one.document,
            anchor=one.identifier,
            section=one.title,
        )
        for one in book.relations.texts
        if one.identifier and one.anchor
    ]


def all_keywords(book: Book) -> list[Keyword]:
    """Return the keywords of all pages, sorted."""
    found = [one for page in book.project.pages for one in keywords_of(book, page)]
    found += [*concepts(book), *headings(book)]
    return sorted(found, key=lambda one: (one.word.lower(), one.word, one.kind, one.page))


def as_list(found: list[Keyword], base: str, *, here: str = "") -> str:
    """Return keywords as an HTML list: the word, its kind, and links.

    Args:
        found: Sorted keywords.
        base: The path from the page to the top of the site, "../" or empty.
        here: The page itself, whose links stay on it and need no title.
    """
    grouped: dict[str, list[Keyword]] = {}
    for one in found:
        grouped.setdefault(one.word, []).append(one)
    lines = ['<dl class="keywords">']
    for word, places in grouped.items():
        links = ", ".join(_place(one, base, here) for one in places[:12])
        more = f", and {len(places) - 12} more" if len(places) > 12 else ""
        lines.append(f"<div><dt><code>{escape(word)}</code></dt><dd>{links}{more}</dd></div>")
    return "\n".join([*lines, "</dl>"])


def _place(one: Keyword, base: str, here: str) -> str:
    href = f"#{one.anchor}" if one.page == here else f"{base}{one.url}"
    page = one.page.rpartition("/")[2]
    is_object = one.section == one.anchor
    shown = (
        one.section.removeprefix(f"{page}.") if one.page == here or is_object else f"{page}: {one.section}"
    )
    return f'<a href="{escape(href)}">{escape(shown)}</a> <small>{one.kind}</small>'
