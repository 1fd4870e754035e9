"""All files of a repository and how they relate: imports, tests, examples, documents and public names."""

from dataclasses import dataclass
from pathlib import Path

from repopages.reading.model import Facts, Item, Section


@dataclass(frozen=True, kw_only=True)
class Edge:
    """An import of one file of the repository by another, once for each pair of files.

    Attributes:
        source: Path of the file that imports.
        target: Path of the imported file.
        line: Line of the first import of it.
        names: Imported names, in the order of the file. Empty if only the whole file is imported.
        through: The file that the import names, if that only re-exports what `target` defines.
    """

    source: str
    target: str
    line: int
    names: tuple[str, ...] = ()
    through: str = ""


@dataclass(frozen=True, kw_only=True)
class Use:
    """A test or an example that uses a file.

    Attributes:
        path: Path of the test or example.
        line: The first line that refers to the file, or 1.
        how: "imports it", "names it" or "imports a file that imports it".
        count: Number of different names of the file that it uses, at least 1.
    """

    path: str
    line: int
    how: str
    count: int


@dataclass(frozen=True, kw_only=True)
class Place:
    """The definition that a name refers to.

    Attributes:
        path: The file.
        name: Dotted name in the file, empty for the file itself.
        item: The definition, None for the file itself.
    """

    path: str
    name: str = ""
    item: Item | None = None


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder.

    Attributes:
        path: Its path from the root, empty for the root itself.
        folders: Paths of the folders directly in it, sorted.
        files: Paths of the files directly in it, sorted.
    """

    path: str
    folders: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


class Library:
    """All files of a repository and how they relate.

    Args:
        root: The folder.
        name: Name of the repository.
        files: Facts of all files, by path.
        prefix: Dotted name of the Python package around the root, empty if there is none.
    """

    def __init__(self, root: Path, name: str, files: dict[str, Facts], prefix: str = "") -> None:
        self.root = root
        self.name = name
        self.files = files
        self.prefix = prefix
        self.folders: dict[str, Folder] = _folders(files)

    def imports(self, path: str) -> list[Edge]:
        """Return the imports of `path` that lead to files of the repository, in the order of the file."""
        return []

    def importers(self, path: str) -> list[Edge]:
        """Return the imports of `path` by other files, by their paths."""
        return []

    def outside(self, path: str) -> dict[str, list[str]]:
        """Return what `path` imports from "standard library" and from "other packages", each sorted."""
        return {}

    def tests(self, path: str) -> list[Use]:
        """Return the test files that use `path`, those that use it most first."""
        return []

    def examples(self, path: str) -> list[Use]:
        """Return the example programs that use `path`, those that use it most first."""
        return []

    def documents(self, path: str) -> list[tuple[str, Section]]:
        """Return sections that link to `path` or mention its distinctive names, the closest first."""
        return []

    def related(self, path: str) -> list[tuple[str, str]]:
        """Return other files that a reader of `path` should know of, each once with the reason."""
        return []

    def module(self, path: str) -> str:
        """Return the absolute dotted name of a Python module, or an empty text."""
        return ""

    def public(self, path: str) -> list[tuple[str, str, Item]]:
        """Return the public definitions of `path`: public name, dotted name in the file, definition."""
        return []

    def find(self, name: str, path: str) -> Place | None:
        """Return what a name in a docstring or signature of `path` refers to, or None if it is not known."""
        return None

    def chain(self, path: str) -> list[str]:
        """Return the shortest chain of imports from the package's `__init__.py` to `path`, both included."""
        return []


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
