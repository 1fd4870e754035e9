"""The benchmark on a real network: every rank of a torchrun job calls it, and rank 0 has the results."""

import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from thinwire.bench.grid import Grid, machine
from thinwire.bench.measure import OnRound
from thinwire.bench.results import Cell, Results, Track
from thinwire.bench.summary import summarize
from thinwire.bench.worker import work
from thinwire.errors import OptionError, StateError
from thinwire.lab.rate import show_rate

LINK = "this network"


def under_torchrun() -> bool:
    """Whether somebody has started this process as a rank already."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= set(os.environ)


def run_here(grid: Grid, path: Path, command: str, *, fresh: bool, on_round: OnRound) -> Results | None:
    """Measure between the ranks of this job; the results on rank 0, None on the others."""
    hosts = int(os.environ["WORLD_SIZE"])
    if hosts < 2:
        raise OptionError(f"WORLD_SIZE={hosts} must be at least 2: one rank sends nothing")
    if path.exists() and not fresh and os.environ["RANK"] == "0":
        raise StateError(f"{path} exists: choose another --out, or --fresh to replace it")
    heard: dict[str, Any] = {}

    def listen(kind: str, value: Any) -> None:
        if kind in ("round", "overtime"):
            on_round(kind, value)
        else:
            heard[kind] = value

    with redirect_stdout(sys.stderr):  # what a user's model prints is no data of ours
        work(grid.task(memory=True), listen)
        work(grid.task(probe=True), listen)
    if os.environ["RANK"] != "0":
        return None
    tracks = [Track(**track) for track in heard["tracks"]]
    for track, memory in zip(tracks, heard["memory"], strict=True):
        track.peak_memory = None if track.unavailable else memory
    rate = heard["rate"]
    network = os.environ.get("THINWIRE_LAB") or f"{hosts} ranks at {show_rate(rate)} (measured)"
    cell = Cell(grid.workload, hosts, LINK, network, rate, heard["parameters"], tracks)
    results = Results(command, {"workload": grid.workload, "steps": grid.steps}, machine(), [cell])
    results.save(path, summarize(results))
    return results
