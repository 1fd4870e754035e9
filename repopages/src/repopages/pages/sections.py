"""The sections of a page that describe a file: metadata, purpose, source, overview, architecture."""

import mimetypes
import posixpath
import re
from collections import Counter

from repopages.pages.api import EXAMPLES, detailed, example, value_of, without_empty
from repopages.pages.book import Page, cut, described, main_items, parse, unlinked
from repopages.pages.drawing import graph_of
from repopages.pages.markup import anchor, code, counted, escape, fenced, listed, table
from repopages.pages.without_code import PARSED, not_searched
from repopages.reading.docstrings import inline, markdown

_REPLACES = re.compile(r"(?:Drop-in replacement for|Replaces) `+(?P<name>[\w.]+)`+")
_DIFFERENCES = "Differences from "
_MOST_TEXT = 160
_MOST_MAIN = 5
_HUB = 10  # importers


def metadata(page: Page) -> str:
    """Return path, size, language and neighbours as a table."""
    facts, library = page.facts, page.library
    extension = posixpath.splitext(facts.name)[1]
    module, tests = library.module(page.path), library.tests(page.path)
    importers, imported = library.importers(page.path), library.imports(page.path)
    has_code = facts.role in ("source", "test") and facts.language in PARSED
    media = mimetypes.guess_type(facts.name)[0] if facts.hidden == "binary" else ""
    unread = "" if facts.hidden and facts.hidden != "binary" else "none, it is not text"
    rows = [
        ["path", page.line(1, code(page.path))],
        ["size", _size(facts.size)],
        ["lines", f"{facts.lines:,}" if facts.text or not facts.size else ""],
        ["language", escape(facts.language)],
        ["type", facts.role],
        ["media type", code(media) if media else ""],
        ["extension", code(extension) if extension else "none"],
        ["encoding", escape(facts.encoding) if facts.encoding else unread],
        ["module", code(module) if module else ""],
        ["definitions", _kinds(page)],
        ["imports", counted(len(imported), "file") + " of this repository" if has_code else ""],
        ["imported by", counted(len(importers), "file") if importers or has_code else ""],
        ["tests", f"{facts.tests:,} in this file" if facts.tests else ""],
        ["tested by", counted(len(tests), "file") if tests else ""],
        ["not understood", escape(facts.problem)],
    ]
    return table(["", ""], [row for row in rows if row[1]])


def _size(size: int) -> str:
    for unit, name in ((1 << 20, "MB"), (1 << 10, "KB")):
        if size >= unit:
            return f"{size / unit:,.1f} {name} ({size:,} bytes)"
    return counted(size, "byte")


def _kinds(page: Page) -> str:
    """Return how many definitions of each kind a file has, nested ones too."""
    counts = Counter(item.kind for _, item in page.facts.walk())
    return ", ".join(
        counted(
            number,
            kind,
            f"{kind}es" if kind.endswith("s") else kind[:-1] + "ies" if kind.endswith("ty") else "",
        )
        for kind, number in counts.most_common()
    )


def purpose(page: Page) -> str:
    """Return the first paragraph of a docstring, a comment or a document."""
    facts = page.facts
    text, where = described(facts)
    if text and where not in ("docstring", "comment", "first paragraph", "title"):
        return f"{inline(text, unlinked)} (its key {code(where)})"
    return inline(text, page.linker()) if text else _silent(page)


def _silent(page: Page) -> str:
    """Return one line about a file that says nothing of its purpose."""
    facts = page.facts
    if facts.hidden:
        media = mimetypes.guess_type(facts.name)[0]
        kind = f" of type {code(media)}" if media and facts.hidden == "binary" else ""
        return f"{escape(facts.hidden[:1].upper() + facts.hidden[1:])}{kind}, so its content was not read."
    if not facts.text.strip():
        is_package = facts.name == "__init__.py"
        return "An empty file" + (
            f", which makes {page.folder(facts.folder)} a package." if is_package else "."
        )
    what = {"Python": "module docstring", "Markdown": "paragraph below a title", "JSON": "`description` key"}
    missing = what.get(facts.language, "comment at its top")
    items = main_items(facts)
    if not items or facts.role == "data":
        names = listed([code(item.name) for item in items], 8)
        return f"The file has no {missing}" + (f". Its keys: {names}." if names else ".")
    lines = []
    for item in items[:_MOST_MAIN]:
        summary = inline(cut(parse(item.doc).summary), page.linker(item.name, item))
        lines.append(f"- {code(item.name)}" + (f": {summary}" if summary else ""))
    more = f"\n- and {len(items) - _MOST_MAIN} more" if len(items) > _MOST_MAIN else ""
    return f"The file has no {missing}. It defines:\n\n" + "\n".join(lines) + more


def source(page: Page) -> str:
    """Return the text of the file, or why it is not shown."""
    facts = page.facts
    if facts.hidden:
        return f"Not shown: {escape(facts.hidden)}."
    return page.book.dialect.listing(facts) if facts.text.strip() else "The file is empty."


def overview(page: Page) -> str:
    """Return the rest of the docstring, then the definitions, headings or keys at the top of the file."""
    link, doc = page.linker(), page.doc
    parts = []
    if page.facts.role != "document":
        parts += [markdown(story(doc.body)[0], link)]
        parts += [example(doc.texts[title], link) for title in EXAMPLES if title in doc.texts]
        parts.append(_switching(page))
    parts += [_exported(page), _outline(page), _definitions(page)]
    return "\n\n".join(part for part in parts if part) or _nothing_defined(page)


def _nothing_defined(page: Page) -> str:
    facts = page.facts
    if facts.problem:
        return f"Its structure is unknown: {escape(facts.problem)}."
    if facts.hidden or not facts.text.strip():
        return "It has no text to describe."
    if facts.role == "document":
        return "The document has no headings."
    if facts.role == "data":
        return "It has no keys."
    if facts.language in PARSED:
        return "It defines no function, class or constant."
    return f"{escape(facts.language)} is read as plain text here, {counted(facts.lines, 'line')} of it."


def story(body: str) -> tuple[str, str]:
    """Split the text of a docstring into its description and the differences from another module."""
    before, mark, after = body.partition(_DIFFERENCES)
    if not mark or (before and not before.endswith("\n\n")):
        return body, ""
    return before.strip("\n"), mark + after


def _switching(page: Page) -> str:
    """Return the differences of a drop-in replacement, and the imports to change."""
    found = _REPLACES.match(page.doc.summary)
    module = page.library.module(page.path)
    if not found or not module:
        return ""
    before = found["name"]
    names = [name for _, name, _ in page.library.public(page.path) if "." not in name]
    if not names:
        names, module, before = (
            [module.rpartition(".")[2]],
            *(dotted.rpartition(".")[0] for dotted in (module, before)),
        )
    differences = story(page.doc.body)[1]
    text = (
        markdown(differences, page.linker())
        if differences
        else "The docstring lists no difference in names, signatures or defaults."
    )
    lines = f"# before\n{_import(before, names)}\n\n# after\n{_import(module, names)}"
    switch = f"### Switch from {escape(before.partition('.')[0])}"
    return f"{switch}\n\n{text}\n\nChange the prefix of the import:\n\n{fenced(lines, 'python')}"


def _import(module: str, names: list[str]) -> str:
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= 88:
        return line
    return f"from {module} import (\n" + "".join(f"    {name},\n" for name in names) + ")"


def _exported(page: Page) -> str:
    """Return the names that a package takes from other files, by the file that defines them."""
    if page.facts.name not in ("__init__.py", "__init__.pyi", "index.js", "index.ts", "mod.rs", "lib.rs"):
        return ""
    exports = None if page.facts.exports is None else set(page.facts.exports)
    rows = []
    for edge in page.library.imports(page.path):
        names = [name for name in edge.names if exports is None or name in exports]
        if names and edge.target != page.path:
            rows.append([page.file(edge.target), listed([_named(page, edge.target, name) for name in names])])
    return table(["defined in", "names that it takes from there"], rows) if rows else ""


def _named(page: Page, path: str, name: str) -> str:
    place = page.find(name)
    return page.place(place, code(name)) if place and place.path == path else code(name)


def _outline(page: Page) -> str:
    """Return the headings of a document as a table."""
    anchors = page.book.sections(page.path)
    rows = []
    for section in page.facts.sections:
        depth = "&emsp;" * (section.level - 1)
        title = inline(section.title, unlinked) or "(before the first heading)"
        target = page.book.dialect.section(page.here, page.path, section.anchor)
        shown = f"[{title}]({target})" if target and section.anchor else title
        text = (
            section.text
            if len(section.text) <= _MOST_TEXT
            else section.text[:_MOST_TEXT].rsplit(" ", 1)[0] + " …"
        )
        mark = anchor(anchors[section.anchor]) if section.anchor else ""
        rows.append([f"{mark}{depth}{shown}", page.line(section.line), inline(text, unlinked)])
    return without_empty(["section", "line", "begins with"], rows) if rows else ""


def _definitions(page: Page) -> str:
    """Return the definitions at the top of a file as a table."""
    facts, anchors = page.facts, page.book.anchors(page.path)
    rows = []
    for item in facts.items:
        mark = anchors[item.name]
        inner = sum(1 for _ in item.walk()) - 1
        if facts.role == "data":
            shown = anchor(mark) + code(item.name)
            value = value_of(item) or (counted(inner, "key") if inner else "")
            rows.append([shown, value, page.line(item.line), inline(parse(item.doc).summary, unlinked)])
        else:
            kind = item.kind if item.public else f"{item.kind}, internal"
            within = f", {inner} inside" if inner else ""
            summary = inline(parse(item.doc).summary, page.linker(item.name, item))
            shown = page.file(page.path, mark, code(item.name))
            rows.append([shown, f"{kind}{within}", page.line(item.line), summary])
    head = (
        ["key", "value", "line", "comment"] if facts.role == "data" else ["name", "kind", "line", "summary"]
    )
    return without_empty(head, rows) if rows else ""


def analysis(page: Page) -> str:
    """Return every definition in detail, or what there is instead."""
    made = detailed(page)
    if made:
        return made
    facts = page.facts
    if facts.role == "document" and facts.sections:
        return _document(page)
    if facts.role == "data" and facts.items:
        return "All of its keys are at the top, listed in the overview."
    if facts.name in ("__init__.py", "index.js", "index.ts") and page.library.imports(page.path):
        return "It defines nothing itself. The overview lists the names that it takes from other files."
    return not_searched(page, "definitions") or "It defines nothing: its statements run when it is loaded."


def _document(page: Page) -> str:
    """Return counts of a document's parts, its links and its terms."""
    facts = page.facts
    terms = Counter(mention.word for section in facts.sections for mention in section.terms)
    words = len(re.findall(r"\w+", facts.text))
    parts = [
        f"{counted(len(facts.sections), 'section')}, {counted(words, 'word')}, "
        f"{counted(len(facts.links), 'link')}."
    ]
    if terms:
        common = [code(word) for word, _ in terms.most_common(30)]
        parts.append(f"Emphasised, defined and code words, the most frequent first: {listed(common)}.")
    outside = sorted({target for target, _ in facts.links if re.match(r"https?://[^\s<>]+$", target)})
    if outside:
        links = [f"<{target}>" for target in outside[:20]]
        more = f"\n- and {len(outside) - 20} more" if len(outside) > 20 else ""
        parts.append("Links out of the repository:\n\n" + "\n".join(f"- {target}" for target in links) + more)
    return "\n\n".join(parts)


def architecture(page: Page) -> str:
    """Return the role of a file, a drawing of its neighbours, and the chain of imports to it."""
    parts = [" ".join(_roles(page))]
    graph = graph_of(page.library, page.book.dialect, page.path)
    if graph:
        parts.append(page.book.dialect.drawing(graph))
    chain = page.library.chain(page.path)
    if len(chain) > 1:
        shown = " → ".join(page.file(path) for path in chain)
        parts.append(f"Shortest chain of imports that loads it: {shown}.")
    return "\n\n".join(part for part in parts if part)


def _roles(page: Page) -> list[str]:
    """Return sentences about the place of a file in the repository."""
    facts, library = page.facts, page.library
    importers = {edge.source for edge in library.importers(page.path)} - {page.path}
    imported = {edge.target for edge in library.imports(page.path)} - {page.path}
    made = [_entry(page)]
    if facts.tests:
        what = "A test file with" if facts.role == "test" else "It contains"
        made.append(f"{what} {counted(facts.tests, 'test')}.")
    if importers:
        what = "A hub: it" if len(importers) >= _HUB else "It" if imported else "A leaf: it"
        imports = f"imports {counted(len(imported), 'file')}" if imported else "imports no file"
        made.append(f"{what} {imports} of the repository and is imported by {len(importers):,}.")
    elif imported:
        made.append(f"No file imports it, and it imports {counted(len(imported), 'file')} of the repository.")
    elif facts.role in ("document", "data", "other"):
        kind = {"document": "A document", "data": "Data"}.get(facts.role, "A file")
        made.append(f"{kind} in {page.folder(facts.folder)}, which no source imports.")
    elif facts.imports:
        made.append("It imports only from outside the repository, and no file of the repository imports it.")
    else:
        made.append("It has no imports, and no file of the repository imports it.")
    both = sorted(importers & imported)
    if both:
        made.append(f"Imports in both directions: {listed([page.file(path) for path in both], 8)}.")
    return [sentence for sentence in made if sentence]


def _entry(page: Page) -> str:
    """Return how a program starts with the file, or which names a package takes from its files."""
    facts, module = page.facts, page.library.module(page.path)
    if facts.name == "__main__.py":
        command = f"python -m {module.removesuffix('.__main__')}"
        return f"An entry point: {code(command)} runs it."
    if facts.name == "__init__.py":
        edges = [edge for edge in page.library.imports(page.path) if edge.names]
        names = sum(len(edge.names) for edge in edges)
        taken = f": it takes {counted(names, 'name')} from {counted(len(edges), 'file')}" if names else ""
        return f"The file of the package {code(module or facts.folder)}{taken}."
    if re.search(r"^if __name__ == .__main__.", facts.text, re.MULTILINE):
        return "A module that can also be run as a program, by its `__main__` block."
    if facts.text.startswith("#!"):
        return f"A program, run by {code(facts.text[2:].partition(chr(10))[0].strip())}."
    return ""
