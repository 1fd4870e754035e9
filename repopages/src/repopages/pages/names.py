"""Links from a name in a docstring to the place where the site explains it."""

import re

from repopages.reading.docstrings import Link
from repopages.reading.project import Entry, Project
from repopages.reading.source import Item, Module

_NAME = re.compile(r"(?P<name>[A-Za-z_][\w.]*)(?P<call>\([^<>`]*\))?$")


class Names:
    """All names that the site explains.

    Args:
        project: The package.
    """

    def __init__(self, project: Project) -> None:
        self._project = project
        self._by_canonical = {entry.canonical: entry for entry in project.entries}
        self._targets: set[str] = set()
        self._short: dict[str, set[str]] = {}
        for entry in project.entries:
            self._targets.add(entry.name)
            self._short.setdefault(entry.item.name, set()).add(entry.name)
            self._targets |= {f"{entry.name}.{member.name}" for member in members_shown(entry)}

    def public(self, name: str) -> str | None:
        """Return the full name of a public object that a page names with or without the package, or None."""
        return next((full for full in (name, f"{self._project.name}.{name}") if full in self._targets), None)

    def unique(self, short: str) -> str | None:
        """Return the full name of the only public object called `short`, or None."""
        found = self._short.get(short.rpartition(".")[2], set())
        return next(iter(found)) if len(found) == 1 else None

    def linker(self, module: Module, entry: Entry | None = None) -> Link:
        """Return a function that links the code spans of a docstring.

        Args:
            module: The module that contains the docstring.
            entry: The public object that it documents, whose own parameters are not links.
        """
        own = set(entry.item.parameters) if entry else set()
        for member in entry.item.members if entry else ():
            own |= {member.name} if member.kind == "attribute" else set(member.parameters)

        def link(code: str) -> str:
            found = _NAME.match(code)
            name = found["name"] if found else ""
            if found and name not in own and (entry is None or name != entry.item.name):
                page = self._project.page_of.get(name)
                target = self._find(name, module, entry)
                if target:
                    return f"{{py:obj}}`{code} <{target}>`"
                if page and page.name == name:
                    return f"{{doc}}`{code} </{page.document}>`"
            return literal(code)

        return link

    def _find(self, name: str, module: Module, entry: Entry | None) -> str | None:
        # Tried in turn: a member of the object itself, what its module imports or defines, names elsewhere.
        first, _, rest = name.partition(".")
        dotted = f"{module.imported[first]}.{rest}".rstrip(".") if first in module.imported else ""
        behind = self._project.resolve(dotted) if dotted else None
        canonical = f"{behind[0].name}.{behind[1].name}" if behind else f"{module.name}.{name}"
        known = self._by_canonical.get(canonical)
        tried = [f"{entry.name}.{name}" if entry else "", known.name if known else "", name]
        tried += [f"{self._project.name}.{name}"]
        target = next((name for name in tried if name in self._targets), None)
        return target or (self.unique(name) if "." not in name else None)


def members_shown(entry: Entry) -> list[Item]:
    """Return the members of a class that its page documents: public ones with a docstring."""
    return [
        member
        for member in entry.item.members
        if member.public and member.doc and (not member.name.startswith("__") or member.name == "__call__")
    ]


def literal(code: str) -> str:
    """Return a code span, which may contain backticks."""
    ticks = "`" * (1 + max((len(run) for run in re.findall(r"`+", code)), default=0))
    pad = " " if code.startswith("`") or code.endswith("`") else ""
    return f"{ticks}{pad}{code}{pad}{ticks}"
