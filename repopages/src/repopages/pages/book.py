"""The input of every section of a page: the library, the output, and links from the page."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import islice, pairwise
from typing import NamedTuple

from repopages.pages import markup
from repopages.pages.addresses import file_keywords, file_page, folder_index, folder_page, relative
from repopages.pages.dialect import Dialect
from repopages.pages.markup import MOST_ROWS, code, link, listed, slug
from repopages.reading import docstrings
from repopages.reading.docstrings import Docstring, Link, inline
from repopages.reading.model import Facts, Item, Section
from repopages.relations.library import Library, Place

SECTIONS = (
    "File metadata",
    "Purpose",
    "Original source",
    "High-level overview",
    "Detailed analysis",
    "Architecture and design",
    "Dependencies",
    "Code patterns and idioms",
    "Performance considerations",
    "Security and safety",
    "Testing and usage",
    "Related files",
    "Cross-references",
)
"""The sections of a file's page, in order. Keywords follow them."""

VALUES = frozenset(["attribute", "constant", "field", "key", "member", "type", "variable", "macro"])
"""Kinds of definitions that are shown as rows of a table. Others have a heading."""

_RESERVED = frozenset(slug(title) for title in (*SECTIONS, "Keywords"))
_NAME = re.compile(r"(?P<name>[A-Za-z_][\w.]*)(?P<call>\([^<>`]*\))?$")
_MOST_SUMMARY = 200
_DESCRIPTIONS = ("description", "project.description", "package.description", "tool.poetry.description")


class Keyword(NamedTuple):
    """A word and the place that explains it.

    Attributes:
        word: The identifier or concept.
        kind: "function", "class", "parameter", "import", "module", "raises", "catches", "constant",
            "environment variable", "option", "heading", "term" and so on.
        path: The file.
        anchor: The section or definition on the file's page.
        section: Title of that section, or dotted name of the definition.
        summary: One line about it.
    """

    word: str
    kind: str
    path: str
    anchor: str
    section: str
    summary: str = ""

    def url(self, top: str = "", suffix: str = ".md") -> str:
        """Return its address from the top of an output, not encoded."""
        return f"{top}{file_page(self.path)}{suffix}#{self.anchor}"


@lru_cache(maxsize=1 << 12)
def parse(doc: str) -> Docstring:
    """Return a docstring in parts. Several sections of a page need the same ones."""
    return docstrings.parse(doc)


@dataclass(frozen=True, eq=False)
class Book:
    """All pages of an output.

    Args:
        library: The files and their relations.
        dialect: The output.
        keywords: Keywords of each file, filled in when they are first needed.
    """

    library: Library
    dialect: Dialect
    keywords: dict[str, list[Keyword]] = field(default_factory=dict, repr=False)
    _summaries: dict[str, str] = field(default_factory=dict, repr=False)
    _anchors: dict[str, dict[str, str]] = field(default_factory=dict, repr=False)
    _sections: dict[str, dict[str, str]] = field(default_factory=dict, repr=False)

    def summary(self, path: str) -> str:
        """Return one line of Markdown about a file: what it says of itself, or else its names. No links."""
        if path not in self._summaries:
            names = main_names(self.library.files[path])
            self._summaries[path] = self.said(path) or (f"Defines {names}" if names else "")
        return self._summaries[path]

    def said(self, path: str) -> str:
        """Return what a file says of itself as one line of Markdown, or an empty text."""
        return inline(cut(described(self.library.files[path])[0]), unlinked)

    def anchors(self, path: str) -> dict[str, str]:
        """Return the anchor on its page of every definition in a file, by its dotted name."""
        if path not in self._anchors:
            self._anchors[path] = item_anchors(self.library.files[path])
        return self._anchors[path]

    def sections(self, path: str) -> dict[str, str]:
        """Return the anchor on its page of every section of a document, by the anchor in the document."""
        if path not in self._sections:
            self._sections[path] = section_anchors(self.library.files[path])
        return self._sections[path]

    @cached_property
    def uses(self) -> dict[str, dict[str, list[str]]]:
        """The files that use a definition of a file which they import, by file and name of the definition."""
        found: dict[str, dict[str, list[str]]] = {}
        for path, facts in self.library.files.items():
            edges = [edge for edge in self.library.imports(path) if edge.target != path]
            stems = {stem_of(edge.target): edge.target for edge in edges}
            pairs = {(edge.target, name) for edge in edges for name in edge.names}
            for name in facts.names if stems else ():
                parts = name.split(".")
                pairs |= {(stems[first], second) for first, second in pairwise(parts) if first in stems}
            for target, name in pairs:
                found.setdefault(target, {}).setdefault(name, []).append(path)
        return found

    @cached_property
    def has_tests(self) -> bool:
        """Whether any file contains tests."""
        return any(facts.tests for facts in self.library.files.values())

    @cached_property
    def benchmarks(self) -> list[tuple[str, Section, list[str]]]:
        """Sections of documents with recorded benchmarks, each with its lines."""
        found = []
        for path, facts in self.library.files.items():
            if facts.role == "document" and facts.sections and "bench" in path.lower():
                lines, sections = facts.text.splitlines(), facts.sections
                ends = [*(section.line - 1 for section in sections[1:]), len(lines)]
                found += [
                    (path, part, lines[part.line - 1 : end])
                    for part, end in zip(sections, ends, strict=True)
                    if any("```" in line for line in lines[part.line - 1 : end])
                ]
        return found


@dataclass(frozen=True, eq=False)
class Page:
    """The page of a file while it is written.

    Args:
        book: All pages.
        path: The file.
        asked: Names that its text refers to. The page is rendered again if one of them moves.
    """

    book: Book
    path: str
    asked: set[str] = field(default_factory=set)

    @property
    def library(self) -> Library:
        """The files and their relations."""
        return self.book.library

    @property
    def facts(self) -> Facts:
        """The facts of the file."""
        return self.library.files[self.path]

    @cached_property
    def doc(self) -> Docstring:
        """The file's docstring or top comment in parts."""
        return parse(self.facts.doc)

    @cached_property
    def here(self) -> str:
        """The page's address."""
        return self.book.dialect.top + file_page(self.path)

    def file(self, path: str, anchor: str = "", text: str = "") -> str:
        """Return a link to the page of a file.

        Args:
            path: The file, which may be this one.
            anchor: A place on its page.
            text: Markdown to show instead of the path.
        """
        there = file_page(path) if path != self.path or not anchor else ""
        return link(text or code(path), self._link(there, anchor))

    def folder(self, path: str, *, index: bool = False) -> str:
        """Return a link to the page of a folder, or to its index with only the last part of its path."""
        shown = path.rpartition("/")[2] if index else path
        text = code(f"{shown}/" if path else self.library.name)
        return link(text, self._link(folder_index(path) if index else folder_page(path)))

    def _link(self, there: str, anchor: str = "") -> str:
        dialect = self.book.dialect
        return relative(self.here, dialect.top + there + dialect.suffix if there else "", anchor)

    @property
    def keywords_link(self) -> str:
        """Link to the page of the file's keywords."""
        return self._link(file_keywords(self.path))

    def line(self, line: int, text: str = "", path: str = "") -> str:
        """Return the number of a line, or other Markdown, with a link if lines have addresses."""
        facts = self.library.files[path or self.path]
        target = self.book.dialect.line(self.here, facts, line) if facts.text.strip() else ""
        return link(text or str(line), target)

    def lines(self, numbers: list[int], most: int = 6) -> str:
        """Return line numbers with links, and how many were left out."""
        unique = sorted(set(numbers))
        more = f" and {len(unique) - most:,} more" if len(unique) > most else ""
        return ", ".join(self.line(number) for number in unique[:most]) + more

    def section(self, path: str, section: Section) -> str:
        """Return a link to a section of a document: to the readable document, or else to its page."""
        text = inline(section.title or path.rpartition("/")[2], unlinked)
        target = self.book.dialect.section(self.here, path, section.anchor)
        return (
            link(text, target) if target else self.file(path, self.book.sections(path)[section.anchor], text)
        )

    def find(self, name: str) -> Place | None:
        """Return what a name in the file refers to, and remember that the page depends on it."""
        self.asked.add(name)
        return self.library.find(name, self.path)

    def _nearest(self, name: str, around: str) -> Place | None:
        """Return what a name refers to inside a definition: first a member of it or of what contains it."""
        anchors = self.book.anchors(self.path)
        while around:
            if f"{around}.{name}" in anchors:
                return self.find(f"{around}.{name}")
            around = around.rpartition(".")[0]
        return self.find(name)

    def place(self, place: Place, text: str) -> str:
        """Return a link to a definition, or to the page of its file."""
        return self.file(place.path, self.book.anchors(place.path).get(place.name, ""), text)

    def linker(self, name: str = "", item: Item | None = None) -> Link:
        """Return a function that links the code spans of a docstring.

        Args:
            name: Dotted name in the file of what the docstring describes.
            item: Its definition, whose own name and parameters are not links.
        """
        own = {item.name, *item.parameters} if item else set[str]()
        for member in item.members if item else ():
            own |= set(member.parameters) if member.kind != "attribute" else {member.name}

        def linked(code: str, shown: str = "") -> str:
            found, text = _NAME.match(code), unlinked(code, shown)
            if not found or found["name"] in own:
                return text
            place = self._nearest(found["name"], name)
            if place is None or (place.path == self.path and place.name in ("", name)):
                return text
            return self.place(place, text)

        return linked


def stem_of(path: str) -> str:
    """Return the name by which other files import a file: its own without suffix, or its folder's."""
    folder, _, name = path.rpartition("/")
    stem = name.partition(".")[0]
    return folder.rpartition("/")[2] if stem in ("__init__", "index", "mod") else stem


def unlinked(code: str, shown: str = "") -> str:
    """Return a code span without a link."""
    return markup.code(shown or code)


def is_row(item: Item) -> bool:
    """Return whether a definition is a row of a table. One with others inside has a heading, for theirs."""
    return item.kind in VALUES and not item.members


def item_anchors(facts: Facts) -> dict[str, str]:
    """Return the anchor of every definition in a file, by its dotted name.

    Tables are cut, so a value that is not shown has the anchor of what contains it.
    """
    made: dict[str, str] = {}

    def enter(items: Sequence[Item], prefix: str, around: str) -> None:
        shown = 0
        for item in items:
            name = f"{prefix}{item.name}"
            anchor = _own_anchor(name, "item")
            if is_row(item):
                shown += 1
                anchor = anchor if shown <= MOST_ROWS else around
            made.setdefault(name, anchor)
            enter(item.members, f"{name}.", anchor)

    if facts.role == "data":
        # One table of the keys at the top, and one of all keys below each of those.
        for item in facts.items[:MOST_ROWS]:
            for name, _ in islice(item.walk(), MOST_ROWS + 1):
                made.setdefault(name, _own_anchor(name, "item"))
        for item in facts.items:
            around = made.get(item.name, slug("High-level overview"))
            made |= {name: around for name, _ in item.walk() if name not in made}
    else:
        enter(facts.items, "", slug("Detailed analysis"))
    return made


def section_anchors(facts: Facts) -> dict[str, str]:
    """Return the anchor on a document's page of each of its sections, by the anchor in the document."""
    rest = slug("High-level overview")
    return {
        section.anchor: _own_anchor(section.anchor, "section") if number < MOST_ROWS else rest
        for number, section in enumerate(facts.sections)
    }


def _own_anchor(name: str, what: str) -> str:
    """Return an anchor that is not one of the page's own sections."""
    plain = re.sub(r"\s+", "-", name)
    return f"{plain}-{what}" if plain.lower() in _RESERVED else plain


def described(facts: Facts) -> tuple[str, str]:
    """Return what a file says of itself in one paragraph, and where: both empty if it says nothing."""
    # Lines of a plain text that are no sentences, such as a list of files, do not describe it.
    if facts.doc and (facts.language != "Text" or re.search(r"[.!?](\s|$)", facts.doc)):
        where = {"source": "docstring", "test": "docstring", "document": "first paragraph"}
        return parse(facts.doc).summary, where.get(facts.role, "comment")
    if facts.role == "data":
        values = {name: item.value or item.signature for name, item in facts.walk() if name in _DESCRIPTIONS}
        for name in _DESCRIPTIONS:
            if values.get(name):
                return values[name].strip("\"'"), name
    return facts.title, "title" if facts.title else ""


def cut(text: str) -> str:
    """Return the first sentences of a long paragraph, for tables."""
    if len(text) <= _MOST_SUMMARY:
        return text
    held = text[:_MOST_SUMMARY]
    return held[: held.rindex(". ") + 1] if ". " in held else held.rpartition(" ")[0] + " …"


def main_items(facts: Facts) -> list[Item]:
    """Return the definitions that a file is most likely about: public ones, constants only without others."""
    named = [item for item in facts.items if not is_row(item)] or list(facts.items)
    return [item for item in named if item.public] or named


def main_names(facts: Facts) -> str:
    """Return the main definitions of a file in one line of Markdown, or an empty text."""
    items = main_items(facts)
    only = (
        f": {inline(cut(parse(items[0].doc).summary), unlinked)}" if len(items) == 1 and items[0].doc else ""
    )
    return listed([code(item.name) for item in items], 4) + only
