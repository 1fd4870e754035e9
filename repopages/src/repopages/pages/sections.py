"""The sections of a page that describe a module: metadata, purpose, overview, API, architecture, source."""

import re

from repopages.pages.api import described
from repopages.pages.book import Book, counted, table
from repopages.pages.drawing import neighbours
from repopages.reading.docstrings import code, inline, markdown, parse
from repopages.reading.project import Page
from repopages.reading.source import Item, Module

DIFFERENCES = "Differences from "


def metadata(book: Book, page: Page) -> str:
    """Return path, size, tests and neighbours as a table."""
    modules, entries = page.modules, book.entries(page)
    tests = book.relations.using(book.relations.tests, [module.name for module in modules])
    importers, imported = book.neighbours(page)
    path = book.source_link(page.main, book.project.shown_path(page.main))
    if len(modules) > 1:
        path += f" and {counted(len(modules) - 1, 'module')} described here"
    size = sum(len(module.text.encode()) for module in modules) / 1024
    count = sum(program.tests for program in tests)
    rows = [
        ["path", path],
        ["size", f"{counted(sum(module.lines for module in modules), 'line')}, {size:.1f} KB"],
        ["kind", "internal package" if page.internal and len(modules) > 1 else _kind(book, page)],
        ["public names", _public_names(page, len(entries))],
        [
            "tests",
            f"{count:,} in {counted(len(tests), 'file')} use it directly"
            if tests
            else "none use it directly",
        ],
        ["imports", f"{counted(len(imported), 'page')}; imported by {len(importers)}"],
    ]
    return table(["", ""], rows)


def _public_names(page: Page, own: int) -> str:
    """Return how many public names a page documents, and how many a package takes from its modules."""
    exported = len(page.main.exports or ()) - own if page.main.is_package else 0
    parts = [str(own)] if own else []
    parts += [f"{exported} that its modules define"] if exported > 0 else []
    return ", ".join(parts) or "none"


def _kind(book: Book, page: Page) -> str:
    replaced = book.replaced(page.main)
    if replaced:
        return f"drop-in replacement for `{replaced}`"
    if page.main.is_package:
        return "package"
    return "module of an internal package; its public names are re-exported" if page.internal else "module"


def purpose(book: Book, page: Page) -> str:
    """Return the first paragraph of the docstring."""
    summary = book.doc(page.main).summary
    return inline(summary, book.names.linker(page.main)) if summary else "The module has no docstring."


def overview(book: Book, page: Page) -> str:
    """Return the rest of the docstring, then the definitions of the page's modules."""
    link = book.names.linker(page.main)
    parts = [markdown(story(book.doc(page.main).body)[0], link)]
    parts += [code(text) for text in _examples(book, page.main)]
    entries = book.entries(page)
    if entries:
        rows = [
            [
                f"{{py:obj}}`{entry.item.name} <{entry.name}>`",
                entry.item.kind,
                _summary(book, page.main, entry.item),
            ]
            for entry in entries
        ]
        parts.append(table(["public name", "kind", "summary"], rows))
    if page.main.exports and page.main.is_package:
        parts.append(_exported(book, page))
    parts += [
        _inside(book, page, module)
        for module in page.modules
        if book.other_items(module) or module is not page.main
    ]
    children = [child for child in book.project.pages if child.name.rpartition(".")[0] == page.name]
    if children:
        listed = "\n".join(f"- {book.page_link(child.name)}: {purpose(book, child)}" for child in children)
        parts.append(f"Modules with a page of their own:\n\n{listed}")
    return "\n\n".join(part for part in parts if part) or "The module defines nothing."


def _examples(book: Book, module: Module) -> list[str]:
    texts = book.doc(module).texts
    return [texts[title] for title in ("example", "examples", "usage") if title in texts]


def _exported(book: Book, page: Page) -> str:
    """Return the names that a package re-exports, by the module that defines them."""
    grouped: dict[str, list[str]] = {}
    for entry in book.project.entries:
        for name in (entry.name, *entry.aliases):
            if name.rpartition(".")[0] == page.name and entry.module is not page.main:
                grouped.setdefault(entry.module.name, []).append(
                    f"{{py:obj}}`{name.rpartition('.')[2]} <{entry.name}>`"
                )
    rows = [[book.page_link(module), ", ".join(names)] for module, names in sorted(grouped.items())]
    return table(["defined in", "public names"], rows) if rows else ""


def _inside(book: Book, page: Page, module: Module) -> str:
    """Return the names of a module that are not public, as a table."""
    rows = [
        [book.source_link(module, item.name, item.line), item.kind, _summary(book, module, item)]
        for item in book.other_items(module)
    ]
    listed = table(["name", "kind", "summary"], rows) if rows else "It defines no functions or classes."
    if module is page.main:
        count = counted(len(rows), "name")
        return f"<details><summary>{count} for internal use</summary>\n\n{listed}\n\n</details>"
    link = book.names.linker(module)
    summary = inline(book.doc(module).summary or "No docstring.", link)
    body = markdown(story(book.doc(module).body)[0], link)
    target = f"({anchor_of(module)})="
    return "\n\n".join(
        part for part in (target, f"### {book.short(module.name)}", summary, body, listed) if part
    )


def anchor_of(module: Module) -> str:
    """Return the anchor of a module that is described on the page of its package."""
    return "module-" + re.sub(r"[^a-z0-9]+", "-", module.name.lower())


def _summary(book: Book, module: Module, item: Item) -> str:
    return inline(parse(item.doc).summary, book.names.linker(module)) or "-"


def story(body: str) -> tuple[str, str]:
    """Split the text of a docstring into its description and the differences from another module."""
    before, mark, after = body.partition(DIFFERENCES)
    if not mark or (before and not before.endswith("\n\n")):
        return body, ""
    return before.strip("\n"), mark + after


def api(book: Book, page: Page) -> str:
    """Return every public name with its signature and docstring."""
    entries = book.entries(page)
    if entries:
        return "\n\n".join(described(entry, book.names) for entry in entries)
    if page.main.is_package:
        return "The package defines no public names itself. The overview lists where they are defined."
    return "No public names. The overview lists the names for internal use."


def architecture(book: Book, page: Page) -> str:
    """Return a drawing of the module's neighbours, and the chain of imports to it."""
    importers, imported = book.neighbours(page)
    links = {book.short(name): f"{name}.html" for name in importers | imported}
    drawn = neighbours(
        book.short(page.name),
        {book.short(name): links[book.short(name)] for name in importers},
        {book.short(name): links[book.short(name)] for name in imported},
    )
    chain = _chain(book, page)
    if len(chain) > 1:
        text = (
            "Shortest chain of imports from the package to it: "
            + " → ".join(book.page_link(name) for name in chain)
            + "."
        )
    elif page.main.name == book.project.name:
        text = "It is the package itself, from which every chain of imports begins."
    else:
        text = "`import " + book.project.name + "` does not load it: it is imported on demand."
    return f"```{{raw}} html\n{drawn}\n```\n\n{text}"


def _chain(book: Book, page: Page) -> list[str]:
    """Return the modules on the shortest path from the package to the page, or an empty list."""
    goal, start = {module.name for module in page.modules}, book.project.name
    if start in goal:
        return []
    # Breadth first, in the order of names, so that the chain is a shortest one and the same in every build.
    known: dict[str, str] = {start: ""}
    frontier = [start] if start in book.project.modules else []
    while frontier:
        reached = []
        for name in frontier:
            for imported in sorted(book.project.imports[name] - known.keys()):
                known[imported] = name
                reached.append(imported)
                if imported in goal:
                    return _traced(known, imported)
        frontier = reached
    return []


def _traced(known: dict[str, str], name: str) -> list[str]:
    steps = [name]
    while known[steps[-1]]:
        steps.append(known[steps[-1]])
    return steps[::-1]


def source(book: Book, page: Page) -> str:
    """Return links to the definitions in the source."""
    parts = []
    for module in page.modules:
        path = book.source_link(module, book.project.shown_path(module))
        items = [item for item in module.items if item.kind != "data"]
        shown = ", ".join(
            f"{book.source_link(module, item.name, item.line)} ({item.line}-{item.end})" for item in items
        )
        parts.append(f"- {path}: {shown}" if shown else f"- {path}")
    return "\n".join(parts)
