"""Runs one command on every host. The first failure stops it on all hosts."""

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

from thinwire.tools.lab.hosts import Hosts

_GRACE_SECONDS = 3.0
_MOST_LINES = 1000  # a command that prints faster than its lines are shown has to wait

Lines: TypeAlias = "queue.Queue[tuple[int, str, str | None]]"

OnLine = Callable[[int, str, str], None]
"""A callback that receives (host, "stdout" or "stderr", line) for every line that a command prints."""


@dataclass(frozen=True)
class Finished:
    """The result of a run.

    Attributes:
        exit_code: 0, or the exit code of the host that failed first. A signal is 128 + its number.
        failed_host: The host that failed first, or None.
        seconds: Time from the first start to the last end.
        bytes_sent: Bytes sent by each host, as counted by its network device. None over loopback.
        bytes_between: Bytes sent by each group to other groups, at its slow link. None without groups.
    """

    exit_code: int
    failed_host: int | None
    seconds: float
    bytes_sent: tuple[int, ...] | None
    bytes_between: tuple[int, ...] | None = None


def run_on(hosts: Hosts, command: Sequence[str], on_line: OnLine) -> Finished:
    """Run `command` on every host at the same time, and wait for all of them.

    When one host fails, the others receive SIGTERM, and SIGKILL after three seconds. No process remains when
    this function returns or raises.

    Args:
        hosts: The hosts to run on.
        command: The program and its arguments.
        on_line: Called with every line of output, in this thread.

    Returns:
        The exit code, the duration and the bytes sent.
    """
    started = time.monotonic()
    before, between = hosts.bytes_sent(), hosts.bytes_between()
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
    sent, crossed = _more(before, hosts.bytes_sent()), _more(between, hosts.bytes_between())
    return Finished(code, failed_host, seconds, sent, crossed)


def _more(before: list[int] | None, after: list[int] | None) -> tuple[int, ...] | None:
    """Return the increase of each count, or None if there are no counts."""
    if before is None or after is None:
        return None
    return tuple(later - earlier for earlier, later in zip(before, after, strict=True))


def _drain(readers: list[threading.Thread], lines: Lines, on_line: OnLine) -> None:
    """Forward the remaining lines, for a limited time because a leftover process may keep printing."""
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
    """Start two threads that forward lines, and one that reports when the process has ended."""

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
    """Wait until all processes have ended or one has failed. Return the failed host and its exit code."""
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
    """Send SIGTERM to every running session, and SIGKILL to all sessions after a grace period."""
    # A process that has ended may leave children in its session, so SIGKILL is sent to all sessions.
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
