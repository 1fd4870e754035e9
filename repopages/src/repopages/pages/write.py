"""The output folder: pages are written if their input changed, and removed with their files."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from repopages import __version__
from repopages.errors import OptionError
from repopages.pages.addresses import KEYWORDS, file_keywords, file_page, folder_index, folder_page
from repopages.pages.book import Book, Page
from repopages.pages.dialect import Dialect
from repopages.pages.folders import FolderPage, index_of, page_of
from repopages.pages.indexes import (
    keyword_page,
    keywords_from,
    keywords_json,
    letter_page,
    letter_pages,
    letters_page,
    llms_text,
)
from repopages.pages.keywords import all_keywords
from repopages.pages.layout import file_text
from repopages.pages.markup import shown
from repopages.relations.library import Library

MANIFEST = ".repopages.json"
"""The file that marks a folder as an output of repopages, with the input of each of its pages."""

Progress = Callable[[str, int, int], None]
"""Called with a phase, the number of finished parts and the number of all parts."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """A finished output.

    Attributes:
        folder: Its folder.
        files: Number of documented files.
        folders: Number of documented folders.
        keywords: Number of keywords, each with its places counted once.
        written: Addresses, with suffix, of the pages that were rendered now.
        removed: Addresses, with suffix, of the pages of files and folders that are gone.
    """

    folder: Path
    files: int
    folders: int
    keywords: int
    written: tuple[str, ...]
    removed: tuple[str, ...]


def claim(folder: Path) -> None:
    """Create an output folder.

    Raises:
        OptionError: If it is a file, or a folder with files that repopages did not write.
    """
    if folder.exists() and not folder.is_dir():
        raise OptionError(f"out={str(folder)!r} is a file: pass a folder")
    if folder.is_dir() and not (folder / MANIFEST).exists() and any(folder.iterdir()):
        raise OptionError(f"out={str(folder)!r} is a folder with other files: choose an empty or a new one")
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / MANIFEST).exists():
        # A build that is stopped leaves a folder that the next one may continue.
        (folder / MANIFEST).write_text("{}", encoding="utf-8")


def write_pages(
    library: Library, dialect: Dialect, folder: Path, progress: Progress | None = None
) -> Written:
    """Write the pages of all files and folders, the keyword index, `keywords.json` and `llms.txt`.

    Args:
        library: The files and their relations.
        dialect: The output.
        folder: The folder for it, new, empty or an earlier output. Only pages whose input changed are
            rendered, and pages of files that are gone are removed.
        progress: Called while pages are rendered.

    Raises:
        OptionError: If the folder holds files that repopages did not write.
    """
    claim(folder)
    output = _Output(folder, _version(dialect))
    book = Book(library, dialect)
    _write_files(book, output, progress)
    _write_folders(book, output)
    keywords = _write_keywords(book, output)
    output.put(
        "llms.txt", _digest([(path, book.summary(path)) for path in library.files]), lambda: llms_text(book)
    )
    removed = output.finish()
    return Written(
        folder=folder,
        files=len(library.files),
        folders=len(library.folders),
        keywords=keywords,
        written=tuple(output.written),
        removed=removed,
    )


@dataclass(eq=False)
class _Output:
    """A folder and its manifest.

    Args:
        folder: The folder.
        version: Mark of the renderer and of the output's kind.
        written: Addresses of the pages that were written.
        stale: Whether another renderer or no renderer wrote the pages in the folder.
        known: The keyword index when it was last written: marks of its files, its pages and counts.
        index: The same for now.
    """

    folder: Path
    version: str
    written: list[str] = field(default_factory=list)
    stale: bool = True
    known: dict[str, Any] = field(default_factory=dict)
    index: dict[str, Any] = field(default_factory=dict)
    _old: dict[str, list[object]] = field(default_factory=dict)
    _new: dict[str, list[object]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            held = json.loads((self.folder / MANIFEST).read_text(encoding="utf-8"))
            self._old, self.known = held.get("pages", {}), held.get("index", {})
            self.stale = held.get("version") != self.version
        except (OSError, ValueError, AttributeError):
            return  # all pages are rendered

    def asked(self, address: str) -> list[str]:
        """Return the names that a page referred to when it was last written."""
        known = self._old.get(address, ["", []])[1]
        return list(known) if isinstance(known, list) else []

    def is_fresh(self, address: str, digest: str) -> bool:
        """Return whether a page need not be written, and then keep it."""
        known = self._old.get(address)
        if self.stale or known is None or known[0] != digest or not (self.folder / address).exists():
            return False
        self._new[address] = known
        return True

    def keep(self, addresses: Iterable[str]) -> bool:
        """Keep pages as they are, if all of them exist."""
        held = list(addresses)
        if self.stale or not all(name in self._old and (self.folder / name).exists() for name in held):
            return False
        self._new |= {name: self._old[name] for name in held}
        return True

    def put(self, address: str, digest: str, render: Callable[[], str], asked: Iterable[str] = ()) -> None:
        """Write a page if its input changed."""
        if not self.is_fresh(address, digest):
            self.write(address, digest, render(), asked)

    def write(self, address: str, digest: str, text: str, asked: Iterable[str] = ()) -> None:
        """Write a page. One with the same text keeps its time, by which Sphinx knows it."""
        self._new[address] = [digest, sorted(asked)]
        path, raw = self.folder / address, text.encode("utf-8", "replace")
        if path.is_file() and path.stat().st_size == len(raw) and path.read_bytes() == raw:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)
        self.written.append(address)

    def finish(self) -> tuple[str, ...]:
        """Remove pages that were not written or kept, and write the manifest."""
        gone = sorted(self._old.keys() - self._new.keys())
        for address in gone:
            path = self.folder / address
            if ".." in path.parts:  # a manifest that repopages did not write
                continue
            path.unlink(missing_ok=True)
            for above in path.relative_to(self.folder).parents:
                if str(above) != "." and not any((self.folder / above).iterdir()):
                    (self.folder / above).rmdir()
        held = {"version": self.version, "pages": self._new, "index": self.index}
        made = self.folder / f"{MANIFEST}.new"
        made.write_text(json.dumps(held), encoding="utf-8")
        os.replace(made, self.folder / MANIFEST)
        return tuple(gone)


def _write_files(book: Book, output: _Output, progress: Progress | None) -> None:
    """Write the page and the keywords of every file."""
    library, dialect = book.library, book.dialect
    for number, path in enumerate(library.files):
        if progress:
            progress("pages", number, len(library.files))
        address = dialect.top + file_page(path) + ".md"
        inputs = file_inputs(book, path)
        if not output.is_fresh(address, _digest(inputs, found_names(book, path, output.asked(address)))):
            page = Page(book, path)
            text = file_text(page)
            digest = _digest(inputs, found_names(book, path, sorted(page.asked)))
            output.write(address, digest, text, page.asked)
        if dialect.keyword_pages:
            address = dialect.top + file_keywords(path) + ".md"
            digest = _digest(library.files[path].digest, library.module(path))
            output.put(address, digest, partial(keyword_page, Page(book, path)))
    if progress:
        progress("pages", len(library.files), len(library.files))


def file_inputs(book: Book, path: str) -> list[object]:
    """Return all that a file's page is made of, except what the names in its text refer to."""
    library, facts = book.library, book.library.files[path]
    edges = [*library.imports(path), *library.importers(path)]
    uses = [*library.tests(path), *library.examples(path)]
    related = library.related(path)
    links = [*library.links(path), *library.linked(path)]
    named = {edge.target for edge in (*edges, *links)} & library.files.keys()
    named |= {use.path for use in uses} | {other for other, _ in related}
    names = {item.name for _, _, item in library.public(path)}
    return [
        *(path, facts.digest, facts.size, facts.hidden, facts.problem, library.module(path)),
        *(library.chain(path), library.outside(path), edges, uses, related, links),
        [(other, book.summary(other)) for other in sorted(named)],
        [(name, dotted) for name, dotted, _ in library.public(path)],
        [(other, part.title, book.sections(other)[part.anchor]) for other, part in library.documents(path)],
        [library.files[other].digest for other, part, _ in book.benchmarks if part.words & names],
        *(book.has_tests, len(library.folders[facts.folder].files), sorted(book.uses.get(path, {}).items())),
    ]


def found_names(book: Book, path: str, names: Iterable[str]) -> list[object]:
    """Return where the names in the text of a page lead to."""
    places = ((name, book.library.find(name, path)) for name in names)
    return [
        (name, place.path, book.anchors(place.path).get(place.name, ""))
        for name, place in places
        if place is not None
    ]


def _write_folders(book: Book, output: _Output) -> None:
    library, top = book.library, book.dialect.top
    below = {
        path: _digest(
            *(facts.digest, facts.size, book.summary(path), library.imports(path)),
            *(library.importers(path), library.tests(path)),
        )
        for path, facts in library.files.items()
    }
    for path, held in library.folders.items():
        folder = FolderPage(book, path)
        digest = _digest([below[file] for file in folder.files], held)
        output.put(f"{top}{folder_index(path)}.md", digest, partial(index_of, folder))
        output.put(f"{top}{folder_page(path)}.md", digest, partial(page_of, folder))


def _write_keywords(book: Book, output: _Output) -> int:
    """Write the index of all keywords, and return their number."""
    library = book.library
    marks = {
        shown(path): _digest(facts.digest, library.module(path)) for path, facts in library.files.items()
    }
    if output.known.get("marks") == marks and output.keep(output.known["pages"]):
        output.index = output.known
        return int(output.known["count"])
    _load_keywords(book, output, marks)
    found = all_keywords(book)
    pages, addresses = [], [f"{KEYWORDS}.md", f"{KEYWORDS}.json"]
    for address, title, words in letter_pages(book, found):
        pages.append((address, title, len(words)))
        addresses.append(f"{address}.md")
        held = [(word.word, word.kind, word.path, word.anchor) for _, places in words for word in places]
        output.put(f"{address}.md", _digest(held), partial(letter_page, book, address, title, words))
    output.put(f"{KEYWORDS}.md", _digest(pages, len(library.files)), lambda: letters_page(book, pages))
    text = keywords_json(book, found)
    output.put(f"{KEYWORDS}.json", _digest(text), lambda: text)
    output.index = {"marks": marks, "pages": addresses, "count": len(found), "digest": _digest(text)}
    return len(found)


def _load_keywords(book: Book, output: _Output, marks: dict[str, str]) -> None:
    """Take the keywords of files that did not change from the JSON of the last build."""
    old = output.known.get("marks", {})
    same = [
        path
        for path in book.library.files
        if path not in book.keywords and old.get(path) == marks[shown(path)]
    ]
    if output.stale or not same:
        return
    try:
        text = (output.folder / f"{KEYWORDS}.json").read_text(encoding="utf-8")
        loaded = keywords_from(text) if _digest(text) == output.known["digest"] else {}
    except (OSError, ValueError, KeyError):
        return  # they are computed
    book.keywords.update({path: loaded[path] for path in same if path in loaded})


def _digest(*inputs: object) -> str:
    return hashlib.blake2b(repr(inputs).encode("utf-8", "backslashreplace"), digest_size=12).hexdigest()


def _version(dialect: Dialect) -> str:
    """Return a mark of the output's kind and of the code that renders it, which changes with either."""
    held = hashlib.blake2b(f"{__version__} {dialect.name}".encode(), digest_size=12)
    room = Path(__file__).parent
    for part in (room, room.parent / "relations", room.parent / "reading"):
        for source in sorted(part.rglob("*.py")):
            held.update(source.read_bytes())
    return held.hexdigest()
