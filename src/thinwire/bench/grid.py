"""The grid: every link and world size in turn, saved after each, resumed where it stopped."""

import json
import math
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from thinwire.bench.contestants import line_up
from thinwire.bench.measure import ON_CPU, OnRound
from thinwire.bench.results import Cell, Results, Track
from thinwire.bench.summary import summarize
from thinwire.bench.worker import MARK, Task
from thinwire.bench.workloads import find_workload
from thinwire.errors import LabError, OptionError, StateError
from thinwire.lab.hosts import Hosts, Loopback
from thinwire.lab.namespaces import Lab
from thinwire.lab.network import MOST_HOSTS, plan
from thinwire.lab.rate import parse_rate
from thinwire.lab.run import run_on
from thinwire.version import __version__

LOOPBACK = "loopback"
OnProgress = Callable[[str, int], None]
"""Told which cell is running and how many of its rounds are done."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What to measure.

    Attributes:
        workload: A built-in name, or `package.module:build`.
        programs: As `thinwire.bench.contestants.parse_program` reads them.
        links: Rates, or "loopback" for no lab at all.
        hosts: World sizes.
        steps: Rounds in each cell.
        bucket_mb: DDP's bucket size; None: its own default.
        with_torch: Also run torch's own hook of the same name.
    """

    workload: str
    programs: tuple[str, ...]
    links: tuple[str, ...]
    hosts: tuple[int, ...]
    steps: int
    bucket_mb: float | None = None
    with_torch: bool = True

    def __post_init__(self) -> None:
        if self.steps < 8:
            raise OptionError(
                f"steps={self.steps} must be at least 8: medians need some rounds after warm-up"
            )
        if self.bucket_mb is not None and not 0 < self.bucket_mb < math.inf:
            raise OptionError(f"bucket_mb={self.bucket_mb:g} must be positive: DDP's own default is 25")
        for count in self.hosts:
            if not 2 <= count <= MOST_HOSTS:
                raise OptionError(f"hosts={count} must be from 2 to {MOST_HOSTS}: one host sends nothing")
        for link in self.links:
            if link != LOOPBACK:
                parse_rate(link)
        line_up(list(self.programs))
        find_workload(self.workload)

    @property
    def cells(self) -> list[tuple[int, str]]:
        """(hosts, link), in order, each once."""
        return list(dict.fromkeys((hosts, link) for hosts in self.hosts for link in self.links))

    def task(self, **changes: Any) -> Task:
        """What the ranks of a cell are told."""
        return Task(
            self.workload, self.programs, self.steps, self.bucket_mb, with_torch=self.with_torch, **changes
        )


def run_grid(
    grid: Grid,
    path: Path,
    command: str,
    *,
    fresh: bool,
    on_progress: OnProgress,
    on_line: Callable[[str], None],
) -> Results:
    """Run every cell that `path` does not hold yet; one that fails is kept with its reason."""
    results = _resumed(grid, path, fresh=fresh) or Results(command, _settings(grid), machine())
    results.command = command
    done = {cell.key for cell in results.cells if cell.error is None}
    memories: dict[int, list[int]] = {}
    for hosts, link in grid.cells:
        label = f"{hosts} hosts, {link}"
        if (grid.workload, hosts, link) in done:
            on_progress(label, grid.steps)
            continue
        results.cells = [cell for cell in results.cells if cell.key != (grid.workload, hosts, link)]
        cell = Cell(grid.workload, hosts, link, network=label)
        try:
            if hosts not in memories:
                on_progress(f"{hosts} hosts, peak memory", 0)
                memories[hosts] = _run(Loopback(hosts), grid.task(memory=True), on_line)["memory"]
            on_progress(label, 0)
            cell = _measure(grid, hosts, link, partial(_told, on_progress, label), on_line)
            for track, memory in zip(cell.tracks, memories[hosts], strict=True):
                track.peak_memory = None if track.unavailable else memory
        except LabError as error:
            cell.error = str(error)
        results.cells.append(cell)
        results.save(path, summarize(results))
    return results


def _told(on_progress: OnProgress, label: str, kind: str, done: int) -> None:
    if kind == "round":
        on_progress(label, done)
    else:
        on_progress(f"{label}, on to DDP's loss", 0)


def _measure(grid: Grid, hosts: int, link: str, on_round: OnRound, on_line: Callable[[str], None]) -> Cell:
    with _network(hosts, link) as (where, words):
        heard = _run(where, grid.task(probe=link == LOOPBACK), on_line, on_round)
    rate = heard["rate"] if link == LOOPBACK else parse_rate(link)
    tracks = [Track(**track) for track in heard["tracks"]]
    return Cell(grid.workload, hosts, link, words, rate, heard["parameters"], tracks)


@contextmanager
def _network(hosts: int, link: str) -> Iterator[tuple[Hosts, str]]:
    if link == LOOPBACK:
        yield Loopback(hosts), f"{hosts} ranks over loopback"
        return
    network = plan(hosts=hosts, rate=link)
    with Lab(network) as lab:
        yield lab, str(network)


def _run(
    hosts: Hosts,
    task: Task,
    on_line: Callable[[str], None],
    on_round: OnRound = lambda kind, done: None,
) -> dict[str, Any]:
    """What rank 0 reported, by kind."""
    heard: dict[str, Any] = {}
    errors: list[str] = []

    def listen(host: int, stream: str, line: str) -> None:
        if not line.startswith(MARK):
            if line.strip() and "hostname of the client socket" not in line:  # loopback has no names
                on_line(f"host {host} | {line}")
            return
        kind, value = json.loads(line.removeprefix(MARK))
        if kind in ("round", "overtime"):
            on_round(kind, value)
        elif kind == "error":
            errors.append(f"host {host}: {value}")
        else:
            heard[kind] = value

    command = ["env", f"{ON_CPU}=1", sys.executable, "-m", "thinwire.bench.worker", json.dumps(asdict(task))]
    finished = run_on(hosts, command, listen)
    if finished.exit_code:
        # The first to complain is the cause: the others notice when its connections close.
        ended = f"host {finished.failed_host} ended with exit code {finished.exit_code}"
        raise LabError(errors[0] if errors else ended)
    return heard


def _resumed(grid: Grid, path: Path, *, fresh: bool) -> Results | None:
    if fresh or not path.exists():
        return None
    results = Results.load(path)
    wanted = _settings(grid)
    different = sorted(key for key in wanted if results.settings.get(key) != wanted[key])
    if different:
        raise StateError(
            f"{path} holds a benchmark with another {', '.join(different)}: choose another --out, or"
            " --fresh to replace it"
        )
    return results


def _settings(grid: Grid) -> dict[str, Any]:
    """What must be the same to go on; links and world sizes may grow from run to run."""
    fixed = {key: value for key, value in asdict(grid).items() if key not in ("links", "hosts")}
    return {**json.loads(json.dumps(fixed)), **machine()}


def machine() -> dict[str, str]:
    """What a reader needs to know about where it ran."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "processor": next(models, platform.machine()),
        "cores": str(os.cpu_count()),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "thinwire": __version__,
        "threads per rank": os.environ.get("OMP_NUM_THREADS", "cores / hosts"),
    }
