"""The structure of a package's site: modules with a page, public names, and where they are documented."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from repopages.reading.source import Field, Item, Module, constructor, find_package, read_package

_CHECKOUT = ("pyproject.toml", "setup.py", "setup.cfg")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A public name.

    Attributes:
        name: The shortest name to import it by, such as `json.JSONDecoder`.
        canonical: The name under which it is defined, such as `json.decoder.JSONDecoder`.
        aliases: Its other public names.
        item: Its definition.
        module: The module that defines it.
    """

    name: str
    canonical: str
    aliases: tuple[str, ...]
    item: Item
    module: Module


@dataclass(frozen=True, kw_only=True, eq=False)
class Page:
    """A page of the site.

    Attributes:
        name: Dotted name of its module or package.
        modules: The module itself, then those that have no page of their own.
        internal: Whether it is the page of an internal package.
    """

    name: str
    modules: tuple[Module, ...]
    internal: bool

    @property
    def document(self) -> str:
        """Path of the page in the site, without a suffix."""
        return f"modules/{self.name}"

    @property
    def main(self) -> Module:
        """The module or package that the page is named after."""
        return self.modules[0]


@dataclass(frozen=True, eq=False)
class Project:
    """A package and its checkout.

    Args:
        folder: Folder of the package, or the file of a single module.
        modules: All of its modules, by name.
    """

    folder: Path
    modules: dict[str, Module] = field(repr=False)

    @classmethod
    def find(cls, name: str) -> "Project":
        """Return the package `name`: a checkout, the folder of a package, or the name of an installed one.

        Raises:
            OptionError: If there is no such package, or it has no Python source.
        """
        folder = find_package(name)
        read = cls(folder, {module.name: module for module in read_package(folder)})
        return cls(
            folder, {name: read._with_inherited_fields(module) for name, module in read.modules.items()}
        )

    def _with_inherited_fields(self, module: Module) -> Module:
        """Return a module whose dataclasses have the whole signature of their constructors."""
        items = []
        for item in module.items:
            fields = self._all_fields(module, item) if item.fields else ()
            names = tuple(field.name for field in fields) or item.parameters
            items.append(
                replace(item, signature=constructor(fields) or item.signature, parameters=names)
                if fields != item.fields
                else item
            )
        return replace(module, items=tuple(items))

    def _all_fields(self, module: Module, item: Item, depth: int = 8) -> tuple[Field, ...]:
        """Return the fields of a dataclass and of its bases in this package, in the constructor's order."""
        found: dict[str, Field] = {}
        # As in the MRO, fields of the first base replace those of later ones.
        for base in reversed(item.bases) if depth else ():
            behind = self.resolve(f"{module.name}.{base}")
            if behind is not None:
                found |= {field.name: field for field in self._all_fields(*behind, depth - 1)}
        found |= {field.name: field for field in item.fields}
        return tuple(sorted(found.values(), key=lambda field: field.kw_only))

    @property
    def name(self) -> str:
        """Name of the package."""
        return self.folder.stem

    @cached_property
    def root(self) -> Path | None:
        """The checkout that the package is developed in, or None if it is installed."""
        for folder in list(self.folder.parents)[:3]:
            if any((folder / name).exists() for name in _CHECKOUT):
                return folder
        return None

    def shown_path(self, module: Module) -> str:
        """Return a module's path from the checkout, or from the folder that the package is installed in."""
        return module.path.relative_to(self.root or self.folder.parent).as_posix()

    @cached_property
    def public_packages(self) -> set[str]:
        """Packages that users import from, in which any module has `__all__`.

        Without `__all__` anywhere, these are all packages whose names have no leading underscore.
        """
        packages = [module for module in self.modules.values() if module.is_package]
        stated = any(module.exports is not None for module in self.modules.values())
        public = set()
        for package in packages:
            inside = [
                module
                for module in self.modules.values()
                if self.subpackage(module.name) == self.subpackage(package.name)
            ]
            chosen = any(module.exports is not None for module in inside) if stated else True
            if package.name == self.name or (chosen and not _private(package.name)):
                public.add(package.name)
        return public

    def subpackage(self, module: str) -> str:
        """Return the top-level folder of a module, or the package itself for modules directly in it."""
        parts = module.split(".")
        package = ".".join(parts[:2])
        known = self.modules.get(package)
        return package if known is not None and known.is_package else self.name

    @cached_property
    def entries(self) -> list[Entry]:
        """Every public name once, sorted."""
        names: dict[str, list[str]] = {}
        for module in self.modules.values():
            for name in self._public_names(module):
                found = self.resolve(f"{module.name}.{name}")
                if found is not None:
                    names.setdefault(f"{found[0].name}.{found[1].name}", []).append(f"{module.name}.{name}")
        made = []
        for canonical, public in names.items():
            # The name that users type: with the fewest dots, then the shortest.
            first, *others = sorted(set(public), key=lambda name: (name.count("."), len(name), name))
            found = self.resolve(canonical)
            assert found is not None, "it was found by this name above"
            made.append(
                Entry(name=first, canonical=canonical, aliases=tuple(others), item=found[1], module=found[0])
            )
        return sorted(made, key=lambda entry: entry.name.lower())

    def _public_names(self, module: Module) -> Iterator[str]:
        if module.exports:
            yield from module.exports
            return
        parent = module.name.rpartition(".")[0]
        listed = not _private(module.name) and parent in {*self.public_packages, ""} - self._facades
        if listed and module.name not in self._exported_from:
            for item in module.items:
                if item.public and item.kind != "data" and not item.name.startswith("__"):
                    yield item.name

    @cached_property
    def _facades(self) -> set[str]:
        """Packages that export names of their modules: what a module does not export there is internal."""
        return {
            module.name
            for module in self.modules.values()
            if module.is_package
            for name in module.exports or ()
            if (found := self.resolve(f"{module.name}.{name}")) is not None and found[0] is not module
        }

    @cached_property
    def _exported_from(self) -> set[str]:
        """Modules whose names are exported by another module. Their other names are internal."""
        found = set()
        for module in self.modules.values():
            for name in module.exports or ():
                defined = self.resolve(f"{module.name}.{name}")
                if defined is not None:
                    found.add(defined[0].name)
        return found

    def resolve(self, dotted: str, depth: int = 8) -> tuple[Module, Item] | None:
        """Return the module and the definition behind a dotted name, through re-exports, or None."""
        base, _, name = dotted.rpartition(".")
        module = self.modules.get(base)
        if module is None or not depth:  # modules that re-export each other's names would recurse for ever
            return None
        item = module.item(name)
        if item is not None and item.kind != "data":
            return module, item
        if name in module.imported:
            target = module.imported[name]
            return self.resolve(target, depth - 1) or ((module, item) if item else None)
        return (module, item) if item else None

    @cached_property
    def pages(self) -> list[Page]:
        """All pages, by name."""
        defining = {entry.module.name for entry in self.entries}
        own: dict[str, list[Module]] = {}
        rest: dict[str, list[Module]] = {}
        # A module has a page of its own if users import from it or if it defines a public name. Others are
        # described together, on the page of their top-level package.
        for module in self.modules.values():
            package = self.subpackage(module.name)
            parent = module.name if module.is_package else module.name.rpartition(".")[0]
            listed = parent in self.public_packages and not _private(module.leaf)
            if listed or module.name in defining or module.name == package:
                own[module.name] = [module]
            else:
                rest.setdefault(package, []).append(module)
        for package, modules in rest.items():
            main = [self.modules[package]] if package in self.modules else []
            own.setdefault(package, main).extend(modules)
        return [
            Page(name=name, modules=tuple(modules), internal=self._is_internal(name))
            for name, modules in sorted(own.items())
        ]

    def _is_internal(self, name: str) -> bool:
        behind_facade = name.rpartition(".")[0] in self._facades and not self.modules[name].is_package
        hidden = behind_facade and not self.entries_of[name]
        return hidden or self.subpackage(name) not in self.public_packages

    @cached_property
    def page_of(self) -> dict[str, Page]:
        """The page on which each module is described."""
        return {module.name: page for page in self.pages for module in page.modules}

    @cached_property
    def entries_of(self) -> dict[str, list[Entry]]:
        """The public names that each module defines, in the order of its file."""
        found: dict[str, list[Entry]] = {name: [] for name in self.modules}
        for entry in self.entries:
            found[entry.module.name].append(entry)
        return {name: sorted(held, key=lambda entry: entry.item.line) for name, held in found.items()}

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """The modules of the package that each module imports, where their names are defined."""
        found: dict[str, set[str]] = {}
        for module in self.modules.values():
            targets = {self.module_behind(dotted) for dotted in module.imported.values()}
            found[module.name] = {target for target in targets if target and target != module.name}
        return found

    @cached_property
    def importers(self) -> dict[str, set[str]]:
        """The modules of the package that import each module."""
        found: dict[str, set[str]] = {name: set() for name in self.modules}
        for importer, imported in self.imports.items():
            for name in imported:
                found[name].add(importer)
        return found

    def module_behind(self, dotted: str) -> str | None:
        """Return the module that a dotted name refers to or is defined in; None outside this package."""
        if dotted in self.modules:
            return dotted
        found = self.resolve(dotted)
        if found is not None:
            return found[0].name
        base = dotted.rpartition(".")[0]
        return base if base in self.modules else None


def _private(name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))
