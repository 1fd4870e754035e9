"""Keywords: every identifier and concept of a file, with the section of its page that explains it."""

import re
from collections.abc import Iterable, Iterator

from repopages.pages.book import Book, Keyword, parse
from repopages.pages.dialect import GitHub
from repopages.pages.markup import slug
from repopages.reading.model import Facts
from repopages.relations.library import Library

_KINDS = (
    "class",
    "exception",
    "enum",
    "struct",
    "interface",
    "trait",
    "function",
    "method",
    "property",
    "macro",
)
"""Kinds of keywords that a reader most likely looks for, first."""

_MOST_SUMMARY = 200
_DEPENDENCIES, _SAFETY, _TESTING = "Dependencies", "Security and safety", "Testing and usage"
_SELF = frozenset(["self", "cls", "_", "__", "this"])
_STOP = frozenset(
    re.findall(
        r"\w+",
        "a an and are as at be but by can do false for from has have if in into is it its no none not note"
        " null of on or so that the their then there these this to todo true was we when which will with yes"
        " you your",
    )
)


def keywords_of(book: Book, path: str) -> list[Keyword]:
    """Return the keywords of a file, sorted and without repetition."""
    if path not in book.keywords:
        found: dict[tuple[str, str, str], Keyword] = {}
        for keyword in _all(book, book.library.files[path]):
            if keyword.word not in _SELF and any(letter.isalnum() for letter in keyword.word):
                short = keyword._replace(summary=keyword.summary[:_MOST_SUMMARY])
                found.setdefault((keyword.word, keyword.kind, keyword.anchor), short)
        book.keywords[path] = sorted(found.values(), key=order)
    return book.keywords[path]


def order(keyword: Keyword) -> tuple[str, str, int, str, str]:
    """Return the key by which keywords are sorted: by word, then the likeliest kind first."""
    rank = _KINDS.index(keyword.kind) if keyword.kind in _KINDS else len(_KINDS)
    return keyword.word.lower(), keyword.word, rank, keyword.path, keyword.anchor


def _all(book: Book, facts: Facts) -> Iterator[Keyword]:
    path = facts.path
    name = book.library.module(path)
    if name:
        yield Keyword(name, "module", path, "purpose", "Purpose", parse(facts.doc).summary)
    yield Keyword(facts.name, "file", path, "purpose", "Purpose", facts.title or parse(facts.doc).summary)
    yield from _definitions(book, facts)
    yield from _imports(facts)
    yield from _constants(facts)
    safety = slug(_SAFETY)
    for error in facts.raised:
        yield Keyword(error.name, "raised", path, safety, _SAFETY, error.message)
    for error in facts.caught:
        yield Keyword(error.name, "caught", path, safety, _SAFETY)
    for mention in facts.mentions:
        kind = {"environment": "environment variable"}.get(mention.kind, mention.kind)
        title = _SAFETY if mention.kind == "environment" else _TESTING
        yield Keyword(mention.word, kind, path, slug(title), title, mention.text)
    yield from _concepts(book, facts)


def _definitions(book: Book, facts: Facts) -> Iterator[Keyword]:
    anchors = book.anchors(facts.path)
    around: dict[str, tuple[str, ...]] = {}
    for dotted, item in facts.walk():
        place = (facts.path, anchors[dotted], dotted)
        doc = parse(item.doc)
        yield Keyword(item.name, item.kind, *place, doc.summary)
        described = {field[1]: field[-1] for field in doc.fields if field[0] in ("param", "attribute")}
        shared = around.get(dotted.rpartition(".")[0], ()) if item.name == "__init__" else ()
        around[dotted] = item.parameters
        for name in dict.fromkeys([*item.parameters, *described]):
            if name in shared:
                continue  # the class has the parameters of its constructor
            text = " ".join(described.get(name, "").split())
            yield Keyword(name.lstrip("*"), "parameter", *place, text)


def _imports(facts: Facts) -> Iterator[Keyword]:
    place = (facts.path, slug(_DEPENDENCIES), _DEPENDENCIES)
    for held in facts.imports:
        module = "." * held.level + held.module
        yield Keyword(module, "imported module", *place)
        if held.name and held.name != "*":
            yield Keyword(held.name, "import", *place, f"from {module}")
        if held.alias:
            yield Keyword(held.alias, "import", *place, f"{held.name or module} as {held.alias}")


def _constants(facts: Facts) -> Iterator[Keyword]:
    """Yield constants and enum members of other files that this one uses, such as `Status.DONE`."""
    for dotted in facts.names:
        owner, _, name = dotted.rpartition(".")
        if owner and len(name) > 2 and name.isupper():
            yield Keyword(name, "used constant", facts.path, slug(_DEPENDENCIES), _DEPENDENCIES, dotted)


def _concepts(book: Book, facts: Facts) -> Iterator[Keyword]:
    """Yield headings, and emphasised, defined and code words that are not everyday words."""
    anchors = book.sections(facts.path)
    for section in facts.sections:
        place = (facts.path, anchors[section.anchor], section.title)
        if section.title:
            yield Keyword(section.title, "heading", *place, section.text)
        for mention in section.terms:
            word = " ".join(mention.word.split())
            if (
                len(word) > 1
                and len(word) <= 60
                and word.lower() not in _STOP
                and not re.fullmatch(r"[\d.,]+", word)
            ):
                kind = "definition" if mention.kind == "defined" else "term"
                yield Keyword(word, kind, *place, mention.text)


def all_keywords(book: Book) -> list[Keyword]:
    """Return the keywords of all files, sorted."""
    return sorted((keyword for path in book.library.files for keyword in keywords_of(book, path)), key=order)


def by_word(found: Iterable[Keyword]) -> dict[str, list[Keyword]]:
    """Return sorted keywords grouped by their word."""
    grouped: dict[str, list[Keyword]] = {}
    for keyword in found:
        grouped.setdefault(keyword.word, []).append(keyword)
    return grouped


def look_up(word: str, library: Library) -> list[Keyword]:
    """Return the places that explain a word, best first.

    Args:
        word: An identifier or a concept, in any case. A part of it is enough if there is no whole match.
        library: The files of a repository.

    Returns:
        Whole matches, or else keywords that contain the word. Empty if there are none.
    """
    book, sought = Book(library, GitHub()), word.strip().lower()
    if not sought:
        return []
    found = all_keywords(book)
    exact = [keyword for keyword in found if sought in (keyword.word.lower(), keyword.section.lower())]
    hits = exact or [keyword for keyword in found if sought in keyword.word.lower()]

    def rank(keyword: Keyword) -> tuple[bool, int, int, bool, str, str]:
        kind = _KINDS.index(keyword.kind) if keyword.kind in _KINDS else len(_KINDS)
        return (
            keyword.word.lower() != sought,
            kind,
            len(keyword.word),
            not keyword.summary,
            keyword.path,
            keyword.anchor,
        )

    return sorted(hits, key=rank)
