"""The facts of all files: from the user's cache folder where a file is unchanged, else read anew."""

import contextlib
import hashlib
import os
import pickle
import shutil
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import repopages
from repopages.reading.model import Facts
from repopages.reading.read import read
from repopages.reading.repository import Repository
from repopages.reading.workers import loads, read_files

Progress = Callable[[str, int, int], None]
"""Called with the phase of the work, such as "reading", the number of files done and of all."""

_KEPT_DAYS = 14
_BATCH = 200


def cache_folder(root: Path) -> Path:
    """Return the folder in which everything that can be made anew for a repository is kept.

    It is below `$REPOPAGES_CACHE`, or else repopages/ in the user's cache folder. A temporary folder replaces
    one that cannot be written.
    """
    given = os.environ.get("REPOPAGES_CACHE")
    user = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    base = Path(given) if given else Path(user).expanduser() / "repopages"
    name = hashlib.sha256(os.fsencode(root)).hexdigest()[:16]
    try:
        folder = base.absolute() / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.utime(folder)
    except (OSError, RuntimeError):
        return _temporary(name)
    return folder if os.access(folder, os.W_OK) else _temporary(name)


@cache
def _temporary(name: str) -> Path:
    return Path(tempfile.mkdtemp(prefix=f"repopages-{name}-"))


def read_all(
    repository: Repository, jobs: int | None = None, progress: Progress | None = None
) -> dict[str, Facts]:
    """Return the facts of all files of a repository, by path.

    Args:
        repository: The repository.
        jobs: Number of processes that read. By default, one for each core.
        progress: Called after every file.
    """
    total = len(repository.files)
    found: dict[str, Facts] = {}

    def add(facts: Facts) -> None:
        found[facts.path] = facts
        if progress:
            progress("reading", len(found), total)

    with _Cache(cache_folder(repository.root)) as kept:
        missing: dict[str, int] = {}
        for path in repository.files:
            plain = read(repository.root, path, readers={})
            known = kept.get(plain)
            if known is None:
                missing[path] = hash(plain.text)
            else:
                add(known)
        for facts in read_files(repository.root, list(missing), jobs or _cores()):
            kept.put(facts, plain=hash(facts.text) == missing[facts.path])
            add(facts)
    return {path: found[path] for path in repository.files}


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Cache:
    """Facts of files by path, content and version of the readers. After any failure, files are read anew.

    Args:
        folder: The repository's cache folder.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "facts.sqlite"
        self._version = _version()
        self._new: list[tuple[object, ...]] = []
        self._used: list[tuple[object, ...]] = []
        self._connection: sqlite3.Connection | None = None

    def __enter__(self) -> "_Cache":
        _forget_others(self._path.parent)
        self._open()
        if self._connection is None:
            self._open()  # it was corrupt, and is removed now
        return self

    def _open(self) -> None:
        with self._guarded():
            # Another build of the same repository may write at the same time: wait for its batch, then go on.
            self._connection = sqlite3.connect(self._path, timeout=30)
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=OFF")
            self._connection.execute(
                "CREATE TABLE IF NOT EXISTS facts (path BLOB, digest TEXT, version TEXT, day INTEGER,"
                " data BLOB, PRIMARY KEY (path, digest, version))"
            )

    def get(self, plain: Facts) -> Facts | None:
        """Return the facts of an unchanged file, given those without a reader, or None."""
        row: tuple[int, bytes] | None = None
        key = (os.fsencode(plain.path), plain.digest, self._version)
        with self._guarded():
            row = self._connected.execute(f"SELECT day, data FROM facts {_KEY}", key).fetchone()
        if row is None or not plain.digest:
            return None
        try:
            facts = loads(row[1])
        except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, LookupError):
            return None
        if row[0] != _today():
            self._used.append((_today(), *key))
        if not isinstance(facts, Facts):
            return None
        return facts if facts.text else replace(facts, text=plain.text)

    def put(self, facts: Facts, *, plain: bool) -> None:
        """Keep the facts of a file, without its text if that is the content, which is read each time."""
        if facts.digest:
            data = pickle.dumps(replace(facts, text="") if plain else facts, protocol=5)
            self._new.append((os.fsencode(facts.path), facts.digest, self._version, _today(), data))
        if len(self._new) >= _BATCH:
            self._write()

    def _write(self) -> None:
        new, self._new = self._new, []
        with self._guarded(), self._connected as connection:
            connection.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?, ?, ?, ?)", new)

    def __exit__(self, *error: object) -> None:
        self._write()
        with self._guarded(), self._connected as connection:
            connection.executemany(f"UPDATE facts SET day=? {_KEY}", self._used)
            # Facts by other readers, and of contents that are gone.
            old = (self._version, _today() - _KEPT_DAYS)
            connection.execute("DELETE FROM facts WHERE version != ? OR day < ?", old)
        if self._connection is not None:
            self._connection.close()

    @property
    def _connected(self) -> sqlite3.Connection:
        if self._connection is None:
            raise sqlite3.OperationalError("no cache")
        return self._connection

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Continue without a cache if the database fails: a damaged file, a full disk, no permission."""
        try:
            yield
        except sqlite3.Error as error:
            if self._connection is not None:
                self._connection.close()
            self._connection = None
            # An OperationalError is of the system: the file may be good, and in use by another build.
            if not isinstance(error, sqlite3.OperationalError):
                for path in self._path.parent.glob(f"{self._path.name}*"):
                    path.unlink(missing_ok=True)


_KEY = "WHERE path=? AND digest=? AND version=?"


def _today() -> int:
    return int(time.time() // 86_400)


@cache
def _version() -> str:
    """Return a text that changes with the readers and with Python, whose parser they use."""
    found = hashlib.sha256(f"{repopages.__version__} {sys.version_info[:2]}".encode())
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def _forget_others(folder: Path) -> None:
    """Remove what is kept for repositories that were not built for a long time."""
    for other in folder.parent.glob("[0-9a-f]" * len(folder.name)):
        with contextlib.suppress(OSError):
            unused = time.time() - other.stat().st_mtime > _KEPT_DAYS * 86_400
            if unused and other != folder and (other / "facts.sqlite").exists():
                shutil.rmtree(other)
