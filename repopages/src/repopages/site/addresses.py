"""Addresses on the site: which page shows a file, a folder or a document, and where a document's link leads.

index              the README
documents          the list of all documents
documents/PATH     a Markdown document of the repository, without `.md`
files/PATH_docs    the page of a file, with files/FOLDER/index and files/FOLDER/doc for a folder
keywords/…         the keyword index
_pictures/PATH     pictures that documents show
"""

import posixpath
import re
from functools import cached_property
from urllib.parse import quote, unquote

from repopages.reading.model import Facts
from repopages.relations.library import Library
from repopages.site.inert import SCHEMES, scheme

START, DOCUMENTS, FILES, PICTURES = "index", "documents", "files", "_pictures"
_PICTURES = (".png", ".jpg", ".jpeg", ".gif", ".webp", ".svg")


class Site:
    """The pages of a site and the links between them.

    Args:
        library: The repository.
    """

    def __init__(self, library: Library) -> None:
        self.library = library

    @cached_property
    def documents(self) -> dict[str, str]:
        """The page of each Markdown document, by the document's path, in reading order."""
        found = [facts for facts in self.library.files.values() if facts.language == "Markdown" and facts.text]
        ordered = sorted(found, key=self._reading_order)
        return {facts.path: document_page(facts.path) for facts in ordered}

    @cached_property
    def document_of(self) -> dict[str, str]:
        """The path of the document that a page shows."""
        return {page: path for path, page in self.documents.items()}

    def _reading_order(self, facts: Facts) -> tuple[str, int, str]:
        """Order documents by folder, README first, then as the folder's README links to them."""
        order = self._link_order.get(facts.folder, {})
        readme = facts.name.lower() == "readme.md"
        return facts.folder, -1 if readme else order.get(facts.path, len(order)), facts.path

    @cached_property
    def _link_order(self) -> dict[str, dict[str, int]]:
        orders = {}
        for facts in self.library.files.values():
            if facts.name.lower() == "readme.md":
                targets = [path_of(facts.path, target) for target, _ in facts.links]
                orders[facts.folder] = {path: place for place, path in reversed(list(enumerate(targets)))}
        return orders

    def link(self, page: str, target: str) -> str | None:
        """Return the address of a link, as a page spells it, or None if it leads to nothing on the site.

        Args:
            page: The page with the link. On a document, links are those of the repository; on other pages,
                which repopages wrote, they are final.
            target: The address as written.
        """
        if target.startswith("//"):
            target = f"https:{target}"
        if scheme(target):
            return target if scheme(target) in SCHEMES else None
        if page not in self.document_of or target.startswith("#"):
            return target
        path = path_of(self.document_of[page], target)
        fragment = target.partition("#")[2]
        if path in self.documents:
            return relative(page, self.documents[path], fragment)
        if path in self.library.files:
            line = re.match(r"L(\d+)", fragment)
            return relative(page, file_page(path), f"L-{line[1]}" if line else "")
        return relative(page, folder_page(path)) if path in self.library.folders else None

    def picture(self, page: str, target: str) -> str | None:
        """Return the path of a picture in the repository, or None if it is not one that a document shows."""
        path = path_of(self.document_of.get(page, ""), target)
        return path if path in self.library.files and path.lower().endswith(_PICTURES) else None


def path_of(document: str, target: str) -> str:
    """Return the path in the repository that a document's link leads to. `..` leads out of the repository."""
    there = unquote(re.split(r"[?#]", target, maxsplit=1)[0])
    joined = there.lstrip("/") if there.startswith("/") else posixpath.join(posixpath.dirname(document), there)
    path = posixpath.normpath(joined)
    return "" if path == "." else path


def document_page(path: str) -> str:
    """Return the page of a Markdown document."""
    if path == "README.md":
        return START
    return f"{DOCUMENTS}/{path.removesuffix('.md')}"


def file_page(path: str) -> str:
    """Return the page of a file."""
    return f"{FILES}/{path}_docs"


def folder_page(path: str) -> str:
    """Return the index of a folder."""
    return f"{FILES}/{path}/index" if path else f"{FILES}/index"


def relative(page: str, target: str, fragment: str = "", suffix: str = ".html") -> str:
    """Return the address of a page or file, as another page spells it."""
    address = quote(posixpath.relpath(target, posixpath.dirname(page) or ".").encode(errors="surrogateescape"))
    return f"{address}{suffix}#{fragment}" if fragment else f"{address}{suffix}"
