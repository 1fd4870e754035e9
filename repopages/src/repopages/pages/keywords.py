"""Keywords: every identifier and concept, with the page and section that explains it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from repopages.pages.book import Book
from repopages.pages.names import members_shown
from repopages.pages.sections import anchor_of
from repopages.reading.docstrings import parse
from repopages.reading.project import Entry, Page, Project
from repopages.reading.relations import Text
from repopages.reading.source import Module

_TERM = re.compile(r"\| \*\*(?P<terms>[^*]+)\*\* \| (?P<text>.*) \|$")
_KINDS = ("class", "exception", "function", "concept", "module", "method", "property", "parameter")
"""Kinds of keywords, those that a reader most likely looks for first."""


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
    found = [keyword for module in page.modules for keyword in _of_module(book, page, module)]
    unique = {(keyword.word, keyword.kind, keyword.anchor): keyword for keyword in found}
    return sorted(
        unique.values(),
        key=lambda keyword: (keyword.word.lower(), keyword.word, keyword.kind, keyword.anchor),
    )


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
            for user in _users(book, term):
                yield Keyword(
                    word=term,
                    kind="concept",
                    page=user.document,
                    anchor="overview",
                    section=user.name,
                    summary="",
                )


def _users(book: Book, term: str) -> list[Page]:
    """Return up to eight pages whose docstrings use a term most."""
    pattern = re.compile(rf"\b{re.escape(term)}s?\b", re.IGNORECASE)
    counts = {}
    for page in book.project.pages:
        docs = [
            text for module in page.modules for text in (module.doc, *(item.doc for item in module.items))
        ]
        counts[page.name] = (sum(len(pattern.findall(text)) for text in docs), page)
    ranked = sorted(counts.values(), key=lambda counted: (-counted[0], counted[1].name))
    return [page for count, page in ranked[:8] if count]


def headings(book: Book) -> list[Keyword]:
    """Return the headings of the Markdown pages."""
    return [
        Keyword(
            word=text.title,
            kind="section",
            page=text.document,
            anchor=text.identifier,
            section=text.title,
        )
        for text in book.relations.texts
        if text.identifier and text.anchor
    ]


def all_keywords(book: Book) -> list[Keyword]:
    """Return the keywords of all pages, sorted."""
    found = [keyword for page in book.project.pages for keyword in keywords_of(book, page)]
    found += [*concepts(book), *headings(book)]
    return sorted(found, key=lambda keyword: (keyword.word.lower(), keyword.word, keyword.kind, keyword.page))


def as_list(found: list[Keyword], base: str, *, here: str = "") -> str:
    """Return keywords as an HTML list: the word, its kind, and links.

    Args:
        found: Sorted keywords.
        base: The path from the page to the top of the site, "../" or empty.
        here: The page itself, whose links stay on it and need no title.
    """
    grouped: dict[str, list[Keyword]] = {}
    for keyword in found:
        grouped.setdefault(keyword.word, []).append(keyword)
    lines = ['<dl class="keywords">']
    for word, places in grouped.items():
        links = ", ".join(_place(keyword, base, here) for keyword in places[:12])
        more = f", and {len(places) - 12} more" if len(places) > 12 else ""
        lines.append(f"<div><dt><code>{escape(word)}</code></dt><dd>{links}{more}</dd></div>")
    return "\n".join([*lines, "</dl>"])


def _place(keyword: Keyword, base: str, here: str) -> str:
    href = f"#{keyword.anchor}" if keyword.page == here else f"{base}{keyword.url}"
    page = keyword.page.rpartition("/")[2]
    is_object = keyword.section == keyword.anchor
    shown = (
        keyword.section.removeprefix(f"{page}.")
        if keyword.page == here or is_object
        else f"{page}: {keyword.section}"
    )
    return f'<a href="{escape(href)}">{escape(shown)}</a> <small>{keyword.kind}</small>'


def look_up(word: str, path: str) -> list[Keyword]:
    """Return the places that explain a word, best first.

    Args:
        word: An identifier or a concept, in any case. A part of it is enough if there is no whole match.
        path: A checkout, the folder of a package, or the name of an installed one. It is not imported.

    Returns:
        Whole matches, or else keywords that contain the word. Empty if there are none.

    Example::

        for keyword in look_up("decode", "json"):
            print(keyword.word, keyword.url, keyword.summary)
    """
    found, sought = all_keywords(Book(Project.find(path))), word.lower()
    exact = [
        keyword for keyword in found if keyword.word.lower() == sought or keyword.anchor.lower() == sought
    ]
    hits = exact or [keyword for keyword in found if sought in keyword.word.lower()]
    unique = {(keyword.word, keyword.kind, keyword.url): keyword for keyword in hits}

    def rank(keyword: Keyword) -> tuple[int, int, bool, str]:
        kind = _KINDS.index(keyword.kind) if keyword.kind in _KINDS else len(_KINDS)
        return kind, len(keyword.word), not keyword.summary, keyword.url

    return sorted(unique.values(), key=rank)
