"""Pages of the site as Markdown: one for each module or package, the start page and the keyword index."""

import re
from collections.abc import Callable
from pathlib import Path

from repopages.pages import evidence, sections
from repopages.pages.book import Book
from repopages.pages.keywords import Keyword, as_list, keywords_of
from repopages.reading.docstrings import code, inline, markdown
from repopages.reading.project import Page
from repopages.reading.relations import document_of

Section = Callable[[Book, Page], str]

SECTIONS: dict[str, Section] = {
    "Metadata": sections.metadata,
    "Purpose": sections.purpose,
    "Overview": sections.overview,
    "API": sections.api,
    "Architecture": sections.architecture,
    "Dependencies": evidence.needs,
    "Performance": evidence.performance,
    "Security and safety": evidence.safety,
    "Testing and usage": evidence.testing,
    "Source": sections.source,
    "Related modules": evidence.related,
}
"""The sections that every page has, in order. A drop-in replacement also has `Switch from ...`."""


def module_page(book: Book, page: Page) -> str:
    """Return the page of a module or an internal package."""
    parts = ["# " + page.name.replace("_", r"\_")]
    clashes = any(entry.name == page.name for entry in book.project.entries)
    if not clashes:  # a function with the name of its module, such as `attach`, owns the name
        parts.append(f"```{{py:module}} {page.name}\n```")
    for title, section in SECTIONS.items():
        parts += [f"## {title}", section(book, page)]
        replaced = book.replaced(page.main)
        if title == "Overview" and replaced:
            parts += [f"## Switch from {replaced.partition('.')[0]}", evidence.switching(book, page)]
    listed = as_list(keywords_of(book, page), "../", here=page.document)
    parts += ["## Keywords", f"```{{raw}} html\n{listed}\n```"]
    return "\n\n".join(parts) + "\n"


def index_page(book: Book, readme: str = "") -> str:
    """Return the start page, from which every page can be reached.

    Args:
        book: The material of the site.
        readme: Text of the checkout's README, which the page begins with. Without one it begins with the
            docstring of the package.
    """
    intro = [readme.strip()] if readme else _introduction(book)
    intro.append(
        "## Find a name\n\nLook in the [keyword index](keywords.md), the {ref}`general index <genindex>` or"
        " use the search. Programs can read [keywords.json](keywords.json) and [llms.txt](llms.txt)."
    )
    contents = {title: documents for title, documents in _contents(book).items() if documents}
    trees = [_toctree(book, title, documents) for title, documents in contents.items()]
    shown = [
        f"## {title}\n\n" + "\n".join(_line(book, document) for document in held)
        for title, held in contents.items()
    ]
    return "\n\n".join([*intro, *shown, *trees]) + "\n"


def _introduction(book: Book) -> list[str]:
    """Return the name of the package and its docstring."""
    main = book.project.modules.get(book.project.name)
    if main is None:
        return [f"# {book.project.name}"]
    doc, link = book.doc(main), book.names.linker(main)
    example = [code(doc.texts["example"])] if "example" in doc.texts else []
    return [f"# {book.project.name}", inline(doc.summary, link), markdown(doc.body, link), *example]


def _line(book: Book, document: str) -> str:
    """Return a document's entry on the start page."""
    name = document.removeprefix("modules/")
    if name not in book.project.page_of:
        return f"- {{doc}}`/{document}`"
    page = book.project.page_of[name]
    summary = inline(book.doc(page.main).summary or "No docstring.", book.names.linker(page.main))
    return f"- {{doc}}`{book.short(name)} </{document}>`: {summary}"


def _contents(book: Book) -> dict[str, list[str]]:
    """Return the documents of the site by heading."""
    pages = [
        path.relative_to(book.project.root).as_posix() for path in book.relations.pages if book.project.root
    ]
    documents = [document_of(path) for path in pages]
    guides = [document for document in documents if "/guides/" in document]
    folders = [document for document in documents if document.startswith("docs/") and document not in guides]
    design = [document for document in folders if "/design/" in document]
    public = [page.document for page in book.project.pages if not page.internal]
    internal = [page.document for page in book.project.pages if page.internal]
    loose = [document for document in documents if "/" not in document and document != "index"]
    return {
        "Guides": _in_reading_order(book, guides),
        "Subjects": _in_reading_order(book, [document for document in folders if document not in design]),
        "Public modules": public,
        "Internal modules": internal,
        "Project": [*loose, *design, "keywords"],
    }


def _in_reading_order(book: Book, documents: list[str]) -> list[str]:
    """Return documents by folder, in the order in which the folder's README links to them."""

    def place(document: str) -> tuple[str, int, str]:
        folder, _, name = document.rpartition("/")
        readme = (book.project.root or Path()) / folder / "README.md"
        text = readme.read_text(encoding="utf-8") if readme.exists() else ""
        found = text.find(f"({name}.md)")
        return folder, -1 if name == "README" else found if found >= 0 else len(text), name

    return sorted(documents, key=place)


def _toctree(book: Book, title: str, documents: list[str]) -> str:
    shorter = {page.document: book.short(page.name) for page in book.project.pages}
    listed = "\n".join(
        f"{shorter[document]} </{document}>" if document in shorter else f"/{document}"
        for document in documents
    )
    return f"```{{toctree}}\n:caption: {title}\n:maxdepth: 1\n:hidden:\n\n{listed}\n```"


def keyword_page(found: list[Keyword]) -> str:
    """Return the keyword index of the whole site, by letter."""
    letters: dict[str, list[Keyword]] = {}
    for keyword in found:
        letters.setdefault(keyword.word[:1].upper() if keyword.word[:1].isalpha() else "Other", []).append(
            keyword
        )
    parts = [
        "# Keyword index",
        "Every function, class, parameter, import and concept, and where it is explained.",
    ]
    for letter, held in sorted(letters.items()):
        parts += [f"## {letter}", f"```{{raw}} html\n{as_list(held, '')}\n```"]
    return "\n\n".join(parts) + "\n"


def llms_text(book: Book) -> str:
    """Return `llms.txt`: the site's pages with one line each, for assistants."""
    project = book.project
    main = project.modules.get(project.name)
    lines = [f"# {project.name}", "", f"> {book.doc(main).summary if main else project.name}", ""]
    lines += ["Machine-readable keyword index: keywords.json", ""]
    if book.relations.pages and project.root:
        lines.append("## Pages")
        for path in book.relations.pages:
            document = document_of(path.relative_to(project.root).as_posix())
            title = re.search(r"^# (.*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
            lines.append(f"- [{title[1] if title else document}]({document}.html)")
        lines.append("")
    for heading, internal in (("Public modules", False), ("Internal modules", True)):
        shown = [page for page in project.pages if page.internal == internal]
        if shown:
            lines.append(f"## {heading}")
            lines += [
                f"- [{page.name}]({page.document}.html): {book.doc(page.main).summary}" for page in shown
            ]
            lines.append("")
    return "\n".join(lines)
