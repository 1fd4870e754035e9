"""Definitions as objects of Sphinx: search results of their own, and entries of `objects.inv`.

Python's public names are objects of the `py` domain, so that other projects link to them through intersphinx.
Definitions of other languages are objects of the domain here.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from sphinx.domains import Domain, ObjType
from sphinx.environment import BuildEnvironment

from repopages.reading.model import Facts
from repopages.relations.library import Library

_KINDS = re.findall(
    r"\w+",
    """class concept constant enum exception function interface kernel macro member method module namespace
    object property struct trait type union variable""",
)
_PYTHON = {
    "function": "function",
    "class": "class",
    "enum": "class",
    "exception": "exception",
    "method": "method",
    "property": "property",
    "attribute": "attribute",
    "member": "attribute",
    "constant": "data",
    "variable": "data",
    "type": "type",
}


class Definitions(Domain):
    """Definitions of languages that Sphinx has no simple domain for, by page."""

    name = "source"
    label = "source"
    object_types: ClassVar[dict[str, Any]] = {kind: ObjType(kind) for kind in _KINDS}
    initial_data: ClassVar[dict[str, Any]] = {"found": {}}
    data_version = 1

    def note(self, page: str, found: list[tuple[str, str]]) -> None:
        """Keep the definitions of a page: dotted name in the file and kind."""
        self.data["found"][page] = found

    def clear_doc(self, docname: str) -> None:
        """Forget a page."""
        self.data["found"].pop(docname, None)

    def merge_domaindata(self, docnames: Iterable[str], otherdata: dict[str, Any]) -> None:
        """Take over what another process read."""
        self.data["found"].update(
            {page: found for page, found in otherdata["found"].items() if page in docnames}
        )

    def get_objects(self) -> Iterator[tuple[str, str, str, str, str, int]]:
        """Yield all definitions as Sphinx expects them."""
        for page, found in self.data["found"].items():
            for name, kind in found:
                yield name, name, kind, page, name, 1


def note_definitions(env: BuildEnvironment, library: Library, facts: Facts) -> None:
    """Register the definitions of a file, which has just been read.

    A name that another file has already is left out: Sphinx would warn of it. So is a name that is no text,
    because of the name of its file.
    """
    python = env.get_domain("py")
    if facts.language == "Python":
        module = library.module(facts.path)
        if module.isprintable() and module and module not in python.modules:
            python.note_module(module, "purpose", "", "", False)
        for name, anchor, kind in _python_names(library, facts):
            if name.isprintable() and name not in python.objects:
                python.note_object(name, kind, anchor)
        return
    found = [(name, item.kind) for name, item in facts.walk() if item.kind in _KINDS and item.public]
    env.get_domain("source").note(env.docname, list(dict.fromkeys(found)))


def _python_names(library: Library, facts: Facts) -> Iterator[tuple[str, str, str]]:
    """Yield the name to import, the anchor and the kind of public definitions and of their public members."""
    for public, anchor, item in library.public(facts.path):
        for dotted, member in item.walk():
            inside = dotted.split(".")[1:]
            if member.kind in _PYTHON and not any(name.startswith("_") for name in inside):
                yield ".".join([public, *inside]), ".".join([anchor, *inside]), _PYTHON[member.kind]
