"""All files of a repository and how they relate: imports, tests, examples, documents and public names."""

import builtins
import re
import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

from repopages.reading.cache import Progress, read_all
from repopages.reading.model import Facts, Import, Item, Section
from repopages.reading.repository import Repository
from repopages.relations.graph import Edge, Folder, Place, Use
from repopages.relations.imports import Imports
from repopages.relations.python import LONGEST, Modules
from repopages.relations.records import with_inherited_fields
from repopages.relations.uses import NAMED, Uses

__all__ = ["Edge", "Folder", "Library", "Place", "Use", "open_library"]

_BUILTINS = frozenset(dir(builtins))
_NAME = re.compile(r"~?[\w$]+(?:(?:\.|::|#|->)[\w$~]+)*")
_SPACES = ("namespace", "module", "package")
_MOST_RELATED = 6
"""Files that are related for the same reason."""


def open_library(
    path: str,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    jobs: int | None = None,
    progress: Progress | None = None,
) -> "Library":
    """Read a repository.

    Args:
        path: A folder, a single file, or the name of an installed Python package, which is not imported.
        include: Patterns as in `.gitignore`; with any, only files that match one are included.
        exclude: Patterns as in `.gitignore` of files and folders that are left out.
        jobs: Number of processes that read. By default, one for each core.
        progress: Called with "reading", the number of files done and of all, after every file.

    Returns:
        The library of all its files.

    Raises:
        OptionError: If there is no such folder, file or package, or a pattern is invalid.
    """
    repository = Repository.open(path, include, exclude)
    files = read_all(repository, jobs, progress)
    return Library(repository.root, repository.name, files, repository.prefix, repository.warnings)


class Library:
    """All files of a repository and how they relate.

    Args:
        root: The folder.
        name: Name of the repository.
        files: Facts of all files, by path.
        prefix: Dotted name of the Python package that the root is, empty if it is none.
        warnings: What could not be read, one sentence each.
    """

    def __init__(
        self,
        root: Path,
        name: str,
        files: dict[str, Facts],
        prefix: str = "",
        warnings: Iterable[str] = (),
    ) -> None:
        self.root = root
        self.name = name
        self.files = with_inherited_fields(files, prefix)
        self.prefix = prefix
        self.warnings = list(warnings)
        self.folders: dict[str, Folder] = _folders(files)
        self._modules = Modules(self.files, prefix)
        self._resolver = Imports(self.files, self.folders)

    # Imports and links ----------------------------------------------------------------------------

    def imports(self, path: str) -> list[Edge]:
        """Return the imports of `path` that lead to files of the repository, in the order of the file."""
        return self._imports.get(path, [])

    def importers(self, path: str) -> list[Edge]:
        """Return the imports of `path` by other files, by their paths."""
        return self._importers.get(path, [])

    def outside(self, path: str) -> dict[str, list[str]]:
        """Return what `path` imports from "standard library" and from "other packages", each sorted."""
        facts = self.files[path]
        found: dict[str, set[str]] = {}
        for entry in self._foreign.get(path, ()):
            if facts.language == "Python":
                package = self._python_package(entry.module) if not entry.level else None
            else:
                package = self._resolver.outside(entry, facts.language)
            if package is not None:
                found.setdefault("standard library" if package[1] else "other packages", set()).add(
                    package[0]
                )
        return {kind: sorted(found[kind]) for kind in ("standard library", "other packages") if kind in found}

    def links(self, path: str) -> list[Edge]:
        """Return the links of a document that lead to files of the repository, in the order of the file."""
        return self._links.get(path, [])

    def linked(self, path: str) -> list[Edge]:
        """Return the links to `path` in documents, by their paths."""
        return self._linked.get(path, [])

    def chain(self, path: str) -> list[str]:
        """Return the shortest chain of imports from the package's `__init__.py` to `path`, both included."""
        start = self._modules.top(path)
        if start is None or start == path:
            return []
        if start not in self._ways:
            self._ways[start] = self._ways_from(start)
        way, steps = path, self._ways[start]
        chain = [path]
        while way in steps:
            way = steps[way]
            chain.append(way)
        return chain[::-1] if chain[-1] == start else []

    # Uses -----------------------------------------------------------------------------------------

    def tests(self, path: str) -> list[Use]:
        """Return the test files that use `path`, or else those of the files that import it."""
        return self._uses.tests.get(path) or self._uses.behind(self.importers(path))

    def examples(self, path: str) -> list[Use]:
        """Return the example programs that use `path`, those that use it most first."""
        return self._uses.examples.get(path, [])

    def documents(self, path: str) -> list[tuple[str, Section]]:
        """Return sections that link to `path` or mention its distinctive names, the closest first."""
        return self._uses.documents.get(path, [])

    def related(self, path: str) -> list[tuple[str, str]]:
        """Return other files that a reader of `path` should know of, each once with the reason."""
        facts = self.files[path]
        documents = list(dict.fromkeys(document for document, _ in self.documents(path)))
        groups = [
            list(self._counterparts(facts)),
            [
                (use.path, "its test" if use.how == NAMED else "tests it")
                for use in self._uses.tests.get(path, ())
            ],
            [(edge.source, "imports it") for edge in self.importers(path)],
            [(edge.target, "imported by it") for edge in self.imports(path)],
            [(document, "describes it") for document in documents],
            [(edge.target, "linked by it") for edge in self.links(path) if edge.target in self.files],
            [(other, "same folder") for other in self._neighbours(facts)],
        ]
        found: dict[str, str] = {}
        for group in groups:
            fresh = [(other, why) for other, why in group if other != path and other not in found]
            found.update(dict(fresh[:_MOST_RELATED]))
        return list(found.items())

    # Names ----------------------------------------------------------------------------------------

    def module(self, path: str) -> str:
        """Return the absolute dotted name of a Python module, or an empty text."""
        return self._modules.names.get(path, "")

    def public(self, path: str) -> list[tuple[str, str, Item]]:
        """Return the public definitions of `path`: public name, dotted name in the file, definition."""
        return self._public.get(path, [])

    def find(self, name: str, path: str) -> Place | None:
        """Return what a name in `path` refers to: in its docstrings, signatures, bases or code spans.

        Args:
            name: The name, with dots (or `::`) for members, or the path of a file.
            path: The file that contains it.

        Returns:
            The definition or file in the repository, or None if it is none of it.
        """
        if name in self.files:
            return Place(path=name)
        if len(name) > LONGEST:
            return None
        clean = re.sub(r"\(.*\)$", "", name.strip(), flags=re.DOTALL).lstrip("~")
        if not _NAME.fullmatch(clean):
            linked = self._resolver.link(name, self.files[path]) if "/" in name else None
            return Place(path=linked) if linked in self.files else None
        dotted = re.sub(r"::|#|->", ".", clean)
        if path in self._modules.names:
            found = self._find_python(dotted, path)
            return found if found is not None or self._is_foreign(dotted, path) else self._unique(dotted)
        return self._find_plain(dotted, path) or self._unique(dotted)

    def _find_python(self, dotted: str, path: str) -> Place | None:
        modules = self._modules
        top = modules.names[path].partition(".")[0]
        found = modules.resolve(path, dotted) or (modules.dotted(dotted, path) if "." in dotted else None)
        if found is None and top and not dotted.startswith(f"{top}."):
            found = modules.dotted(f"{top}.{dotted}", path)
        return Place(path=found.path, name=found.name, item=found.item) if found is not None else None

    def _is_foreign(self, dotted: str, path: str) -> bool:
        """Return whether a name starts with one that the file imports from outside."""
        first = dotted.partition(".")[0]
        return first in self._modules.imported(path) or first in sys.stdlib_module_names

    def _find_plain(self, dotted: str, path: str) -> Place | None:
        """Return a definition of the file itself, or of a file that it imports."""
        for near in (path, *(edge.target for edge in self.imports(path))):
            item = self._definitions(near).get(dotted)
            if item is not None:
                return Place(path=near, name=dotted, item=item)
        return None

    def _definitions(self, path: str) -> dict[str, Item]:
        if path not in self._defined:
            self._defined[path] = dict(self.files[path].walk())
        return self._defined[path]

    def _unique(self, dotted: str) -> Place | None:
        """Return the only public definition of a name in the whole repository."""
        if dotted in _BUILTINS or len(dotted) < 3:
            return None
        return self._by_public_name.get(dotted)

    @cached_property
    def _by_public_name(self) -> dict[str, Place | None]:
        found: dict[str, Place | None] = {}
        for path, entries in self._public.items():
            for public, name, item in entries:
                place = Place(path=path, name=name, item=item)
                for known in {public, name, item.name}:
                    found[known] = place if known not in found else None
        return found

    # Indexes, each computed once ------------------------------------------------------------------

    @cached_property
    def _defined(self) -> dict[str, dict[str, Item]]:
        return {}

    @cached_property
    def _ways(self) -> dict[str, dict[str, str]]:
        return {}

    @cached_property
    def _uses(self) -> Uses:
        return Uses(self.files, self._modules, self._imports, self._links, self._public)

    @cached_property
    def _imports(self) -> dict[str, list[Edge]]:
        return self._resolved[0]

    @cached_property
    def _foreign(self) -> dict[str, list[Import]]:
        return self._resolved[1]

    @cached_property
    def _resolved(self) -> tuple[dict[str, list[Edge]], dict[str, list[Import]]]:
        """The imports of each file that lead to files of the repository, and the others."""
        found: dict[str, list[Edge]] = {}
        foreign: dict[str, list[Import]] = {}
        for path, facts in self.files.items():
            # Direct imports replace those through another file.
            held: dict[str, tuple[int, dict[str, None], str]] = {}
            for entry in facts.imports:
                names = {entry.name: None} if entry.name else {}
                if facts.language == "Python":
                    targets = self._modules.targets(entry, path)
                else:
                    targets = [(target, "") for target in self._resolver.targets(entry, facts)]
                if not targets:
                    foreign.setdefault(path, []).append(entry)
                for target, through in targets:
                    if target != path:
                        line, known, way = held.get(target, (entry.line, {}, through))
                        held[target] = (line, known | names, way and through)
            found[path] = [
                Edge(source=path, target=target, line=line, names=tuple(names), through=through)
                for target, (line, names, through) in held.items()
            ]
        return found, foreign

    @cached_property
    def _importers(self) -> dict[str, list[Edge]]:
        return _reversed(self._imports)

    @cached_property
    def _links(self) -> dict[str, list[Edge]]:
        found: dict[str, list[Edge]] = {}
        for path, facts in self.files.items():
            held: dict[str, Edge] = {}
            for written, line in facts.links:
                target = self._resolver.link(written, facts)
                if target is not None and target != path:
                    held.setdefault(target, Edge(source=path, target=target, line=line))
            if held:
                found[path] = list(held.values())
        return found

    @cached_property
    def _linked(self) -> dict[str, list[Edge]]:
        return _reversed(self._links)

    @cached_property
    def _public(self) -> dict[str, list[tuple[str, str, Item]]]:
        found = dict(self._modules.public)
        for path, facts in self.files.items():
            if facts.role == "source" and path not in self._modules.names:
                entries = [(name, name, item) for name, item in _public_items(facts)]
                if entries:
                    found[path] = entries
        return found

    @cached_property
    def _by_stem(self) -> dict[str, list[str]]:
        """Files of the same folder and name with another ending."""
        found: dict[str, list[str]] = {}
        for path in self.files:
            found.setdefault(path.rpartition(".")[0], []).append(path)
        return found

    def _ways_from(self, start: str) -> dict[str, str]:
        """Return for every file of a package the file that imports it on the shortest way from `start`."""
        base = self.files[start].folder
        inside = f"{base}/" if base else ""
        found: dict[str, str] = {}
        queue = deque([start])
        while queue:
            path = queue.popleft()
            for edge in self.imports(path):
                if edge.target not in found and edge.target != start and edge.target.startswith(inside):
                    found[edge.target] = path
                    queue.append(edge.target)
        return found

    # Small questions ------------------------------------------------------------------------------

    def _python_package(self, module: str) -> tuple[str, bool] | None:
        top = module.partition(".")[0]
        if not top:
            return None
        # Other modules of the package that the root is a part of are named in full.
        own = self.prefix and top == self.prefix.partition(".")[0]
        return (module if own else top), top in sys.stdlib_module_names and not own

    def _counterparts(self, facts: Facts) -> Iterable[tuple[str, str]]:
        """Yield the header of an implementation, the implementation of a header, the stub of a module."""
        stem, _, ending = facts.path.rpartition(".")
        for other in self._by_stem.get(stem, ()):
            end = other.rpartition(".")[2]
            if end == ending:
                continue
            if end in ("h", "hh", "hpp", "hxx", "cuh"):
                yield other, "its header"
            elif end in ("c", "cc", "cpp", "cxx", "cu", "m"):
                yield other, "its implementation"
            elif end == "pyi" or other.endswith(".d.ts"):
                yield other, "its stub"

    def _neighbours(self, facts: Facts) -> list[str]:
        """Return the files of the same folder and language, those with the most similar names first."""
        files = self.folders[facts.folder].files
        place = bisect_left(files, facts.path)
        near = files[max(0, place - 4 * _MOST_RELATED) : place + 4 * _MOST_RELATED]
        same = [other for other in near if self.files[other].language == facts.language]
        return sorted(same, key=lambda other: -_shared(facts.path, other))


def _reversed(edges: dict[str, list[Edge]]) -> dict[str, list[Edge]]:
    found: dict[str, list[Edge]] = {}
    for path in sorted(edges):
        for edge in edges[path]:
            found.setdefault(edge.target, []).append(edge)
    return found


def _public_items(facts: Facts) -> Iterable[tuple[str, Item]]:
    """Yield what a file of another language than Python offers to others, inside namespaces too."""
    stack = [(item.name, item) for item in reversed(facts.items)]
    while stack:
        name, item = stack.pop()
        if item.kind in _SPACES:
            stack += [(f"{name}.{member.name}", member) for member in reversed(item.members)]
        elif item.public and (facts.exports is None or name in facts.exports):
            yield name, item


def _shared(path: str, other: str) -> int:
    """Return the length of the common start of two paths."""
    return next((place for place, (a, b) in enumerate(zip(path, other, strict=False)) if a != b), len(path))


def _folders(files: dict[str, Facts]) -> dict[str, Folder]:
    inside: dict[str, tuple[set[str], list[str]]] = {"": (set(), [])}
    for path in sorted(files):
        folder = path.rpartition("/")[0]
        inside.setdefault(folder, (set(), []))[1].append(path)
        # A folder may contain folders only: enter it in each folder above, until one that is known.
        while folder:
            above = folder.rpartition("/")[0]
            known = above in inside
            inside.setdefault(above, (set(), []))[0].add(folder)
            folder = "" if known else above
    return {
        path: Folder(path=path, folders=tuple(sorted(folders)), files=tuple(held))
        for path, (folders, held) in sorted(inside.items())
    }
