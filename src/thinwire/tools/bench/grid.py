"""Benchmark runs over a grid of links and world sizes. Results are saved after each cell, for resuming."""

import json
import math
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from thinwire.errors import LabError, OptionError, StateError
from thinwire.tools.bench.advice import summarize
from thinwire.tools.bench.contestants import line_up, rounds_needed
from thinwire.tools.bench.devices import ON_CPU
from thinwire.tools.bench.load import LoadMeter
from thinwire.tools.bench.measure import OnRound
from thinwire.tools.bench.results import Cell, Results, Track
from thinwire.tools.bench.summary import WARM_UP
from thinwire.tools.bench.worker import MARK, Task
from thinwire.tools.bench.workloads import check_workload
from thinwire.tools.lab.hosts import Hosts, Loopback
from thinwire.tools.lab.namespaces import Lab
from thinwire.tools.lab.network import MOST_HOSTS, parse_rate, plan
from thinwire.tools.lab.run import run_on
from thinwire.version import __version__

LOOPBACK = "loopback"
THREADS = "threads per rank"
"""The name of the threads among a machine's facts."""
_LOST = (
    "WireError",
    "Connection ",
    "connection",
    "Broken pipe",
    "gloo/transport",
    "DistNetworkError",
    "timed out",
)
"""Signs of a lost connection in errors of thinwire, Gloo and the store."""
OnProgress = Callable[[str, int], None]
"""A callback that receives the running cell's label and the number of its finished rounds."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The settings of a benchmark.

    Attributes:
        workload: A built-in name, or `package.module:build`.
        programs: Texts for `thinwire.tools.bench.contestants.parse_program`.
        links: Rates, or "loopback" to measure without the lab.
        hosts: World sizes.
        steps: Rounds in each cell.
        bucket_mb: DDP's bucket size. None for the best one of each contestant.
        with_torch: Whether to run torch's own hooks and optimizers too.
        seeds: The number of seeds for losses. Times are measured with one.
        timed: Rounds to time on each link. Losses are then trained over loopback, once for all links. None to
            time all steps, and to take the first seed's losses on the link.

    Raises:
        OptionError: A value is out of range or does not parse.
    """

    workload: str
    programs: tuple[str, ...]
    links: tuple[str, ...]
    hosts: tuple[int, ...]
    steps: int
    bucket_mb: float | None = None
    with_torch: bool = True
    seeds: int = 1
    timed: int | None = None

    def __post_init__(self) -> None:
        for name, count in (("steps", self.steps), ("timed", self.rounds)):
            if count < 8:
                raise OptionError(
                    f"{name}={count} must be at least 8: medians need some rounds after warm-up"
                )
        if self.rounds > self.steps:
            raise OptionError(f"timed={self.timed} exceeds steps={self.steps}: time no more than is trained")
        if self.bucket_mb is not None and not 0 < self.bucket_mb < math.inf:
            raise OptionError(f"bucket_mb={self.bucket_mb:g} must be positive: DDP's own default is 25")
        if self.seeds < 1:
            raise OptionError(f"seeds={self.seeds} must be at least 1: each is a separate training")
        for count in self.hosts:
            if not 2 <= count <= MOST_HOSTS:
                raise OptionError(f"hosts={count} must be from 2 to {MOST_HOSTS}: one host sends nothing")
        for link in self.links:
            if link != LOOPBACK:
                parse_rate(link)
        for contestant in line_up(list(self.programs)):
            if (needed := WARM_UP + rounds_needed(contestant.program)) > self.rounds:
                name = "steps" if self.timed is None else "timed"
                raise OptionError(
                    f"{name}={self.rounds} is too few for {contestant.name}: it needs {needed} rounds to show"
                    f" what a step costs; use --{name} {needed} or more"
                )
        check_workload(self.workload)

    @property
    def rounds(self) -> int:
        """The rounds that are timed on each link."""
        return self.steps if self.timed is None else self.timed

    @property
    def cells(self) -> list[tuple[int, str]]:
        """The distinct pairs (hosts, link), in order."""
        return list(dict.fromkeys((hosts, link) for hosts in self.hosts for link in self.links))

    @property
    def seeds_apart(self) -> range:
        """The seeds whose losses are trained over loopback."""
        return range(1 if self.timed is None else 0, self.seeds)

    @property
    def all_rounds(self) -> int:
        """The rounds of all cells, and of the losses that are trained over loopback."""
        losses = len(set(self.hosts)) * len(self.seeds_apart) * self.steps
        return len(self.cells) * self.rounds + losses

    def task(self, **changes: Any) -> Task:
        """Return the task for the ranks of a cell.

        Args:
            **changes: Fields of `Task` that differ from its defaults.
        """
        usual = {"steps": self.steps, "with_torch": self.with_torch}
        return Task(self.workload, self.programs, bucket_mb=self.bucket_mb, **{**usual, **changes})


def run_grid(
    grid: Grid,
    path: Path,
    command: str,
    *,
    fresh: bool,
    on_progress: OnProgress,
    on_line: Callable[[str], None],
) -> Results:
    """Run every cell that `path` does not hold yet, and save after each.

    A cell that fails is kept with its error and runs again next time.

    Args:
        grid: The settings.
        path: The results file. If it exists, the run is resumed from it.
        command: The command line to record.
        fresh: Overwrite `path` instead of resuming it.
        on_progress: Called when a cell begins and after its rounds.
        on_line: Called with every line that a rank prints.

    Returns:
        All cells of the file, old and new.

    Raises:
        StateError: `path` holds a benchmark with other settings, or cannot be read or written.
    """
    results = _resumed(grid, path, fresh=fresh) or Results(command, _settings(grid), machine())
    results.command = command
    done = {cell.key for cell in results.cells if cell.error is None}
    apart: dict[int, Apart] = {}
    # A cell is saved as soon as it is measured, with its error if it failed. A resumed run measures the
    # missing and the failed cells.
    for hosts, link in grid.cells:
        label = f"{hosts} hosts, {link}"
        if (grid.workload, hosts, link) in done:
            on_progress(label, grid.rounds)
            continue
        results.cells = [cell for cell in results.cells if cell.key != (grid.workload, hosts, link)]
        cell = Cell(grid.workload, hosts, link, network=label)
        try:
            if hosts not in apart:
                known = Apart.of(results, hosts) if grid.timed is not None else None
                apart[hosts] = known or _measure_apart(grid, hosts, on_progress, on_line)
            on_progress(label, 0)
            cell = _measure(grid, hosts, link, partial(_on_round, on_progress, label), on_line)
            apart[hosts].add_to(cell.tracks, first_seed=grid.timed is not None)
        except LabError as error:
            cell.error = str(error)
        results.cells.append(cell)
        results.save(path, summarize(results))
    return results


@dataclass(frozen=True)
class Apart:
    """Measurements that do not depend on the network and are taken separately.

    Attributes:
        memory: The peak memory of each contestant.
        losses: The losses of each contestant, by seed.
    """

    memory: list[int]
    losses: list[list[list[tuple[int, float]]]]

    @classmethod
    def of(cls, results: Results, hosts: int) -> "Apart | None":
        """Return the measurements of an earlier run for a world size and the same settings, or None.

        Args:
            results: The results of a run whose losses were all trained over loopback.
            hosts: The world size.
        """
        cell = next((known for known in results.cells if known.hosts == hosts and known.error is None), None)
        if cell is None or any(track.peak_memory is None for track in cell.tracks):
            return None
        by_seed = zip(*([track.losses, *track.seed_losses] for track in cell.tracks), strict=True)
        return cls([track.peak_memory or 0 for track in cell.tracks], [list(seed) for seed in by_seed])

    def add_to(self, tracks: list[Track], *, first_seed: bool = False) -> None:
        """Add it to the measurements of contestants in the same order.

        Args:
            tracks: The measurements.
            first_seed: Whether the first losses are of the seed that was timed on the link.
        """
        for number, track in enumerate(tracks):
            if not track.unavailable:
                track.peak_memory = self.memory[number]
                by_seed = [losses[number] for losses in self.losses]
                if first_seed:
                    track.losses, *by_seed = by_seed
                track.seed_losses = by_seed


def _measure_apart(grid: Grid, hosts: int, on_progress: OnProgress, on_line: Callable[[str], None]) -> Apart:
    """Measure memory over loopback, and the losses of all seeds that no link measures."""
    on_progress(f"{hosts} hosts, peak memory", 0)
    memory = _run(Loopback(hosts), grid.task(memory=True), on_line)["memory"]
    losses = []
    for seed in grid.seeds_apart:
        label = f"{hosts} hosts, losses of seed {seed}"
        on_progress(label, 0)
        task = grid.task(losses=True, seed=seed)
        losses.append(_run(Loopback(hosts), task, on_line, partial(_on_round, on_progress, label))["losses"])
    return Apart(memory, losses)


def _on_round(on_progress: OnProgress, label: str, kind: str, done: int) -> None:
    if kind == "round":
        on_progress(label, done)
    else:
        on_progress(f"{label}, overtime", 0)


def _measure(grid: Grid, hosts: int, link: str, on_round: OnRound, on_line: Callable[[str], None]) -> Cell:
    with _network(hosts, link) as (where, words):
        task = grid.task(steps=grid.rounds, probe=link == LOOPBACK, overtime=grid.timed is None)
        meter = LoadMeter()
        reported = _run(where, task, on_line, on_round)
        load = meter.read()
    rate = reported["rate"] if link == LOOPBACK else parse_rate(link)
    tracks = [Track(**track) for track in reported["tracks"]]
    cell = Cell(grid.workload, hosts, link, words, rate, reported["parameters"], tracks)
    cell.cores, cell.other_cores = load.cores, load.others
    return cell


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
    """Run a task on every host, and return the reports of rank 0 by kind."""
    reported: dict[str, Any] = {}
    errors: dict[int, str] = {}

    def listen(host: int, stream: str, line: str) -> None:
        if not line.startswith(MARK):
            if line.strip() and "hostname of the client socket" not in line:  # loopback has no names
                on_line(f"host {host} | {line}")
            return
        kind, value = json.loads(line.removeprefix(MARK))
        if kind in ("round", "overtime"):
            on_round(kind, value)
        elif kind == "error":
            errors.setdefault(host, value)
        else:
            reported[kind] = value

    command = [
        "env",
        f"{ON_CPU}=1",
        sys.executable,
        "-m",
        "thinwire.tools.bench.worker",
        json.dumps(asdict(task)),
    ]
    finished = run_on(hosts, command, listen)
    if finished.exit_code:
        ended = f"host {finished.failed_host} ended with exit code {finished.exit_code}"
        raise LabError(cause_of(errors) or ended)
    if task.result not in reported:
        raise LabError("host 0 ended before it had measured, with exit code 0: the model's code ended it")
    return reported


def cause_of(errors: Mapping[int, str]) -> str:
    """Return the error that made a run fail, with its host, or an empty text.

    When a host fails, the others lose their connections to it, and their errors may arrive first. So an error
    that is not a lost connection is preferred, then the lowest host.

    >>> cause_of({0: "RuntimeError: Connection closed by peer [10.0.0.2]:1", 1: "ValueError: no data"})
    'host 1: ValueError: no data'
    """
    for host, text in sorted(errors.items(), key=lambda item: (_is_lost_connection(item[1]), item[0])):
        return f"host {host}: {text}"
    return ""


def _is_lost_connection(text: str) -> bool:
    """Return whether an error may be the consequence of another host's failure."""
    return any(sign in text for sign in _LOST)


def _resumed(grid: Grid, path: Path, *, fresh: bool) -> Results | None:
    if fresh or not path.exists():
        return None
    results = Results.load(path)
    wanted = _settings(grid)
    different = sorted(key for key in wanted if results.settings.get(key) != wanted[key])
    if different:
        raise StateError(
            f"{path} holds a benchmark that differs in {', '.join(different)}: choose another --out, or"
            " --fresh to replace it"
        )
    return results


def _settings(grid: Grid) -> dict[str, Any]:
    """Return the settings that must be equal to resume. Links and world sizes may be added between runs."""
    fixed = {key: value for key, value in asdict(grid).items() if key not in ("links", "hosts")}
    return {**json.loads(json.dumps(fixed)), **machine()}


def machine() -> dict[str, str]:
    """Return a description of this machine and its software, for the results file."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "processor": next(models, platform.machine()),
        "cores": str(os.cpu_count()),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "thinwire": __version__,
        THREADS: os.environ.get("OMP_NUM_THREADS", "cores / hosts"),
    }
