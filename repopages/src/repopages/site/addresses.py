"""The pages of the site, and where a link in a document of the repository leads.

index            the README
documents        the list of all documents
documents/…      a Markdown document of the repository
files/…          the pages of files and folders, and keywords, keywords/… the keyword index
_pictures/…      pictures that documents show
"""

import posixpath
import re
from functools import cached_property
from urllib.parse import unquote

from repopages.pages.addresses import document_page, file_page, folder_index, folder_page, relative
from repopages.reading.model import Facts
from repopages.relations.library import Library
from repopages.site.dialect import SiteDialect, is_document
from repopages.site.inert import SCHEMES, scheme

START, DOCUMENTS, PICTURES = "index", "documents", "_pictures"
_PICTURES = (".png", ".jpg", ".jpeg", ".gif", ".webp", ".svg")


class Site:
    """The pages of a site and the links between them.

    Args:
        library: The repository.
    """

    def __init__(self, library: Library) -> None:
        self.library = library
        self.dialect = SiteDialect(library)
        top = self.dialect.top
        self.file_of = {top + file_page(path): path for path in library.files}
        self.folder_of = {
            top + address(path): path for path in library.folders for address in (folder_index, folder_page)
        }

    @cached_property
    def documents(self) -> dict[str, str]:
        """The page of each Markdown document, by the document's path, in reading order."""
        found = sorted(filter(is_document, self.library.files.values()), key=self._reading_order)
        pages: dict[str, str] = {}
        for facts in found:  # README.md and Readme.md cannot both be the start page
            page = document_page(facts.path)
            if page not in pages.values():
                pages[facts.path] = page
        return pages

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
            page: The page with the link. On a document, links are those of the repository. On other pages,
                which repopages wrote, they are final.
            target: The address as written.
        """
        if target.startswith("//"):
            target = f"https:{target}"
        if scheme(target):
            return target if scheme(target) in SCHEMES else None
        if page not in self.document_of:
            return target
        path = self.document_of[page] if target.startswith("#") else path_of(self.document_of[page], target)
        fragment = unquote(target.partition("#")[2])
        if path in self.documents:
            there = "" if path == self.document_of[page] else f"{self.documents[path]}.html"
            return relative(page, there, self._heading(path, fragment)) or "#"
        if path in self.library.files:
            line = re.match(r"L(\d+)", fragment)
            there = f"{self.dialect.top}{file_page(path)}.html"
            return relative(page, there, f"L-{line[1]}" if line else "")
        if path in self.library.folders:
            return relative(page, f"{self.dialect.top}{folder_index(path)}.html")
        return None

    def _heading(self, path: str, fragment: str) -> str:
        """Return the anchor of a heading as it is written there. GitHub finds `#Install` too."""
        anchors = {section.anchor for section in self.library.files[path].sections}
        return fragment.lower() if fragment not in anchors and fragment.lower() in anchors else fragment

    def picture(self, page: str, target: str) -> str | None:
        """Return the path of a picture in the repository, or None if it is not one that a document shows."""
        path = path_of(self.document_of.get(page, ""), target)
        facts = self.library.files.get(path) if path.lower().endswith(_PICTURES) else None
        return path if facts and facts.size else None  # links and pipes have no size, and may lead elsewhere


def path_of(document: str, target: str) -> str:
    """Return the path in the repository that a document's link leads to, or one that begins with `..`."""
    there = unquote(re.split(r"[?#]", target, maxsplit=1)[0])
    joined = (
        there.lstrip("/") if there.startswith("/") else posixpath.join(posixpath.dirname(document), there)
    )
    path = posixpath.normpath(joined)
    return "" if path == "." else path
