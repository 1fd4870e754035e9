"""The input of every section of a page: the package, the files around it, and links between pages."""

import re
from dataclasses import dataclass
from functools import cached_property
from html import escape

from repopages.pages.names import Names
from repopages.reading.docstrings import Docstring, parse
from repopages.reading.project import Entry, Page, Project
from repopages.reading.relations import Relations, Text
from repopages.reading.source import Item, Module

_REPLACES = re.compile(r"(?:Drop-in replacement for|Replaces) `(?P<name>[\w.]+)`")


@dataclass(frozen=True, eq=False)
class Book:
    """The material of a site.

    Args:
        project: The package to document.
    """

    project: Project

    @cached_property
    def relations(self) -> Relations:
        """Tests, benchmarks, examples and pages around the package."""
        return Relations(self.project)

    @cached_property
    def names(self) -> Names:
        """All names that can be linked."""
        return Names(self.project)

    @cached_property
    def _docs(self) -> dict[str, Docstring]:
        return {name: parse(module.doc) for name, module in self.project.modules.items()}

    def doc(self, module: Module) -> Docstring:
        """Return a module's docstring in parts."""
        return self._docs[module.name]

    def entries(self, page: Page) -> list[Entry]:
        """Return the public names that a page documents."""
        return [entry for module in page.modules for entry in self.project.entries_of[module.name]]

    def other_items(self, module: Module) -> list[Item]:
        """Return functions and classes of a module that are not public."""
        public = {entry.item.name for entry in self.project.entries_of[module.name]}
        return [item for item in module.items if item.name not in public and item.kind != "data"]

    def page_link(self, module: str) -> str:
        """Return a Markdown link from one module's page to another's."""
        page = self.project.page_of[module]
        return f"[`{self.short(module)}`]({page.name}.md)"

    def short(self, module: str) -> str:
        """Return a module's name without that of the package."""
        return module.removeprefix(f"{self.project.name}.")

    def source_link(self, module: Module, text: str, line: int = 0) -> str:
        """Return an HTML link from a module's page to a line of source."""
        anchor = f"#L-{line}" if line else ""
        shown = re.sub(r"([_*\[\]])", r"\\\1", escape(text))  # Markdown is read inside inline HTML too
        href = f"../source/{module.name}.html{anchor}"
        return f'<a href="{href}"><code class="docutils literal">{shown}</code></a>'

    def text_link(self, text: Text) -> str:
        """Return a Markdown link from a module's page to a section of another page."""
        anchor = f"#{text.anchor}" if text.anchor else ""
        title = re.sub(r"([\[\]<>*_`])", r"\\\1", text.title)
        return f"[{title}](/{text.document}.md{anchor})"

    def replaced(self, module: Module) -> str | None:
        """Return the module that this one is a drop-in replacement for, if its docstring says so."""
        found = _REPLACES.match(self.doc(module).summary)
        return found["name"] if found else None

    def neighbours(self, page: Page) -> tuple[set[str], set[str]]:
        """Return the names of the pages whose modules import this page's, and of those imported by it."""
        importers, imported = set(), set()
        for module in page.modules:
            importers |= {
                self.project.page_of[importer].name for importer in self.project.importers[module.name]
            }
            imported |= {self.project.page_of[target].name for target in self.project.imports[module.name]}
        return importers - {page.name}, imported - {page.name}


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *([_cell(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    return re.sub(r"(?<!\\)\|", r"\\|", " ".join(text.split()))


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: "1 line", "2 lines"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
