"""The differences between the two outputs: Markdown for GitHub, and Markdown that the site is made of."""

import re
from dataclasses import dataclass
from typing import Protocol

from repopages.pages.addresses import relative
from repopages.pages.markup import fenced
from repopages.reading.model import Facts


@dataclass(frozen=True, kw_only=True)
class Graph:
    """The neighbours of a file or a folder, to be drawn.

    Attributes:
        path: The file, or the folder with a "/" at its end.
        name: Its label.
        left: Label and link of each that imports it.
        right: Label and link of each that it imports.
    """

    path: str
    name: str
    left: tuple[tuple[str, str], ...]
    right: tuple[tuple[str, str], ...]


class Dialect(Protocol):
    """What a renderer of pages has to know of its output."""

    @property
    def name(self) -> str:
        """Name of the output. Pages are rendered again if it changes."""

    @property
    def suffix(self) -> str:
        """Suffix of pages in links: ".md" or ".html"."""

    @property
    def top(self) -> str:
        """Folder of the pages of files and folders in the output: "" or "files/"."""

    @property
    def keyword_pages(self) -> bool:
        """Whether the keywords of a file have a page, instead of a section at the end of the file's page."""

    @property
    def trail(self) -> bool:
        """Whether pages begin with links to the folders above them."""

    def listing(self, facts: Facts) -> str:
        """Return the source of a file as a block, or a placeholder for it."""

    def line(self, here: str, facts: Facts, line: int) -> str:
        """Return a link to a line of a file, or an empty text if lines have no address.

        Args:
            here: Address of the page with the link, from the top of the output.
            facts: The file.
            line: Its line.
        """

    def section(self, here: str, path: str, anchor: str) -> str:
        """Return a link to a heading of a document that can be read in this output, or an empty text.

        Args:
            here: Address of the page with the link, from the top of the output.
            path: The document.
            anchor: Anchor of the heading, as GitHub makes it. Empty for the top.
        """

    def drawing(self, graph: Graph) -> str:
        """Return a drawing of the neighbours as a block, or a placeholder for it."""


@dataclass(frozen=True, kw_only=True)
class GitHub:
    """Markdown as GitHub shows it.

    Args:
        root: Path from the top of the output to the root of the repository, such as "..", if the output lies
            in the repository: then lines and documents are linked. Empty otherwise.
    """

    root: str = ""
    suffix: str = ".md"
    top: str = ""
    keyword_pages: bool = True
    trail: bool = True

    @property
    def name(self) -> str:
        """Name of the output."""
        return f"github {self.root}"

    def listing(self, facts: Facts) -> str:
        """Return the source as a fenced block."""
        return fenced(facts.text.rstrip("\n"), re.sub(r"[^\w+#.-]", "", facts.lexer))

    def line(self, here: str, facts: Facts, line: int) -> str:
        """Return a link to a line on GitHub."""
        # `plain=1` shows a document's text, which has lines, instead of the rendered document.
        plain = "?plain=1" if facts.role == "document" else ""
        return f"{relative(here, f'{self.root}/{facts.path}')}{plain}#L{line}" if self.root else ""

    def section(self, here: str, path: str, anchor: str) -> str:
        """Return a link to a heading of the repository's document."""
        return relative(here, f"{self.root}/{path}", anchor) if self.root else ""

    def drawing(self, graph: Graph) -> str:
        """Return a Mermaid diagram, which GitHub draws."""
        lines = ["graph LR", f"  here[{_label(graph.name)}]", "  style here stroke-width:3px"]
        lines += [f"  a{number}[{_label(label)}] --> here" for number, (label, _) in enumerate(graph.left)]
        lines += [f"  here --> b{number}[{_label(label)}]" for number, (label, _) in enumerate(graph.right)]
        return fenced("\n".join(lines), "mermaid")


def _label(text: str) -> str:
    """Return a label as Mermaid reads it. Anything but plain characters becomes an entity."""
    return '"' + re.sub(r"[^\w./ -]", lambda found: f"#{ord(found[0])};", text) + '"'
