"""The start page and the documents of the repository, written where Sphinx reads them."""

import hashlib
from pathlib import Path

from repopages.pages.addresses import relative
from repopages.pages.book import Book
from repopages.pages.folders import FolderPage, structure
from repopages.pages.markup import code, escape, link
from repopages.site.addresses import DOCUMENTS, START, Site


def write_documents(site: Site, folder: Path) -> None:
    """Write the start page, the list of documents, and each Markdown document of the repository.

    A file is written only if it changed, because Sphinx reads a file again that is newer than its page.

    Args:
        site: The pages of the site.
        folder: Where Sphinx reads.
    """
    # Links of documents lead to files: a document is read again if a file came or went.
    paths = "\n".join(sorted(site.library.files)).encode(errors="replace")
    mark = f"\n\n<!-- {hashlib.sha256(paths).hexdigest()[:16]} -->\n"
    texts = {page: site.library.files[path].text + mark for path, page in site.documents.items()}
    texts[DOCUMENTS] = _list(site)
    texts.setdefault(START, f"# {escape(site.library.name)}\n\n{_introduction(site)}\n")
    for page, text in texts.items():
        file, data = folder / f"{page}.md", text.encode(errors="replace")
        if not file.exists() or file.read_bytes() != data:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
    for file in (folder / DOCUMENTS).rglob("*.md"):
        if file.relative_to(folder).as_posix().removesuffix(".md") not in texts:
            file.unlink()


def _introduction(site: Site) -> str:
    """Return the start page of a repository without a README in Markdown."""
    readmes = [path for path in site.library.folders[""].files if path.lower().startswith("readme")]
    links = [
        link(code(path), relative(START, f"{page}.html"))
        for page, path in site.file_of.items()
        if path in readmes
    ]
    said = f"Its README is {', '.join(links)}." if links else "It has no README. Its files:"
    return f"{said}\n\n{structure(FolderPage(Book(site.library, site.dialect), '', START))}"


def _list(site: Site) -> str:
    """Return the list of all documents, by folder."""
    parts, folder = ["# All documents"], None
    for path, page in site.documents.items():
        facts = site.library.files[path]
        if facts.folder != folder:
            folder = facts.folder
            parts.append(f"## {code(f'{folder}/')}" if folder else f"## {escape(site.library.name)}")
        shown = escape(facts.title or facts.name)
        parts.append(f"- {link(shown, relative(DOCUMENTS, f'{page}.html'))} {code(facts.name)}")
    if not site.documents:
        parts.append("The repository has no Markdown files.")
    return "\n\n".join(parts) + "\n"
