"""The index of a folder, and its page: purpose, structure, neighbours and statistics."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from repopages.pages.addresses import KEYWORDS, file_page, folder_index, folder_page, relative
from repopages.pages.book import Book
from repopages.pages.drawing import files_below, folder_graph
from repopages.pages.markup import code, counted, escape, link, listed, table
from repopages.relations.library import Folder, Library

_FIRST = (
    "readme.md",
    "readme.rst",
    "readme.txt",
    "readme",
    "__init__.py",
    "mod.rs",
    "lib.rs",
    "index.ts",
    "index.js",
    "doc.go",
)
"""Files that say what a folder is for, the best first."""

_MOST_TREE = 60


@dataclass(frozen=True, eq=False)
class FolderPage:
    """The two pages of a folder.

    Args:
        book: All pages.
        path: The folder, empty for the root.
        here: Address of the page that links start from. By default, that of the two pages.
    """

    book: Book
    path: str
    here: str = ""

    @property
    def library(self) -> Library:
        """The files and their relations."""
        return self.book.library

    @property
    def folder(self) -> Folder:
        """The folder."""
        return self.library.folders[self.path]

    @cached_property
    def files(self) -> list[str]:
        """All files below the folder."""
        return list(files_below(self.library, self.path))

    @property
    def title(self) -> str:
        """Heading of both pages."""
        return escape(f"{self.path}/" if self.path else self.library.name)

    def link(self, there: str, text: str) -> str:
        """Return a link from one of the two pages, which lie in the same folder, or from another page."""
        dialect = self.book.dialect
        top = "" if there == KEYWORDS else dialect.top
        here = self.here or dialect.top + folder_index(self.path)
        return link(text, relative(here, top + there + dialect.suffix))

    def file(self, path: str) -> str:
        """Return a link to a file's page."""
        name = path.removeprefix(f"{self.path}/") if self.path else path
        return self.link(file_page(path), code(name))


def folder_summary(book: Book, path: str) -> str:
    """Return one line about a folder, from its README or its package docstring, or an empty text."""
    names = {file.rpartition("/")[2].lower(): file for file in book.library.folders[path].files}
    texts = (book.said(names[name]) for name in _FIRST if name in names)
    return next((text for text in texts if text), "")


def index_of(folder: FolderPage) -> str:
    """Return the index of a folder: folders, files and keywords, one line each."""
    book, library = folder.book, folder.library
    parts = [f"# Index of {folder.title}", _trail(folder, page=False)]
    if folder.folder.folders:
        rows = [
            [
                folder.link(folder_index(path), code(f"{path.rpartition('/')[2]}/")),
                _held(library, path),
                folder_summary(book, path),
            ]
            for path in folder.folder.folders
        ]
        parts += ["## Folders", table(["folder", "holds", "purpose"], rows, most=len(rows))]
    if folder.folder.files:
        rows = []
        for path in folder.folder.files:
            facts = library.files[path]
            size = counted(facts.lines, "line") if facts.text else counted(facts.size, "byte")
            rows.append([folder.file(path), escape(facts.language), size, book.summary(path)])
        parts += ["## Files", table(["file", "language", "size", "purpose"], rows, most=len(rows))]
    rows = [
        [code(name), kind, listed(links, 8)]
        for (name, kind), links in sorted(
            _keywords(folder).items(), key=lambda entry: (entry[0][0].lower(), entry[0])
        )
    ]
    parts.append("## Keywords")
    everything = folder.link(KEYWORDS, "index of all keywords")
    if rows:
        intro = (
            "Definitions at the top of the files in this folder. Parameters, imports and terms are in each"
            f" file's keywords and in the {everything}."
        )
        parts += [intro, table(["keyword", "kind", "file"], rows, most=len(rows))]
    else:
        parts.append(f"No file directly in this folder defines a name. See the {everything}.")
    return "\n\n".join(parts) + "\n"


def _held(library: Library, path: str) -> str:
    held = library.folders[path]
    return ", ".join(
        counted(len(names), noun) for names, noun in ((held.folders, "folder"), (held.files, "file")) if names
    )


def _keywords(folder: FolderPage) -> dict[tuple[str, str], list[str]]:
    found: dict[tuple[str, str], list[str]] = {}
    dialect = folder.book.dialect
    for path in folder.folder.files:
        anchors = folder.book.anchors(path)
        for item in folder.library.files[path].items:
            target = relative(
                dialect.top + folder_index(folder.path),
                dialect.top + file_page(path) + dialect.suffix,
                anchors[item.name],
            )
            found.setdefault((item.name, item.kind), []).append(link(code(path.rpartition("/")[2]), target))
    return found


def _trail(folder: FolderPage, *, page: bool) -> str:
    """Return links to the folders above, and to the other page of this folder."""
    names = folder.path.split("/") if folder.path else []
    above = ["/".join(names[:depth]) for depth in range(len(names))]
    address = folder_page if page else folder_index
    links = [
        folder.link(address(path), code(f"{path.rpartition('/')[2]}/" if path else folder.library.name))
        for path in above
    ]
    other = (
        folder.link(folder_index(folder.path), "index: files and keywords")
        if page
        else folder.link(folder_page(folder.path), "page: structure and imports")
    )
    here = code(f"{names[-1]}/") if names else code(folder.library.name)
    if not folder.book.dialect.trail:
        return f"See its {other}."
    return " / ".join([*links, here]) + f" (see its {other})"


def page_of(folder: FolderPage) -> str:
    """Return the page of a folder."""
    parts = [f"# {folder.title}", _trail(folder, page=True)]
    sections = {
        "Folder metadata": _metadata(folder),
        "Purpose": folder_summary(folder.book, folder.path) or "It has no README and no package docstring.",
        "Structure": structure(folder),
        "Architecture and design": _architecture(folder),
        "Statistics": _statistics(folder),
        "Testing and usage": _tests(folder),
    }
    for title, text in sections.items():
        parts += [f"## {title}", text]
    return "\n\n".join(parts) + "\n"


def _metadata(folder: FolderPage) -> str:
    facts = [folder.library.files[path] for path in folder.files]
    deep = sum(1 for _ in _folders_below(folder.library, folder.path))
    rows = [
        ["path", code(f"{folder.path}/") if folder.path else "the root of the repository"],
        ["directly in it", _held(folder.library, folder.path) or "nothing"],
        ["below it", f"{counted(len(facts), 'file')}, {counted(deep, 'folder')}"],
        ["lines", f"{sum(held.lines for held in facts):,}"],
        ["size", counted(sum(held.size for held in facts), "byte")],
    ]
    return table(["", ""], rows)


def _folders_below(library: Library, path: str) -> Iterator[str]:
    for inner in library.folders[path].folders:
        yield inner
        yield from _folders_below(library, inner)


def structure(folder: FolderPage) -> str:
    """Return the tree of folders and files below, with one line each."""
    lines = list(_tree(folder, folder.path, 0))
    more = len(lines) - _MOST_TREE
    return (
        "\n".join(lines[:_MOST_TREE]) + (f"\n\nand {more:,} more." if more > 0 else "")
        or "The folder is empty."
    )


def _tree(folder: FolderPage, path: str, depth: int) -> Iterator[str]:
    book = folder.book
    held = folder.library.folders[path]
    for inner in held.folders:
        summary = folder_summary(book, inner)
        shown = folder.link(folder_page(inner), code(f"{inner.rpartition('/')[2]}/"))
        yield (
            "  " * depth + f"- {shown}" + (f": {summary}" if summary else f", {_held(folder.library, inner)}")
        )
        if depth < 1 and len(held.folders) <= 12:
            yield from _tree(folder, inner, depth + 1)
    for file in held.files if depth == 0 or len(held.files) <= 8 else ():
        summary = book.summary(file)
        shown = folder.link(file_page(file), code(file.rpartition("/")[2]))
        yield "  " * depth + f"- {shown}" + (f": {summary}" if summary else "")


def _architecture(folder: FolderPage) -> str:
    """Return the folder's neighbours, and the imports between the parts of the folder."""
    library, parts = folder.library, list[str]()
    graph = folder_graph(library, folder.book.dialect, folder.path) if folder.path else None
    if graph:
        parts.append(folder.book.dialect.drawing(graph))
    between: dict[str, Counter[str]] = {}
    for path in folder.files:
        part = _part(path, folder.path)
        for edge in library.imports(path):
            target = _part(edge.target, folder.path)
            if target and target != part:
                between.setdefault(part, Counter())[target] += 1
    rows = [
        [
            _part_link(folder, part),
            listed([f"{_part_link(folder, name)} ({count})" for name, count in targets.most_common()], 12),
        ]
        for part, targets in sorted(between.items())
    ]
    if rows:
        parts.append(table(["part", "imports from, with the number of imports"], rows))
    popular = Counter({path: len(library.importers(path)) for path in folder.files}).most_common(8)
    shown = [f"{folder.file(path)} ({count})" for path, count in popular if count > 1]
    if shown:
        parts.append(f"Files that most others import: {listed(shown)}.")
    return (
        "\n\n".join(parts) or "No file below it imports another file of the repository or is imported by one."
    )


def _part(path: str, folder: str) -> str:
    """Return the folder or file directly in `folder` that a file belongs to, or an empty text outside it."""
    below = f"{folder}/" if folder else ""
    if not path.startswith(below):
        return ""
    first, more, _ = path.removeprefix(below).partition("/")
    return below + first + more


def _part_link(folder: FolderPage, part: str) -> str:
    address = folder_page(part.rstrip("/")) if part.endswith("/") else file_page(part)
    return folder.link(address, code(part.removeprefix(f"{folder.path}/")))


def _statistics(folder: FolderPage) -> str:
    files: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    definitions: Counter[str] = Counter()
    for path in folder.files:
        facts = folder.library.files[path]
        files[facts.language] += 1
        lines[facts.language] += facts.lines
        definitions[facts.language] += sum(1 for _ in facts.walk()) if facts.role in ("source", "test") else 0
    rows = [
        [escape(language), f"{count:,}", f"{lines[language]:,}", f"{definitions[language]:,}"]
        for language, count in files.most_common()
    ]
    made = [table(["language", "files", "lines", "definitions"], rows)]
    broken = [path for path in folder.files if folder.library.files[path].problem]
    if broken:
        shown = [f"{folder.file(path)} ({escape(folder.library.files[path].problem)})" for path in broken]
        made.append(f"Not understood: {listed(shown, 12)}.")
    return "\n\n".join(made)


def _tests(folder: FolderPage) -> str:
    inside = [path for path in folder.files if folder.library.files[path].tests]
    tests = {use.path for path in folder.files for use in folder.library.tests(path)} - set(inside)
    count = sum(folder.library.files[path].tests for path in inside)
    made = []
    if inside:
        made.append(
            f"{counted(count, 'test')} in {counted(len(inside), 'file')}: "
            f"{listed([folder.file(path) for path in inside], 12)}."
        )
    if tests:
        shown = [folder.link(file_page(path), code(path)) for path in sorted(tests)]
        made.append(f"{counted(len(tests), 'test file')} elsewhere for it: {listed(shown, 12)}.")
    return "\n\n".join(made) or "It contains no tests, and no test elsewhere imports or names its files."
