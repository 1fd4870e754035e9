"""The sections of a page with evidence: dependencies, patterns, figures, safety, tests, uses elsewhere."""

import re
from collections.abc import Iterator, Sequence

from repopages.pages.api import EXAMPLES, without_empty
from repopages.pages.book import Page, parse, unlinked
from repopages.pages.markup import code, counted, escape, fenced, listed, table
from repopages.pages.without_code import (
    data_patterns,
    data_performance,
    data_safety,
    document_performance,
    document_safety,
    is_prose,
    not_searched,
    nothing_found,
)
from repopages.reading.docstrings import inline, markdown
from repopages.reading.model import Error, Finding, Mention
from repopages.relations.library import Edge, Use

_MOST_FIGURES, _MOST_BLOCKS, _MOST_CODE, _MOST_LINES = 14, 3, 100, 12


def dependencies(page: Page) -> str:
    """Return what the file imports: files of the repository, then what is outside it."""
    facts, library = page.facts, page.library
    parts = []
    imported = [edge for edge in library.imports(page.path) if edge.target != page.path]
    if imported:
        rows = [
            [page.file(edge.target), _names(edge), page.line(edge.line), page.book.summary(edge.target)]
            for edge in imported
        ]
        head = ["file of the repository", "names", "line", "purpose"]
        parts.append(without_empty(head, rows))
    outside = {title: names for title, names in library.outside(page.path).items() if names}
    if facts.role in ("data", "document") and not outside and not imported and facts.imports:
        title = "declared" if facts.role == "data" else "modules"
        outside = {title: sorted({held.module for held in facts.imports})}
    rows = [[title, listed([code(name) for name in names])] for title, names in outside.items()]
    if rows:
        parts.append(table(["from outside", "modules"], rows))
    late = sorted({held.module or held.name for held in facts.imports if held.inside} - {""})
    if late:
        names = listed([code(name) for name in late])
        parts.append(f"Imported inside functions, so only when they run: {names}.")
    return "\n\n".join(parts) or _no_imports(page)


def _no_imports(page: Page) -> str:
    facts = page.facts
    if facts.role == "document" and facts.text.strip():
        links = len(page.library.links(page.path))
        there = f"{counted(links, 'file')} of the repository, listed in the cross-references"
        return f"It links to {there if links else 'no file of the repository'}."
    if facts.role == "data" and facts.items:
        return "Its keys name no package, file or action that it needs."
    return not_searched(page, "imports") or "It has no import, include or require."


def _names(edge: Edge) -> str:
    return listed([code(name) for name in edge.names], 12)


def patterns(page: Page) -> str:
    """Return idioms of the language that the file uses, with their lines."""
    found = _found(page, "pattern", "idiom")
    if found or (page.facts.role == "data" and page.facts.items):
        return found or data_patterns(page)
    if is_prose(page):
        return "The document has no block of code."
    return nothing_found(page, "pattern")


def _found(page: Page, topic: str, title: str) -> str:
    """Return the findings of a topic, one row for each kind, with the first piece of code."""
    grouped: dict[str, list[Finding]] = {}
    for finding in page.facts.findings:
        if finding.topic == topic:
            grouped.setdefault(finding.label, []).append(finding)
    rows = [
        [escape(label), _evidence(held), page.lines([finding.line for finding in held])]
        for label, held in grouped.items()
    ]
    return table([title, "code", "lines"], rows) if rows else ""


def _evidence(held: Sequence[Finding]) -> str:
    different = list(dict.fromkeys(_cut(finding.code) for finding in held))
    more = f" and {len(different) - 2} more" if len(different) > 2 else ""
    return ", ".join(code(text) for text in different[:2]) + more


def _cut(text: str, most: int = _MOST_CODE) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most - 1]}…"


def performance(page: Page) -> str:
    """Return findings, what docstrings say, and rows of recorded benchmarks that name its definitions."""
    parts = [_found(page, "performance", "what")]
    parts += _stated(page, "performance", "complexity")
    parts += _figures(page)[:_MOST_BLOCKS]
    found = "\n\n".join(part for part in parts if part)
    if found or is_prose(page):
        return found or document_performance(page)
    is_data = page.facts.role == "data" and page.facts.items
    return data_performance(page) if is_data else nothing_found(page, "performance")


def _stated(page: Page, *titles: str) -> list[str]:
    """Return a section of the docstrings, such as `Performance:`."""
    made = [markdown(page.doc.texts[title], page.linker()) for title in titles if title in page.doc.texts]
    for name, item in page.facts.walk():
        texts = parse(item.doc).texts if any(title in item.doc.lower() for title in titles) else {}
        made += [
            f"{code(name)}: {markdown(texts[title], page.linker(name, item))}"
            for title in titles
            if title in texts
        ]
    return made


def _figures(page: Page) -> list[str]:
    """Return rows of recorded benchmarks that name the file's definitions, each block with its head."""
    names = [item.name for _, _, item in page.library.public(page.path)]
    words = {name for name in names if re.search(r"[A-Z_]|\d", name) and len(name) > 3}
    made: list[str] = []
    for path, section, lines in page.book.benchmarks if words else ():
        if len(made) >= _MOST_BLOCKS or not section.words & words or path == page.path:
            continue
        pattern = re.compile(r"(?<![\w.])(?:" + "|".join(map(re.escape, sorted(words))) + r")\b")
        for block in re.findall(r"```\w*\n(.*?)```", "\n".join(lines), flags=re.DOTALL):
            shown = list(_rows(block.splitlines(), pattern))[:_MOST_FIGURES]
            while shown and not pattern.search(shown[-1]):
                shown.pop()  # the head of a group that was cut off
            if shown:
                made.append(f"From {page.section(path, section)}:\n\n" + fenced("\n".join(shown)))
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


def safety(page: Page) -> str:
    """Return effects outside the file, errors raised and caught, and environment variables."""
    facts = page.facts
    parts = _stated(page, "safety", "security", "thread safety")
    parts.append(_found(page, "security", "what") or _nothing_unsafe(page))
    if facts.raised:
        parts.append(f"Errors that it raises ({counted(len(facts.raised), 'place')}):")
        rows = [
            [_error(page, error), inline(_cut(error.message, 200), unlinked), _where(page, error)]
            for error in facts.raised
        ]
        parts.append(without_empty(["error", "message", "raised in"], rows))
    if facts.caught:
        caught: dict[str, list[int]] = {}
        for error in facts.caught:
            caught.setdefault(error.name, []).append(error.line)
        shown = [f"{code(name)} (line {page.lines(lines)})" for name, lines in caught.items()]
        parts.append(f"Errors that it catches: {listed(shown)}.")
    rows = _mentions(page, "environment")
    if rows:
        parts.append(without_empty(["environment variable", "lines", "meaning"], rows))
    return "\n\n".join(part for part in parts if part)


def _nothing_unsafe(page: Page) -> str:
    """Return that no effect outside the file was found, or what was looked for instead."""
    if page.facts.role == "data" and page.facts.items:
        return data_safety(page)
    if is_prose(page):
        return document_safety(page)
    return nothing_found(page, "security")


def _error(page: Page, error: Error) -> str:
    place = page.find(error.name) if re.fullmatch(r"[\w.]+", error.name) else None
    return page.place(place, code(error.name)) if place else code(error.name)


def _where(page: Page, error: Error) -> str:
    anchor = page.book.anchors(page.path).get(error.where)
    inside = f"{page.file(page.path, anchor, code(error.where))}, " if anchor else ""
    return f"{inside}line {page.line(error.line)}"


def _mentions(page: Page, kind: str) -> list[list[str]]:
    grouped: dict[str, list[Mention]] = {}
    for mention in page.facts.mentions:
        if mention.kind == kind:
            grouped.setdefault(mention.word, []).append(mention)
    return [
        [
            code(word),
            page.lines([mention.line for mention in held]),
            inline(next((mention.text for mention in held if mention.text), ""), unlinked),
        ]
        for word, held in grouped.items()
    ]


def testing(page: Page) -> str:
    """Return an example, the tests that use the file, and the options of its command."""
    parts = [_usage(page)]
    rows = _mentions(page, "option")
    if rows:
        parts.append(without_empty(["command-line option", "lines", "meaning"], rows))
    parts.append(_own_tests(page))
    tests, examples = page.library.tests(page.path), page.library.examples(page.path)
    if tests:
        parts += [_uses(page, "test file", tests), _command(tests)]
    if examples:
        parts.append(_uses(page, "example", examples))
    if not tests and not page.facts.tests:
        found = "No test of the repository imports or names it."
        parts.append(found if page.book.has_tests else "The repository has no tests.")
    return "\n\n".join(part for part in parts if part)


def _usage(page: Page) -> str:
    """Return the examples in the docstrings of public definitions, or the line that imports them."""
    public, anchors = page.library.public(page.path), page.book.anchors(page.path)
    found = []
    for name, dotted, item in public:
        texts = parse(item.doc).texts if "xample" in item.doc or "sage" in item.doc else {}
        where = page.file(page.path, anchors[dotted], code(name))
        found += [(where, texts[title], dotted, item) for title in EXAMPLES if title in texts]
    if found:
        where, text, dotted, item = found[0]
        if len(found) == 1 and text.count("\n") <= _MOST_LINES:
            return f"Example of {where}:\n\n{markdown(text, page.linker(dotted, item))}"
        return f"Docstrings with examples: {listed([entry[0] for entry in found])}."
    if public and page.facts.language == "Python" and not page.facts.tests:
        module, _, name = public[0][0].rpartition(".")
        line = fenced(f"from {module} import {name}", "python")
        return f"No docstring has an example. To import from it:\n\n{line}"
    return ""


def _own_tests(page: Page) -> str:
    if not page.facts.tests:
        return ""
    names = [
        page.file(page.path, page.book.anchors(page.path)[name], code(name))
        for name, item in page.facts.walk()
        if item.kind in ("function", "method") and re.match(r"test|Test|bench", item.name)
    ]
    shown = f": {listed(names)}" if names else ""
    return f"It contains {counted(page.facts.tests, 'test')}{shown}."


def _uses(page: Page, what: str, uses: Sequence[Use]) -> str:
    files = page.library.files
    rows = [
        [
            page.file(use.path),
            f"{use.how}, line {page.line(use.line, path=use.path)}",
            str(files[use.path].tests or ""),
            page.book.summary(use.path),
        ]
        for use in uses
    ]
    return (
        f"{counted(len(uses), what)} for it:\n\n"
        + without_empty(["file", "how", "tests", "subject"], rows[:12])
        + (f"\n\nand {len(rows) - 12} more." if len(rows) > 12 else "")
    )


def _command(tests: Sequence[Use]) -> str:
    paths = [
        use.path for use in tests[:3] if use.path.endswith(".py") and re.fullmatch(r"[\w./-]+", use.path)
    ]
    return fenced(f"pytest {' '.join(paths)}", "sh") if paths else ""


def related(page: Page) -> str:
    """Return other files that a reader of this one should know of, with the reason."""
    found = page.library.related(page.path)
    rows = [[page.file(path), escape(reason), page.book.summary(path)] for path, reason in found]
    if rows:
        return without_empty(["file", "why", "purpose"], rows)
    others = len(page.library.folders[page.facts.folder].files) - 1
    nearby = f"{page.folder(page.facts.folder)}, holds {counted(others, 'other file')}"
    return f"No file imports it, is imported by it, tests it or links to it. Its folder, {nearby}."


def references(page: Page) -> str:
    """Return where other files use its names, documents about the file, and names of re-exports."""
    parts = [_users(page), _exports(page), _documents(page), _links(page)]
    found = "\n\n".join(part for part in parts if part)
    return found or (
        "No file of the repository imports it, and no document links to it or mentions one of its names."
    )


def _users(page: Page) -> str:
    """Return the files that use each definition, and those that import the file as a whole."""
    anchors, users = page.book.anchors(page.path), page.book.uses.get(page.path, {})
    lines = {edge.source: edge.line for edge in page.library.importers(page.path)}
    known = {name: paths for name, paths in users.items() if name in anchors}
    rows = [
        [page.file(page.path, anchors[name], code(name)), listed([page.file(path) for path in paths], 10)]
        for name, paths in sorted(known.items(), key=lambda pair: (-len(pair[1]), pair[0]))
    ]
    using = {path for paths in known.values() for path in paths}
    whole = [
        f"{page.file(path)} (line {page.line(line, path=path)})"
        for path, line in lines.items()
        if path not in using and path != page.path
    ]
    if whole:
        rows.append(["the file itself", listed(whole, 10)])
    return table(["name", "used in"], rows) if rows else ""


def _exports(page: Page) -> str:
    """Return the names under which definitions of this file are exported elsewhere."""
    module = page.library.module(page.path)
    rows = [
        [page.file(page.path, page.book.anchors(page.path)[dotted], code(dotted)), code(name)]
        for name, dotted, _ in page.library.public(page.path)
        if module and name != f"{module}.{dotted}" and "." not in dotted
    ]
    return table(["defined here", "imported as"], rows) if rows else ""


def _documents(page: Page) -> str:
    sections: dict[str, list[str]] = {}
    for path, section in page.library.documents(page.path):
        if path != page.path:
            sections.setdefault(path, []).append(page.section(path, section))
    rows = [[page.file(path), listed(held, 8)] for path, held in sections.items()]
    return table(["document", "sections about it"], rows) if rows else ""


def _links(page: Page) -> str:
    """Return the files of the repository that a document links to."""
    rows = []
    for edge in page.library.links(page.path):
        is_file = edge.target in page.library.files
        if is_file or edge.target in page.library.folders:
            shown = page.file(edge.target) if is_file else page.folder(edge.target)
            rows.append([shown, page.line(edge.line), page.book.summary(edge.target) if is_file else ""])
    return without_empty(["it links to", "line", "purpose"], rows) if rows else ""
