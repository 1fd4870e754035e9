"""Unchanged files are not read again, and no state of the cache or of the workers stops a build."""

import os
import pickle
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from repopages.reading import cache, workers
from repopages.reading.cache import cache_folder, read_all
from repopages.reading.model import Facts
from repopages.reading.read import read
from repopages.reading.repository import Repository


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REPOPAGES_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "shop"
    folder.mkdir()
    for number in range(4):
        (folder / f"m{number}.py").write_text(f"def f{number}():\n    return {number}\n")
    return folder


@pytest.fixture
def new_workers() -> Iterator[None]:
    workers._end()
    yield
    workers._end()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths that are read by a reader, not taken from the cache."""
    seen: list[str] = []

    def spy(root: Path, path: str) -> Facts:
        seen.append(path)
        return read(root, path)

    monkeypatch.setattr(workers, "_borrow", lambda: None)
    monkeypatch.setattr(workers, "read", spy)
    return seen


def facts_of(root: Path, jobs: int = 1) -> dict[str, Facts]:
    return read_all(Repository.open(str(root)), jobs)


def test_only_changed_files_are_read_again(root: Path, reads: list[str]) -> None:
    first = facts_of(root)
    assert sorted(reads) == ["m0.py", "m1.py", "m2.py", "m3.py"]
    (root / "m1.py").write_text("def g():\n    pass\n")
    (root / "m2.py").rename(root / "m9.py")
    reads.clear()
    second = facts_of(root)
    assert sorted(reads) == ["m1.py", "m9.py"]
    assert second["m0.py"] == first["m0.py"]
    assert second["m0.py"].text == "def f0():\n    return 0\n"
    assert [item.name for item in second["m1.py"].items] == ["g"]


def test_other_readers_read_again(root: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    facts_of(root)
    monkeypatch.setattr(cache, "_version", lambda: "another")
    facts_of(root)
    assert len(reads) == 8
    with sqlite3.connect(cache_folder(root) / "facts.sqlite") as database:
        assert database.execute("SELECT DISTINCT version FROM facts").fetchall() == [("another",)]


def test_old_contents_are_forgotten(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    today = cache._today()
    facts_of(root)
    (root / "m1.py").write_text("x = 1\n")
    monkeypatch.setattr(cache, "_today", lambda: today + 10)
    facts_of(root)  # marks what it uses, and keeps the rest for a while
    monkeypatch.setattr(cache, "_today", lambda: today + 20)
    facts_of(root)
    with sqlite3.connect(cache_folder(root) / "facts.sqlite") as database:
        assert database.execute("SELECT count(*) FROM facts").fetchone() == (4,)


@pytest.mark.parametrize("damage", ["text", "cut", "rows", "folder"])
def test_a_corrupt_cache_is_read_anew(root: Path, reads: list[str], damage: str) -> None:
    first = facts_of(root)
    file = cache_folder(root) / "facts.sqlite"
    if damage == "text":
        file.write_text("no database" * 1000)
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:5000])
    elif damage == "rows":
        with sqlite3.connect(file) as database:
            database.execute("UPDATE facts SET data = ?", (pickle.dumps(os.system),))
    else:
        file.unlink()
        file.mkdir()
    reads.clear()
    assert facts_of(root) == first
    assert len(reads) == 4
    assert facts_of(root) == first


def test_the_cache_runs_no_code() -> None:
    with pytest.raises(pickle.UnpicklingError, match="is no fact"):
        workers.loads(pickle.dumps(print))


def test_a_folder_that_cannot_be_written_is_replaced(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "file").write_text("")
    monkeypatch.setenv("REPOPAGES_CACHE", str(root / "file" / "cache"))
    assert cache_folder(root).is_dir()
    assert len(facts_of(root)) == 5


def test_repositories_that_nobody_builds_any_more_are_forgotten(root: Path, own_cache: Path) -> None:
    old, other = own_cache / ("a" * 16), own_cache / "mine"
    for folder in (old, other):
        folder.mkdir(parents=True)
        (folder / "facts.sqlite").write_text("")
        os.utime(folder, (0, 0))
    facts_of(root)
    assert not old.exists()
    assert other.exists()
    assert cache_folder(root).exists()


def test_two_builds_at_once_share_a_cache(root: Path) -> None:
    results: list[dict[str, Facts]] = []
    threads = [threading.Thread(target=lambda: results.append(facts_of(root))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert all(result == results[0] for result in results)


def many(root: Path, count: int = 40) -> Path:
    for number in range(count):
        (root / f"n{number}.py").write_text(f"class C{number}:\n    pass\n")
    return root


def test_processes_read_what_one_process_reads(root: Path) -> None:
    paths = Repository.open(str(many(root))).files
    found = {facts.path: facts for facts in workers.read_files(root, paths, 2)}
    assert found == {path: read(root, path) for path in paths}


def test_a_script_from_stdin_in_a_hostile_folder_can_use_processes(root: Path) -> None:
    many(root)
    for name in ("struct", "pickle", "multiprocessing", "repopages", "pathspec"):
        (root / f"{name}.py").write_text("raise SystemExit('imported from the repository')\n")
    script = f"""
import sys
sys.path[:] = {[path for path in sys.path if path]!r}
from repopages.reading.cache import read_all
from repopages.reading.repository import Repository
print(len(read_all(Repository.open("."), 2)))
"""
    ran = subprocess.run(
        [sys.executable, "-I", "-"], input=script, cwd=root, capture_output=True, text=True, check=False
    )
    assert (ran.stdout.strip(), ran.stderr) == ("49", "")


def test_a_file_that_kills_its_reader_costs_only_its_own_facts(
    root: Path, monkeypatch: pytest.MonkeyPatch, new_workers: None
) -> None:
    paths = Repository.open(str(many(root))).files
    program = workers._PROGRAM.replace(
        "work()",
        "import os, repopages.reading.workers as w; real = w.read;"
        " w.read = lambda root, path: os._exit(11) if path == 'n7.py' else real(root, path); work()",
    )
    monkeypatch.setattr(workers, "_PROGRAM", program)
    found = {facts.path: facts for facts in workers.read_files(root, paths, 2)}
    assert sorted(found) == paths
    assert found["n7.py"].problem == "the reader crashed, or took more than 60 s"
    assert found["n7.py"].text
    assert [path for path, facts in found.items() if facts.problem] == ["n7.py"]


@pytest.mark.slow  # it waits until the reader is stopped
def test_a_reader_that_never_ends_is_stopped(
    root: Path, monkeypatch: pytest.MonkeyPatch, new_workers: None
) -> None:
    paths = Repository.open(str(many(root, 20))).files
    program = workers._PROGRAM.replace(
        "work()",
        "import time, repopages.reading.workers as w; real = w.read;"
        " w.read = lambda root, path: time.sleep(99) if path == 'n3.py' else real(root, path); work()",
    )
    monkeypatch.setattr(workers, "_PROGRAM", program)
    monkeypatch.setattr(workers, "_SLOW", 10.0)
    found = {facts.path: facts for facts in workers.read_files(root, paths, 1)}
    assert [path for path, facts in found.items() if facts.problem] == ["n3.py"]


def test_without_processes_the_files_are_read_here(
    root: Path, monkeypatch: pytest.MonkeyPatch, new_workers: None
) -> None:
    paths = Repository.open(str(many(root, 20))).files
    monkeypatch.setattr(workers, "_PROGRAM", "raise SystemExit(1)")
    assert {facts.path for facts in workers.read_files(root, paths, 2)} == set(paths)
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert {facts.path for facts in workers.read_files(root, paths, 2)} == set(paths)


def test_processes_end_with_the_caller(root: Path) -> None:
    before = threading.active_count()
    stream = workers.read_files(root, Repository.open(str(many(root))).files, 2)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    limit = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < limit:
        time.sleep(0.01)  # a cancelled timer needs a moment
    assert threading.active_count() == before
    workers._end()
    assert workers._idle.empty()


def test_progress_counts_every_file(root: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    read_all(Repository.open(str(root)), 1, lambda phase, done, total: seen.append((phase, done, total)))
    assert seen == [("reading", number, 4) for number in range(1, 5)]
