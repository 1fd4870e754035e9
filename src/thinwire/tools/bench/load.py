"""The load of this machine during a measurement, and the number of threads that it used."""

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_SLACK = 0.25
"""Cores of background work that do not make a machine busy."""
_THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True, kw_only=True)
class Load:
    """The load of a machine during a measurement.

    Attributes:
        cores: The cores of the machine.
        others: Cores that other processes and other guests of the host used on average. None if unknown.
        needed: Cores that the timed work could use. Infinite for all of them.
    """

    cores: int
    others: float | None
    needed: float = math.inf

    @property
    def busy(self) -> bool:
        """Whether others used cores that the timed work needed, so that its times are uncertain."""
        return self.others is not None and self.others > max(0.0, self.cores - self.needed) + _SLACK

    def __str__(self) -> str:
        if self.others is None:
            return f"the load of this machine's {self.cores} cores is not known"
        return f"other processes used {self.others:.1f} of this machine's {self.cores} cores"

    def doubt(self) -> str:
        """Return a sentence if the machine was busy, or an empty text."""
        if not self.busy:
            return ""
        return (
            f" Uncertain: {self} while this was measured. Measure again when they have ended: times and"
            " advice may change."
        )


class LoadMeter:
    """A measurement of the load, from its construction on.

    Args:
        needed: Cores that the timed work could use. Infinite for all of them.
        copies: Processes of the timed work on this machine, such as ranks. Each is assumed to use as
            much as this one.
    """

    def __init__(self, needed: float = math.inf, copies: int = 1) -> None:
        self._needed, self._copies = needed, copies
        self._since, self._all, self._own = time.perf_counter(), machine_seconds(), own_seconds()
        self._average = _load_average()

    def read(self) -> Load:
        """Return the load since the construction."""
        cores, passed = os.cpu_count() or 1, time.perf_counter() - self._since
        now, own = machine_seconds(), self._copies * (own_seconds() - self._own)
        others = self._average
        if now is not None and self._all is not None and passed > 0:
            others = max(0.0, (now - self._all - own) / passed)
        return Load(cores=cores, others=others, needed=self._needed)


def machine_seconds() -> float | None:
    """Return the CPU seconds of all processes and those stolen by other guests of the host.

    Returns:
        The seconds since boot. None if the system does not report them, as outside of Linux.
    """
    try:
        line = Path("/proc/stat").read_text().partition("\n")[0]
        user, nice, system, _, _, _, _, steal = (int(ticks) for ticks in line.split()[1:9])
    except (OSError, ValueError):
        return None
    # Interrupts are left out. Those of the timed work's own packets are booked to no process, so they would
    # look like other processes' load.
    return (user + nice + system + steal) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])


def _load_average() -> float | None:
    """Return the mean number of running processes in the last minute, before anything was timed."""
    with suppress(OSError, AttributeError):
        return os.getloadavg()[0]
    return None


class Timing:
    """The circumstances of a plan's measurements: threads, and the load once they have ended.

    Args:
        threads: The number of threads.
        why: The reason for this number, as text.
    """

    def __init__(self, threads: int, why: str) -> None:
        self.threads, self._why = threads, why
        self._meter = LoadMeter(needed=threads)
        self.load = self._meter.read()

    def end(self) -> None:
        """Read the load of the time since the construction."""
        self.load = self._meter.read()

    @property
    def busy(self) -> bool:
        """Whether the machine was busy with other work."""
        return self.load.busy

    def as_data(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        load = {"cores": self.load.cores, "other_cores": self.load.others}
        return {"threads": self.threads, "busy": self.busy, **load}

    def __str__(self) -> str:
        threads = f"Measured with {self.threads} thread{'' if self.threads == 1 else 's'} ({self._why})"
        if self.busy:
            return f"{threads}.{self.load.doubt()}"
        return f"{threads}, while {self.load}."


@contextmanager
def measuring() -> Iterator[Timing]:
    """Compute with as many threads as a rank does in training, and measure the load of the machine.

    The number is OMP_NUM_THREADS, or one, as torchrun sets it for several ranks of a host. With a thread for
    every core, threads wait for each other as soon as another process needs a core, and a step takes many
    times as long as in training.

    Yields:
        The circumstances, complete when the context ends.
    """
    before = torch.get_num_threads()
    if _THREADS in os.environ:
        threads, why = before, f"{_THREADS}={os.environ[_THREADS]}"
    elif "LOCAL_WORLD_SIZE" in os.environ:  # a rank, whose training has the same default
        threads, why = before, "the default of this rank"
    else:
        threads, why = 1, f"as torchrun sets it: set {_THREADS} for more"
    torch.set_num_threads(threads)
    timing = Timing(threads, why)
    try:
        yield timing
    finally:
        timing.end()
        torch.set_num_threads(before)
