"""Processes that read files, so that all cores are used and a parser that crashes takes no build with it.

They are not multiprocessing's, which starts `python -c` with the current folder first on `sys.path`: there a
hostile repository's `struct.py` would run. They also leave the caller's `__main__` alone, so that tests,
scripts without a guard and scripts from stdin can read a repository.
"""

import atexit
import io
import os
import pickle
import queue
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from repopages.reading.model import Facts
from repopages.reading.read import read

_SLOW = 60.0
"""Seconds for one file."""

_START = 60.0
_READY = "ready"
_PROGRAM = "import sys; sys.path[:] = sys.argv[1:]; from repopages.reading.workers import work; work()"


def read_files(root: Path, paths: Sequence[str], jobs: int) -> Iterator[Facts]:
    """Yield the facts of files as they are read, in any order.

    Args:
        root: The repository's folder.
        paths: The files.
        jobs: Number of processes.
    """
    todo: queue.SimpleQueue[str] = queue.SimpleQueue()
    done: queue.SimpleQueue[Facts] = queue.SimpleQueue()
    for path in paths:
        todo.put(path)
    stopped = threading.Event()
    # Starting a process takes as long as reading some ten files.
    count = max(1, min(jobs, len(paths) // 16)) if paths else 0
    threads = [
        threading.Thread(target=_feed, args=(root, todo, done, stopped), daemon=True) for _ in range(count)
    ]
    for thread in threads:
        thread.start()
    try:
        for _ in paths:
            yield done.get()
    finally:
        stopped.set()  # an error or ctrl-C in the caller
        for thread in threads:
            thread.join()


def _feed(
    root: Path, todo: "queue.SimpleQueue[str]", done: "queue.SimpleQueue[Facts]", stopped: threading.Event
) -> None:
    """Pass files to one process, and start another if it dies."""
    worker: _Worker | None = None
    while not stopped.is_set():
        try:
            path = todo.get_nowait()
        except queue.Empty:
            break
        worker = worker or _borrow()
        if worker is None:
            done.put(read(root, path))
            continue
        facts = worker.read(root, path)
        if facts is None:
            worker.close()
            worker, why = None, f"the reader crashed, or took more than {_SLOW:.0f} s"
            facts = replace(read(root, path, readers={}), problem=why)
        done.put(facts)
    if worker is not None:
        _idle.put(worker)


def _borrow() -> "_Worker | None":
    """Return a process that waits for files, or None if this machine cannot start one."""
    try:
        return _idle.get_nowait()
    except queue.Empty:
        pass
    try:
        worker = _Worker()
    except OSError:
        return None
    if worker.answer(_START) == _READY:
        return worker
    worker.close()
    return None


class _Worker:
    """A process that reads one file after the other."""

    def __init__(self) -> None:
        # `-I`: neither the current folder nor the environment adds to its `sys.path`.
        paths = [os.path.abspath(path) for path in sys.path if path]
        self._process = subprocess.Popen(
            [sys.executable or "python3", "-I", "-c", _PROGRAM, *paths],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def read(self, root: Path, path: str) -> Facts | None:
        """Return the facts of a file, or None if the process died or took too long."""
        assert self._process.stdin is not None
        try:
            _send(self._process.stdin, (str(root), path))
        except OSError:
            return None
        found = self.answer(_SLOW)
        return found if isinstance(found, Facts) else None

    def answer(self, limit: float) -> Any:
        """Return the next answer, or None if there is none within `limit` seconds."""
        assert self._process.stdout is not None
        timer = threading.Timer(limit, self._process.kill)
        timer.start()
        try:
            return _receive(self._process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            return None
        finally:
            timer.cancel()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


_idle: "queue.SimpleQueue[_Worker]" = queue.SimpleQueue()
"""Processes that wait, for the next repository that is read."""


@atexit.register
def _end() -> None:
    while not _idle.empty():
        _idle.get().close()


def work() -> None:
    """Answer with the facts of every file that is named on stdin, until it is closed."""
    # A reader that prints must not do so between the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _send(answers, _READY)
    while True:
        try:
            root, path = _receive(sys.stdin.buffer)
        except EOFError:
            return
        _send(answers, read(Path(root), path))


def _send(stream: IO[bytes], value: object) -> None:
    data = pickle.dumps(value, protocol=5)
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def _receive(stream: IO[bytes]) -> Any:
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError
    data = stream.read(struct.unpack("<Q", head)[0])
    return loads(data)


class _Plain(pickle.Unpickler):
    """An unpickler of facts, which calls nothing but their classes."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "repopages.reading.model" or (module, name) == ("builtins", "frozenset"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is no fact")


def loads(data: bytes) -> Any:
    """Return pickled facts.

    Raises:
        pickle.UnpicklingError: If anything but facts is in it.
    """
    return _Plain(io.BytesIO(data)).load()
