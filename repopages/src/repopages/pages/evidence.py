"""The sections of a page with facts about a module: dependencies, figures, safety, tests, related pages."""

import re
from collections.abc import Iterator

from repopages.pages.api import example
from repopages.pages.book import Book, counted, table
from repopages.pages.sections import story
from repopages.reading.docstrings import inline, markdown, parse
from repopages.reading.findings import dependencies, raised_errors, touches
from repopages.reading.project import Page
from repopages.reading.relations import Program, Text

_MOST_TESTS, _MOST_ERRORS, _MOST_ROWS, _MOST_BLOCKS = 8, 12, 14, 3


def switching(book: Book, page: Page) -> str:
    """Return the differences from the replaced module, and the lines to change."""
    replaced = book.replaced(page.main)
    names = [entry.item.name for entry in book.entries(page)]
    module, before = page.main.name, str(replaced)
    if not names:
        names, module, before = [page.main.leaf], module.rpartition(".")[0], before.rpartition(".")[0]
    differences = story(book.doc(page.main).body)[1]
    text = (
        markdown(differences, book.names.linker(page.main))
        if differences
        else ("No difference in names, signatures and defaults.")
    )
    lines = f"# before\n{_import(before, names)}\n\n# after\n{_import(module, names)}"
    return f"{text}\n\nTo switch, change the prefix of the import:\n\n```python\n{lines}\n```"


def _import(module: str, names: list[str]) -> str:
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= 88:
        return line
    listed = "".join(f"    {name},\n" for name in names)
    return f"from {module} import (\n{listed})"


def needs(book: Book, page: Page) -> str:
    """Return the imports from the standard library, from other packages, and within the package."""
    standard, third = set(), set()
    for module in page.modules:
        first, second = dependencies(module, book.project.name)
        standard |= set(first)
        third |= set(second)
    importers, imported = book.neighbours(page)
    rows = [
        ["standard library", ", ".join(f"`{module}`" for module in sorted(standard)) or "none"],
        ["other packages", ", ".join(f"`{module}`" for module in sorted(third)) or "none"],
        ["within the package", ", ".join(book.page_link(module) for module in sorted(imported)) or "none"],
        [
            "imported by",
            ", ".join(book.page_link(module) for module in sorted(importers)) or "no module of the package",
        ],
    ]
    return table(["", "modules"], rows)


def performance(book: Book, page: Page) -> str:
    """Return the docstring's figures, rows of recorded benchmarks that name it, and programs that run it."""
    parts = _stated(book, page, "performance")
    words = {name for name in _measured_names(book, page) if re.search(r"[A-Z_]|\d", name)}
    figures = [
        figure
        for text in book.relations.texts
        if "bench" in text.path
        for figure in _figures(book, text, words)
    ]
    parts += figures[:_MOST_BLOCKS]
    programs, how = _reaching(book, page, book.relations.benchmarks)
    if programs:
        listed = "\n".join(
            f"- `python {program.path}`: {inline(program.summary, _code)}" for program in programs[:5]
        )
        parts.append(f"Benchmarks that {how}:\n\n{listed}")
    if not parts:
        return "No benchmark measures it: the package comes with none that uses this module."
    return "\n\n".join(parts)


def _measured_names(book: Book, page: Page) -> set[str]:
    """Return the page's public names, and those that the docstring of its module mentions as code."""
    spans = re.findall(r"`[\w.]*?(\w+)(?:\([^`]*)?`", page.main.doc)
    inner = re.findall(rf"\b{book.project.name}\.(\w+)\(", page.main.doc)
    known = {entry.item.name for entry in book.project.entries if entry.item.kind != "data"}
    return {entry.item.name for entry in book.entries(page)} | (known & {*spans, *inner})


def _stated(book: Book, page: Page, title: str) -> list[str]:
    """Return a section of the docstrings, such as `Performance:`."""
    return [
        markdown(book.doc(module).texts[title], book.names.linker(module))
        for module in page.modules
        if title in book.doc(module).texts
    ]


def _figures(book: Book, text: Text, words: set[str]) -> list[str]:
    """Return the rows of a section's tables that name one of `words`, each block with its head and a link."""
    if not words:
        return []
    pattern, made = re.compile(r"(?<![\w.])(?:" + "|".join(map(re.escape, sorted(words))) + r")\b"), []
    for block in re.findall(r"```\w*\n(.*?)```", "\n".join(text.lines), flags=re.DOTALL):
        shown = list(_rows(block.splitlines(), pattern))[:_MOST_ROWS]
        while shown and not pattern.search(shown[-1]):
            shown.pop()  # the head of a group that was cut off
        if shown:
            rows = "\n".join(shown)
            made.append(f"From {book.text_link(text)}:\n\n```text\n{rows}\n```")
    return made


def _rows(lines: list[str], pattern: re.Pattern[str]) -> Iterator[str]:
    """Yield the rows that match, each group below its command, its title and the heads of its columns."""
    pending: list[str] = []
    for line in lines:
        digits = len(re.findall(r"\d", line))
        is_command, is_row = line.startswith("$"), "  " in line.strip() and digits > 2
        if not is_command and digits and pattern.search(line):
            yield from pending
            yield line
            pending = []
        elif is_command:
            pending = [line]
        elif line.strip() and not is_row:
            pending = [*(row for row in pending if row.startswith("$")), *pending[-1:], line]
            pending = list(dict.fromkeys(pending))


def _reaching(book: Book, page: Page, programs: list[Program]) -> tuple[list[Program], str]:
    """Return the programs that use the page's modules, or else the nearest modules that import them."""
    # A test of a caller is better evidence than none: widen to importers until a program uses one of them.
    reached = {module.name for module in page.modules}
    found, how = book.relations.using(programs, reached), "use it"
    while not found:
        wider = reached | {importer for name in reached for importer in book.project.importers[name]}
        if wider == reached:
            return [], how
        reached, how = wider, "use modules that import it"
        found = book.relations.using(programs, reached)
    return found, how


def safety(book: Book, page: Page) -> str:
    """Return the module's promises, the errors that it raises, and its effects outside itself."""
    parts = _stated(book, page, "safety")
    rows = []
    for module in page.modules:
        for error in raised_errors(module):
            where = book.source_link(module, error.where or module.leaf, error.line)
            rows.append([f"`{error.error}`", inline(error.message, _code), where])
    if rows:
        parts.append(f"It raises, instead of continuing ({counted(len(rows), 'check')}):")
        parts.append(table(["error", "message", "raised by"], rows[:_MOST_ERRORS]))
        if len(rows) > _MOST_ERRORS:
            parts.append(f"{len(rows) - _MOST_ERRORS} more are in the source.")
    parts.append(_outside(page))
    return "\n\n".join(parts)


def _outside(page: Page) -> str:
    found: dict[str, set[str]] = {}
    for module in page.modules:
        for what, names in touches(module).items():
            found.setdefault(what, set()).update(names)
    if not found:
        return (
            "Its source starts no process or thread, opens no file for writing and no connection, loads no"
            " native code or pickle, and runs no text as code."
        )
    listed = "\n".join(
        f"- {what}: {', '.join(f'`{name}`' for name in sorted(names)[:6])}" for what, names in found.items()
    )
    return f"Effects of its source beyond computing, by the names that it uses:\n\n{listed}"


def testing(book: Book, page: Page) -> str:
    """Return an example and the tests."""
    parts = [_usage(book, page)]
    tests, how = _reaching(book, page, [program for program in book.relations.tests if program.tests])
    if tests:
        rows = [
            [f"`{program.path}`", str(program.tests), inline(program.summary, _code)]
            for program in tests[:_MOST_TESTS]
        ]
        parts.append(f"{counted(len(tests), 'test file')} {how}:")
        parts.append(table(["file", "tests", "subject"], rows))
        parts.append(f"```sh\npytest {' '.join(program.path for program in tests[:3])}\n```")
    else:
        parts.append("No tests come with the package.")
    return "\n\n".join(parts)


def _usage(book: Book, page: Page) -> str:
    for entry in book.entries(page):
        texts = parse(entry.item.doc).texts
        for title in ("example", "examples", "usage"):
            if title in texts:
                return example(texts[title])
    for program in book.relations.using(book.relations.examples, [module.name for module in page.modules]):
        return f"`{program.path}` uses it: {inline(program.summary, _code)}"
    entries = book.entries(page)
    line = f"from {page.main.name} import {entries[0].item.name}" if entries else f"import {page.main.name}"
    return f"```python\n{line}\n```"


def related(book: Book, page: Page) -> str:
    """Return related pages of the same package, and sections of guides that mention the module's names."""
    parts = []
    parent = page.name.rpartition(".")[0]
    nearby = [
        other for other in book.project.pages if other.name.rpartition(".")[0] == parent and other is not page
    ]
    importers, imported = book.neighbours(page)
    close = [other for other in nearby if other.name in importers | imported] or nearby
    listed = [f"- {book.page_link(other.name)}: {_purpose(book, other)}" for other in close[:8]]
    if parent in book.project.page_of:
        listed.insert(0, f"- {book.page_link(parent)}: {_purpose(book, book.project.page_of[parent])}")
    parts.append("\n".join(listed) or "The package has no other module.")
    words = {entry.item.name for entry in book.entries(page)} or {page.main.leaf}
    texts = book.relations.mentioning(words)[:6]
    if texts:
        parts.append("Pages about it: " + ", ".join(book.text_link(text) for text in texts) + ".")
    return "\n\n".join(parts)


def _purpose(book: Book, page: Page) -> str:
    return inline(book.doc(page.main).summary or "no docstring", book.names.linker(page.main))


def _code(text: str) -> str:
    return f"`{text}`"
