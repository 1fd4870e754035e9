"""The benchmark on a real network, run by every rank of a torchrun job."""

import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from thinwire.errors import OptionError, StateError
from thinwire.plan.units import show_rate
from thinwire.tools.bench.advice import summarize
from thinwire.tools.bench.grid import Apart, Grid, machine
from thinwire.tools.bench.load import LoadMeter
from thinwire.tools.bench.measure import OnRound
from thinwire.tools.bench.results import REAL_LINK, Cell, Results, Track
from thinwire.tools.bench.worker import served_store, work

_FIRST_SEED = 1000
"""The process groups of seeds have numbers above this, those of peak memory have numbers below."""


def under_torchrun() -> bool:
    """Return whether this process was started as a rank, by torchrun or a similar launcher."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= set(os.environ)


def run_here(grid: Grid, path: Path, command: str, *, fresh: bool, on_round: OnRound) -> Results | None:
    """Measure the network between the ranks of this job. Every rank must call it.

    Args:
        grid: The settings. Its links and hosts are ignored.
        path: The results file, written by rank 0.
        command: The command line to record.
        fresh: Overwrite `path` if it exists.
        on_round: Called after every round.

    Returns:
        The results on rank 0, None on other ranks.

    Raises:
        OptionError: The job has one rank only, or `grid.timed` is set.
        StateError: `path` exists and `fresh` is false.
    """
    hosts = int(os.environ["WORLD_SIZE"])
    if hosts < 2:
        raise OptionError(f"WORLD_SIZE={hosts} must be at least 2: one rank sends nothing")
    if grid.timed is not None:
        raise OptionError(
            f"timed={grid.timed} is for emulated links: it trains for losses over loopback, which hosts of a"
            " real network do not share; leave it out"
        )
    if path.exists() and not fresh and os.environ["RANK"] == "0":
        raise StateError(f"{path} exists: choose another --out, or --fresh to replace it")
    reported: dict[str, Any] = {}

    def listen(kind: str, value: Any) -> None:
        if kind in ("round", "overtime"):
            on_round(kind, value)
        else:
            reported[kind] = value

    losses = []
    with redirect_stdout(sys.stderr):  # stdout is for results, and the user's model may print
        with served_store():
            work(grid.task(memory=True), listen)
            for seed in range(1, grid.seeds):
                work(grid.task(losses=True, seed=seed), listen, number=_FIRST_SEED + seed)
                losses.append(reported["losses"])
        meter = LoadMeter(copies=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        work(grid.task(probe=True), listen)
        load = meter.read()
    if os.environ["RANK"] != "0":
        return None
    tracks = [Track(**track) for track in reported["tracks"]]
    Apart(reported["memory"], losses).add_to(tracks)
    rate = reported["rate"]
    network = os.environ.get("THINWIRE_LAB") or f"{hosts} ranks at {show_rate(rate)} (measured)"
    cell = Cell(grid.workload, hosts, REAL_LINK, network, rate, reported["parameters"], tracks)
    cell.cores, cell.other_cores = load.cores, load.others
    results = Results(command, {"workload": grid.workload, "steps": grid.steps}, machine(), [cell])
    results.save(path, summarize(results))
    return results
