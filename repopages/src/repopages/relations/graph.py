"""The records of relations between files."""

from dataclasses import dataclass

from repopages.reading.model import Item


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
