"""Python modules of a repository: their names, what an import leads to, and which names are public."""

import sys
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

from repopages.reading.model import Facts, Import, Item

_SUFFIXES = (".py", ".pyi", ".pyx", ".pyw")
_SOURCE_ROOTS = {"src", "lib", "Lib", "python"}
"""Names of folders that contain packages and are none themselves."""

LONGEST = 400
"""Characters of a name that is looked for. The cost of a dotted name is quadratic in its parts."""

_DEEPEST = 20
"""Re-exports and base classes that are followed, one behind the other."""


class Found(NamedTuple):
    """What a name refers to.

    Args:
        path: The file.
        name: Dotted name in the file, empty for the file itself.
        item: The definition, None for the file itself.
    """

    path: str
    name: str = ""
    item: Item | None = None


class Modules:
    """The Python modules of a repository.

    Args:
        files: Facts of all files, by path.
        prefix: Dotted name of the package that the root is, empty if it is none.
    """

    def __init__(self, files: Mapping[str, Facts], prefix: str = "") -> None:
        self._files = {
            path: facts
            for path, facts in files.items()
            if facts.language == "Python" or path.endswith(_SUFFIXES[1:])
        }
        self._prefix = prefix
        self._packages = {facts.folder for facts in self._files.values() if facts.name in _INITS}
        if prefix:
            self._packages.add("")

    # Names ----------------------------------------------------------------------------------------

    @cached_property
    def names(self) -> dict[str, str]:
        """The dotted name of every module, by path."""
        bases: dict[str, str] = {}
        found = {}
        for path, facts in self._files.items():
            if facts.folder not in bases:
                bases[facts.folder] = self._folder_name(facts.folder)
            stem = facts.name.partition(".")[0]
            parts = [bases[facts.folder], "" if stem == "__init__" else stem]
            found[path] = ".".join(part for part in parts if part)
        return found

    def _folder_name(self, folder: str) -> str:
        """Return the dotted name of a folder: empty for one whose modules are imported by their own names."""
        outer = self._outside(folder)
        inner = folder[len(outer) :].strip("/").split("/") if folder != outer else []
        start = [self._prefix] if self._prefix else self._namespace(outer, inner[0] if inner else "")
        return ".".join([*start, *inner])

    def _outside(self, folder: str) -> str:
        """Return the folder around the package of a folder, which Python would have on `sys.path`.

        Every folder in a package is importable, as a namespace if it has no `__init__.py`.
        """
        if self._prefix:
            return ""
        parts = folder.split("/") if folder else []
        for count in range(1, len(parts) + 1):
            if "/".join(parts[:count]) in self._packages:
                return "/".join(parts[: count - 1])
        return folder

    def _namespace(self, folder: str, package: str) -> list[str]:
        """Return the parts of a folder without `__init__.py` by whose name its modules are imported.

        Nothing in such a folder says whether it is a namespace (google/cloud/) or only holds scripts. The
        imports of the repository do: the longest end of its path that any of them starts with, and that
        continues with one of its modules.
        """
        parts = folder.split("/") if folder else []
        # Nothing at or above `src/` is part of a name.
        start = max((place + 1 for place, part in enumerate(parts) if part in _SOURCE_ROOTS), default=0)
        inside = {package} if package else self._inside.get(folder, set())
        for place in range(start, len(parts)):
            dotted = ".".join(parts[place:])
            asked = dotted in self._asked and parts[place] not in sys.stdlib_module_names
            if asked and any(f"{dotted}.{name}" in self._asked for name in inside):
                return parts[place:]
        return []

    @cached_property
    def _inside(self) -> dict[str, set[str]]:
        """The modules and packages directly in each folder."""
        found: dict[str, set[str]] = {}
        for path in [*self._files, *self._packages]:
            folder, _, name = path.rpartition("/")
            found.setdefault(folder, set()).add(name.partition(".")[0])
        return found

    @cached_property
    def _asked(self) -> set[str]:
        """Every dotted name that a file of the repository imports, and those of the packages around it."""
        found: set[str] = set()
        for facts in self._files.values():
            for entry in facts.imports:
                dotted = f"{entry.module}.{entry.name}" if entry.name not in ("", "*") else entry.module
                while dotted and not entry.level and len(dotted) <= LONGEST and dotted not in found:
                    found.add(dotted)
                    dotted = dotted.rpartition(".")[0]
        return found

    @cached_property
    def _by_name(self) -> dict[str, list[str]]:
        """Files with each dotted name. Scripts in several folders may have the same."""
        found: dict[str, list[str]] = {}
        for path, name in self.names.items():
            found.setdefault(name, []).append(path)
        # A stub describes the module next to it: the module comes first.
        return {
            name: sorted(paths, key=lambda path: not path.endswith(".py")) for name, paths in found.items()
        }

    # Imports --------------------------------------------------------------------------------------

    def file(self, dotted: str, importer: str) -> str | None:
        """Return the file of an absolute module name as a file that imports it would find it, or None."""
        if not dotted or len(dotted) > LONGEST:
            return None
        base = self._outside(importer.rpartition("/")[0])
        known = self._at(base, dotted)
        top = dotted.partition(".")[0]
        if known is not None or (top in sys.stdlib_module_names and top != self._prefix.partition(".")[0]):
            # A script of the name of a standard module is only found by its neighbours.
            return known
        paths = [path for path in self._by_name.get(dotted, ())[:64] if "." in dotted or self._is_top(path)]
        if paths:
            return paths[0] if len(paths) == 1 else max(paths, key=lambda path: _common(path, importer))
        # pytest, and scripts that add their parents to `sys.path`: a module in a folder above.
        while base:
            base = base.rpartition("/")[0]
            known = self._at(base, dotted) if base not in self._packages else None
            if known is not None:
                return known
        return None

    def top(self, path: str) -> str | None:
        """Return the `__init__.py` of the outermost package around a module, or None if there is none."""
        folder = path.rpartition("/")[0]
        outer = self._outside(folder)
        if path not in self._files or (folder == outer and not self._prefix):
            return None
        depth = 0 if self._prefix else outer.count("/") + 1 + bool(outer)
        top = "/".join(folder.split("/")[:depth])
        return next((init for name in _INITS if (init := f"{top}/{name}".lstrip("/")) in self._files), None)

    def _is_top(self, path: str) -> bool:
        """Return whether a module without dots in its name can be meant by files of other folders."""
        folder = self._files[path].folder
        return folder in self._packages or not folder or folder.rpartition("/")[2] in _SOURCE_ROOTS

    def _at(self, base: str, dotted: str) -> str | None:
        if base in self._packages:
            return None
        stem = f"{base}/{dotted.replace('.', '/')}" if base else dotted.replace(".", "/")
        return self._file_of(stem)

    def _file_of(self, stem: str) -> str | None:
        tried = (*(f"{stem}{suffix}" for suffix in _SUFFIXES), *(f"{stem}/{name}" for name in _INITS))
        return next((path for path in tried if path in self._files), None)

    def module_of(self, entry: Import, importer: str) -> str | None:
        """Return the file of the module that an import names, or None if it is not of the repository."""
        if not entry.level:
            return self.file(entry.module, importer)
        folder = self._files[importer].folder
        for _ in range(entry.level - 1):
            if not folder:
                return None
            folder = folder.rpartition("/")[0]
        stem = "/".join(part for part in (folder, entry.module.replace(".", "/")) if part)
        if entry.module:
            return self._file_of(stem)
        return next(
            (path for name in _INITS if (path := f"{folder}/{name}".lstrip("/")) in self._files), None
        )

    def targets(self, entry: Import, importer: str) -> list[tuple[str, str]]:
        """Return the files that an import leads to: the module that it names, and where the name is defined.

        Returns:
            Pairs of a file and the file through which it is reached, empty if the import names it directly.
        """
        module = self.module_of(entry, importer)
        if entry.name in ("", "*"):
            return [(module, "")] if module else []
        submodule = self._submodule(entry, importer, module)
        if submodule is not None:
            return [(submodule, "")]
        if module is None:
            return []
        behind = self.resolve(module, entry.name)
        through = [(behind.path, module)] if behind and behind.path != module else []
        return [(module, ""), *through]

    def _submodule(self, entry: Import, importer: str, module: str | None) -> str | None:
        """Return the file that `from package import module` names, unless the package defines that name."""
        if module is not None:
            known = entry.name in self._items(module) or (
                module != importer and entry.name in self.imported(module)
            )
            if known or self._files[module].name not in _INITS:
                return None
            return self._file_of(f"{self._files[module].folder}/{entry.name}".lstrip("/"))
        # The package is a folder without `__init__.py`.
        if entry.level and not entry.module:
            folder = self._files[importer].folder
            for _ in range(entry.level - 1):
                folder = folder.rpartition("/")[0]
            return self._file_of(f"{folder}/{entry.name}".lstrip("/"))
        return self.module_of(Import(module=f"{entry.module}.{entry.name}", level=entry.level), importer)

    # Definitions ----------------------------------------------------------------------------------

    def _items(self, path: str) -> dict[str, Item]:
        found = self._items_of.get(path)
        if found is None:
            found = self._items_of[path] = {item.name: item for item in self._files[path].items}
        return found

    @cached_property
    def _items_of(self) -> dict[str, dict[str, Item]]:
        return {}

    def imported(self, path: str) -> dict[str, Import]:
        """Return the imports of a file by the local name, such as "a.b" for `import a.b`."""
        found = self._imported.get(path)
        if found is None:
            found = self._imported[path] = {}
            for entry in self._files[path].imports:
                # An import at the top is the one that users of the module see.
                known = found.get(entry.local)
                if entry.name != "*" and (known is None or (known.inside and not entry.inside)):
                    found[entry.local] = entry
        return found

    @cached_property
    def _imported(self) -> dict[str, dict[str, Import]]:
        return {}

    @cached_property
    def _resolved(self) -> dict[tuple[str, str], Found | None]:
        return {}

    def resolve(self, path: str, dotted: str, depth: int = _DEEPEST) -> Found | None:
        """Return the file and the definition behind a name of a module, through re-exports, or None.

        Args:
            path: The module's file.
            dotted: A name in it, with dots for members.
            depth: Re-exports that are followed.
        """
        key = path, dotted
        if key not in self._resolved:
            # While it is sought it leads nowhere, so that modules that re-export each other's names end.
            self._resolved[key] = None
            self._resolved[key] = self._resolve(path, dotted, depth)
        return self._resolved[key]

    def _resolve(self, path: str, dotted: str, depth: int) -> Found | None:
        name, _, rest = dotted.partition(".")
        item = self._items(path).get(name)
        # `x = None` before an import in `try` is a placeholder.
        if item is not None and not (item.kind in ("variable", "constant") and name in self.imported(path)):
            return self._member(Found(path, name, item), rest, depth)
        if not depth:
            return None
        entry, rest = self._import_of(path, name, rest)
        if entry is not None:
            return self._behind(entry, path, rest, depth)
        if self._files[path].name in _INITS:
            inner = self._file_of(f"{self._files[path].folder}/{name}".lstrip("/"))
            if inner is not None:
                return self.resolve(inner, rest, depth - 1) if rest else Found(inner)
        for star in self._files[path].imports:
            module = self.module_of(star, path) if star.name == "*" else None
            if module is not None and module != path and self._star_has(module, name):
                found = self.resolve(module, dotted, depth - 1)
                if found is not None:
                    return found
        return Found(path, name, item) if item is not None and not rest else None

    def _import_of(self, path: str, name: str, rest: str) -> tuple[Import | None, str]:
        """Return the import that binds a name, and the rest of the name behind it.

        `a.b.c` after `import a.b` is `c` in module `a.b`: the longest import that fits.
        """
        local = self.imported(path)
        parts = rest.split(".") if rest else []
        for count in range(len(parts), -1, -1):
            entry = local.get(".".join([name, *parts[:count]]))
            if entry is not None:
                return entry, ".".join(parts[count:])
        return None, rest

    def _behind(self, entry: Import, path: str, rest: str, depth: int) -> Found | None:
        module = self.module_of(entry, path)
        if entry.name:
            submodule = self._submodule(entry, path, module)
            if submodule is not None:
                return self.resolve(submodule, rest, depth - 1) if rest else Found(submodule)
            dotted = f"{entry.name}.{rest}" if rest else entry.name
            return self.resolve(module, dotted, depth - 1) if module is not None and module != path else None
        if module is None:
            return None
        return self.resolve(module, rest, depth - 1) if rest else Found(module)

    def _star_has(self, module: str, name: str) -> bool:
        exports = self._files[module].exports
        return name in exports if exports is not None else not name.startswith("_")

    def _member(self, owner: Found, rest: str, depth: int) -> Found | None:
        """Return a member of a definition, of its own or of a base class."""
        if not rest or owner.item is None:
            return owner
        name, _, deeper = rest.partition(".")
        for member in owner.item.members:
            if member.name == name:
                return self._member(Found(owner.path, f"{owner.name}.{name}", member), deeper, depth)
        for base in owner.item.bases if depth else ():
            found = self.resolve(owner.path, f"{base.partition('[')[0]}.{rest}", depth - 1)
            if found is not None:
                return found
        return None

    def dotted(self, name: str, importer: str) -> Found | None:
        """Return what an absolute dotted name refers to: the longest module in it, then a name in that."""
        if len(name) > LONGEST:
            return None
        level = len(name) - len(name.lstrip("."))
        if level:
            return self._relative(name[level:], level, importer)
        parts = name.split(".")
        for count in range(len(parts), 0, -1):
            path = self.file(".".join(parts[:count]), importer)
            if path is not None:
                rest = ".".join(parts[count:])
                return self.resolve(path, rest) if rest else Found(path)
        return None

    def _relative(self, name: str, level: int, importer: str) -> Found | None:
        parts = name.split(".")
        for count in range(len(parts), -1, -1):
            path = self.module_of(Import(module=".".join(parts[:count]), level=level), importer)
            if path is not None:
                rest = ".".join(parts[count:])
                return self.resolve(path, rest) if rest else Found(path)
        return None

    # Public names ---------------------------------------------------------------------------------

    @cached_property
    def public(self) -> dict[str, list[tuple[str, str, Item]]]:
        """The public definitions of each file: shortest public name, name in the file, definition."""
        names: dict[tuple[str, str], set[str]] = {}
        for path in self._files:
            for name in self._public_names(path):
                found = self.resolve(path, name)
                if found is not None and found.item is not None:
                    names.setdefault((found.path, found.name), set()).add(
                        f"{self.names[path]}.{name}".lstrip(".")
                    )
        made: dict[str, list[tuple[str, str, Item]]] = {}
        for (path, name), public in names.items():
            found = self.resolve(path, name)
            if found is not None and found.item is not None:
                # The name that users type: with the fewest dots, then the shortest.
                first = min(public, key=lambda text: (text.count("."), len(text), text))
                made.setdefault(path, []).append((first, name, found.item))
        return {path: sorted(held, key=lambda entry: entry[2].line) for path, held in made.items()}

    def _public_names(self, path: str) -> Iterator[str]:
        facts = self._files[path]
        if facts.role == "test":
            return
        if facts.exports:
            yield from facts.exports
            return
        # What a package does not export of the modules whose names it exports is internal.
        if _private(self.names[path]) or path in self._exported_from or facts.folder in self._facades:
            return
        for item in facts.items:
            if item.public and not item.name.startswith("__") and item.kind != "variable":
                yield item.name

    @cached_property
    def _facades(self) -> set[str]:
        """Folders of packages that export names of their modules."""
        return {folder for folder, _ in self._exports}

    @cached_property
    def _exported_from(self) -> set[str]:
        """Modules some of whose names are exported by another module."""
        return {path for _, path in self._exports}

    @cached_property
    def _exports(self) -> set[tuple[str, str]]:
        """Folders of packages, and files that define a name that the package has in `__all__`."""
        found = set()
        for path, facts in self._files.items():
            for name in (facts.exports or ()) if facts.name in _INITS else ():
                defined = self.resolve(path, name)
                if defined is not None and defined.item is not None and defined.path != path:
                    found.add((facts.folder, defined.path))
        return found


_INITS = ("__init__.py", "__init__.pyi")


def _private(name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def _common(path: str, other: str) -> int:
    """Return how many folders two paths share."""
    count = 0
    for one, two in zip(path.split("/")[:-1], other.split("/")[:-1], strict=False):
        if one != two:
            break
        count += 1
    return count
