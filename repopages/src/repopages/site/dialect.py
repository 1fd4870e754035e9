"""The site as an output of pages: links end in `.html`, and placeholders stand for listings and drawings."""

from dataclasses import dataclass

from repopages.pages.addresses import document_page, file_page, relative
from repopages.pages.dialect import Graph
from repopages.reading.model import Facts
from repopages.relations.library import Library

SOURCE = "<!--repopages:source-->"
GRAPH = "<!--repopages:graph-->"


def is_document(facts: Facts) -> bool:
    """Return whether a file is a document that the site shows to be read."""
    return facts.language == "Markdown" and bool(facts.text)


@dataclass(frozen=True, eq=False)
class SiteDialect:
    """Markdown that Sphinx reads.

    Args:
        library: The files.
    """

    library: Library
    name: str = "site"
    suffix: str = ".html"
    top: str = "files/"
    keyword_pages: bool = False
    trail: bool = False

    def listing(self, facts: Facts) -> str:
        """Return a placeholder: a listing does not pass through docutils."""
        return SOURCE

    def line(self, here: str, facts: Facts, line: int) -> str:
        """Return a link to a line on the file's page."""
        there = self.top + file_page(facts.path)
        return relative(here, "" if there == here else there + self.suffix, f"L-{line}")

    def section(self, here: str, path: str, anchor: str) -> str:
        """Return a link to a heading of a document that the site shows."""
        shown = is_document(self.library.files[path])
        return relative(here, document_page(path) + self.suffix, anchor) if shown else ""

    def drawing(self, graph: Graph) -> str:
        """Return a placeholder: a drawing does not pass through docutils."""
        return GRAPH
