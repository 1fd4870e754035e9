"""The files of a repository, found by their names. No git command runs: a hostile checkout has hooks."""

import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pathspec import GitIgnoreSpec

from repopages.errors import OptionError

_SKIPPED = {".bzr", ".eggs", ".git", ".hg", ".hypothesis", ".ipynb_checkpoints", ".jj", ".mypy_cache", ".nox"}
_SKIPPED |= {".pytest_cache", ".ruff_cache", ".svn", ".tox", ".venv", "__pycache__", "node_modules"}
_MARKS = ("pyvenv.cfg", "CACHEDIR.TAG", ".repopages.json")
"""Files that mark a folder as made by a program: a virtual environment, a cache, the pages of this one."""

_CHECKOUT = (".git", "pyproject.toml", "setup.py", "setup.cfg", "package.json", "Cargo.toml", "go.mod")
_MOST_IGNORES = 1000
"""Lines of a `.gitignore` that are read, of 64 bytes on average."""


@dataclass(frozen=True)
class _Rules:
    """Patterns of one `.gitignore` file.

    Args:
        patterns: Expressions that match paths, the last one first, each with whether it ignores them.
        skipped: Length of the path of its folder from the root, with "/" at its end.
        before: Path of the root from its folder, for a folder above the root, with "/" at its end.
    """

    patterns: list[tuple[re.Pattern[str], bool]]
    skipped: int = 0
    before: str = ""

    def decide(self, path: str) -> bool | None:
        """Return whether a path from the root is ignored, or None if no pattern matches it.

        The walk asks for every folder on the way, so that a pattern has to match the path itself. pathspec's
        own check also takes a match of a folder above, and ranks patterns of folders below those of files:
        `*` and `!*/` would ignore every folder.
        """
        inside = self.before + path[self.skipped :]
        return next((ignores for pattern, ignores in self.patterns if _matches(pattern, inside)), None)


@dataclass(frozen=True, kw_only=True)
class Repository:
    """A folder whose files are documented.

    Attributes:
        root: The folder, absolute.
        name: Its name.
        files: Paths of all files from the root, with "/", sorted. A name that is not valid UTF-8 contains
            surrogates, as `os.fsdecode` makes them.
        prefix: Dotted name of the Python package that the root is, empty if it is none: "torch.distributed"
            for site-packages/torch/distributed.
        warnings: Folders that cannot be read, one sentence each.
    """

    root: Path
    name: str
    files: list[str]
    prefix: str = ""
    warnings: tuple[str, ...] = ()

    @classmethod
    def open(cls, path: str, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> "Repository":
        """Find the files of a repository.

        Args:
            path: A folder, a single file, or the name of an installed Python package, which is not imported.
            include: Patterns as in `.gitignore`; with any, only files that match one are included.
            exclude: Patterns as in `.gitignore` of files and folders that are left out.

        Raises:
            OptionError: If there is no such folder, file or package, or a pattern is invalid.
        """
        found = _find(path)
        wanted = _pattern("include", include) if include else None
        unwanted = _pattern("exclude", exclude)
        if not found.is_dir():
            root = found.parent
            return cls(root=root, name=found.name, files=[found.name], prefix=_prefix(root))
        warnings: list[str] = []
        files = sorted(
            file for file in _walk(found, unwanted, warnings) if not wanted or wanted.match_file(file)
        )
        name = found.name or "root"
        return cls(root=found, name=name, files=files, prefix=_prefix(found), warnings=tuple(warnings))


def _find(path: str) -> Path:
    """Return the folder or file that a user names, or the folder or file of an installed package."""
    given = Path(path).expanduser()
    try:
        if given.is_dir() or given.is_file():
            return given.resolve()
    except (OSError, ValueError) as error:  # too long, or with a zero byte
        raise OptionError(f"path={path!r} cannot be read: {error}") from None
    top, *inner = path.split(".")
    try:
        # Only for the first part: for `a.b`, Python would import `a`.
        spec = importlib.util.find_spec(top) if all(part.isidentifier() for part in (top, *inner)) else None
    except (ImportError, ValueError):
        spec = None
    places = list(spec.submodule_search_locations or ()) if spec else []
    if spec and not places and spec.origin and not inner:
        places = [spec.origin]
    for place in places:
        folder = Path(place, *inner)
        for candidate in (folder, folder.with_suffix(".py")):
            if candidate.suffix in ("", ".py") and candidate.exists():
                return candidate.resolve()
    raise OptionError(
        f"path={path!r} is not a folder, a file or an installed Python package with source: pass a checkout,"
        " a folder, a file or the name of an installed package"
    )


def _pattern(option: str, patterns: Sequence[str]) -> GitIgnoreSpec:
    try:
        return GitIgnoreSpec.from_lines(patterns)
    except (ValueError, re.error) as error:
        raise OptionError(
            f"--{option}: {error}; expected a pattern as in .gitignore, such as '*.py'"
        ) from None


def _prefix(root: Path) -> str:
    """Return the dotted name of the package that a folder is, by the `__init__.py` files in and above it."""
    parts: list[str] = []
    folder = root
    plain = not any((root / name).exists() for name in ("__init__.py", *_CHECKOUT))
    if plain and (root.parent / "__init__.py").is_file() and any(root.glob("*.py")):
        # A folder of modules without an `__init__.py`, in a package that has one.
        parts, folder = [root.name], root.parent
    while (folder / "__init__.py").is_file() and folder.name.isidentifier():
        parts.insert(0, folder.name)
        folder = folder.parent
    return ".".join(parts)


def _walk(root: Path, unwanted: GitIgnoreSpec, warnings: list[str]) -> Iterator[str]:
    """Yield all files below a folder."""
    # Not recursive: folders may be nested more deeply than Python's stack.
    stack: list[tuple[str, tuple[_Rules, ...]]] = [("", _rules_above(root))]
    while stack:
        folder, rules = stack.pop()
        where = os.path.join(root, folder)
        try:
            with os.scandir(where) as listing:
                entries = list(listing)
        except OSError as error:  # no permission, gone meanwhile, or a path longer than the system allows
            warnings.append(f"{_shown(folder) or '.'}: this folder cannot be read: {error.strerror}")
            continue
        names = {entry.name for entry in entries}
        if folder and not names.isdisjoint(_MARKS):
            continue
        if ".gitignore" in names:
            patterns = _gitignore(os.path.join(where, ".gitignore"))
            rules = (*rules, _Rules(patterns, len(folder) + 1 if folder else 0))
        for entry in entries:
            path = f"{folder}/{entry.name}" if folder else entry.name
            is_folder = _is_folder(entry)
            asked = f"{path}/" if is_folder else path
            if (is_folder and entry.name in _SKIPPED) or _ignored(asked, rules) or unwanted.match_file(asked):
                continue
            if is_folder:
                stack.append((path, rules))
            else:
                yield path


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder. A link to one is not: it could lead outside, or in a circle."""
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def _matches(pattern: re.Pattern[str], path: str) -> bool:
    """Return whether a pattern of pathspec matches a path itself. A folder's path ends with "/".

    The group `ps_d` is the "/" behind a folder that matched, which may be one above.
    """
    found = pattern.search(path.removesuffix("/"))
    if found and not found.groupdict().get("ps_d"):
        return True
    if not path.endswith("/") or "ps_d" not in pattern.groupindex:
        return False
    return any(found.end("ps_d") == len(path) for found in pattern.finditer(path))


def _gitignore(path: str) -> list[tuple[re.Pattern[str], bool]]:
    """Return the patterns of a file, the last one first, without those that are no patterns."""
    try:
        # A file that is no regular one, such as a pipe, is not opened.
        if not os.path.isfile(path):
            return []
        with open(path, "rb") as file:
            data = file.read(_MOST_IGNORES << 6)
    except OSError:
        return []
    patterns: list[tuple[re.Pattern[str], bool]] = []
    for line in data.decode("utf-8", "surrogateescape").splitlines()[:_MOST_IGNORES]:
        # The time for a match is exponential in the number of stars: a hostile file could stop a build.
        if line.count("**") > 3 or any(part.count("*") > 3 for part in line.split("/")):
            continue
        try:
            made = GitIgnoreSpec.from_lines([line]).patterns
        except (ValueError, re.error):  # git ignores an invalid pattern as well
            continue
        patterns += [(rule.regex, rule.include) for rule in made if rule.regex and rule.include is not None]
    return patterns[::-1]


def _rules_above(root: Path) -> tuple[_Rules, ...]:
    """Return the patterns of the checkout around a folder, none if they would ignore the folder itself.

    A user who names a folder inside an ignored one, such as a package in .venv, wants to read it.
    """
    above = [root, *root.parents]
    depth = next((depth for depth, folder in enumerate(above) if (folder / ".git").exists()), 0)
    rules: tuple[_Rules, ...] = ()
    for folder in reversed(above[1 : depth + 1]):
        way = root.relative_to(folder).as_posix() + "/"
        rules = (*rules, _Rules(_gitignore(str(folder / ".gitignore")), before=way))
        if any(_Rules(rules[-1].patterns).decide(way[: found.end()]) for found in re.finditer("/", way)):
            return ()
    return rules


def _ignored(path: str, rules: tuple[_Rules, ...]) -> bool:
    """Return whether a path is ignored: the deepest `.gitignore` with a matching pattern decides."""
    decisions = (rule.decide(path) for rule in reversed(rules))
    return next((decided for decided in decisions if decided is not None), False)


def _shown(path: str) -> str:
    return path.encode("utf-8", "replace").decode()
