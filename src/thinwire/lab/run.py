"""One command on every host: lines as they come, the first failure stops the rest."""

import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, TypeAlias

from thinwire.lab.hosts import Hosts

_GRACE_SECONDS = 3.0
_MOST_LINES = 1000  # a command that prints faster than anybody reads must wait

Lines: TypeAlias = "queue.Queue[tuple[int, str, str | None]]"

OnLine = Callable[[int, str, str], None]
"""Receives (host, "stdout" or "stderr", line) of every line that a command prints."""


@dataclass(frozen=True)
class Finished:
    """How a run ended.

    Attributes:
        exit_code: 0, or that of the host that failed first, as a shell would say it (128 + signal).
        failed_host: Which host that was.
        seconds: From the first start to the last end.
        bytes_sent: By each host, read off its device; None over loopback.
    """

    exit_code: int
    failed_host: int | None
    seconds: float
    bytes_sent: tuple[int, ...] | None


def run_on(hosts: Hosts, command: Sequence[str], on_line: OnLine) -> Finished:
    """Run `command` on every host at once and wait; whatever happens, no process stays behind.

    When one host fails the others are asked to stop (SIGTERM), and ended after a moment of grace.
    """
    started = time.monotonic()
    before = hosts.bytes_sent()
    lines: Lines = queue.Queue(_MOST_LINES)
    processes: list[subprocess.Popen[str]] = []
    readers: list[threading.Thread] = []
    try:
        for host in range(hosts.count):
            process = hosts.start(host, command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            processes.append(process)
            readers += _readers(process, host, lines)
        failed_host, code = _follow(processes, lines, on_line)
        seconds = time.monotonic() - started
        _stop(processes)
        _drain(readers, lines, on_line)
    except BaseException:
        _stop(processes)
        _drain(readers, lines, lambda host, stream, line: None)
        raise
    after = hosts.bytes_sent()
    sent = (
        None if before is None or after is None else tuple(b - a for a, b in zip(before, after, strict=True))
    )
    return Finished(code, failed_host, seconds, sent)


def _drain(readers: list[threading.Thread], lines: Lines, on_line: OnLine) -> None:
    """The lines that are still on their way; not for ever, for what was left running may go on printing."""
    deadline = time.monotonic() + _GRACE_SECONDS
    while time.monotonic() < deadline:
        try:
            host, stream, line = lines.get(timeout=0.02)
        except queue.Empty:
            if not any(reader.is_alive() for reader in readers):
                return
            continue
        if line is not None:
            on_line(host, stream, line)


def _readers(process: subprocess.Popen[str], host: int, lines: Lines) -> list[threading.Thread]:
    """Two threads that pass lines on, and one that says when the process has ended."""

    def read(stream: str, pipe: IO[str]) -> None:
        with pipe:
            for line in pipe:
                lines.put((host, stream, line.rstrip("\n")))

    def wait() -> None:
        process.wait()
        lines.put((host, "", None))

    assert process.stdout is not None
    assert process.stderr is not None
    threads = [
        threading.Thread(target=read, args=("stdout", process.stdout), daemon=True),
        threading.Thread(target=read, args=("stderr", process.stderr), daemon=True),
        threading.Thread(target=wait, daemon=True),
    ]
    for thread in threads:
        thread.start()
    return threads


def _follow(
    processes: list[subprocess.Popen[str]],
    lines: Lines,
    on_line: OnLine,
) -> tuple[int | None, int]:
    """Until all have ended or one has failed: that host and its exit code."""
    running = len(processes)
    while running:
        host, stream, line = lines.get()
        if line is not None:
            on_line(host, stream, line)
            continue
        running -= 1
        code = processes[host].returncode
        if code:
            return host, code if code > 0 else 128 - code
    return None, 0


def _stop(processes: list[subprocess.Popen[str]]) -> None:
    """SIGTERM to the session of each that still runs; after a moment SIGKILL to whatever is left of any."""
    running = [process for process in processes if process.poll() is None]
    deadline = time.monotonic() + _GRACE_SECONDS
    for process in running:
        _signal(process, signal.SIGTERM)
    for process in running:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.01, deadline - time.monotonic()))
    for process in processes:
        _signal(process, signal.SIGKILL)
        process.wait()


def _signal(process: subprocess.Popen[str], number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
