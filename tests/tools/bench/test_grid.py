"""The grid without its ranks: what is measured again, and what is not."""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from thinwire import OptionError, StateError
from thinwire.errors import LabError
from thinwire.tools.bench import grid as grid_module
from thinwire.tools.bench import real, worker
from thinwire.tools.bench.grid import Grid, cause_of, run_grid
from thinwire.tools.bench.results import Cell, Track
from thinwire.tools.lab.hosts import Loopback
from thinwire.tools.lab.run import Finished

TRACKS = [Track("DDP", "ddp", ""), Track("Exact", "thinwire", "exact"), Track("alone", "alone", "")]
for one in TRACKS:
    one.step_seconds = one.device_bytes = [1.0] * 8
    one.losses = [(0, 4.0), (8, 3.0)]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Which cells were measured, instead of measuring them."""
    cells: list[tuple[int, str]] = []

    def measure(grid: Grid, hosts: int, link: str, *args: Any) -> Cell:
        cells.append((hosts, link))
        if link == "2gbit" and cells.count((hosts, link)) == 1:
            raise LabError("host 1 died")
        return Cell(grid.workload, hosts, link, f"{hosts} hosts at {link}", 10**9, 7, TRACKS)

    monkeypatch.setattr(grid_module, "_measure", measure)
    monkeypatch.setattr(
        grid_module,
        "_run",
        lambda hosts, task, *args: {
            "losses": [[(8, task.seed + part)] for part in (0.1, 0.2, 0.0)],
            "memory": [1, 2, 3],
        },
    )
    return cells


def run(path: Path, links: str, *, fresh: bool = False, **changes: Any) -> list[dict[str, Any]]:
    settings = {"workload": "conv", "programs": ("exact",), "steps": 8, "with_torch": False, **changes}
    grid = Grid(links=tuple(links.split(",")), hosts=(2,), **settings)
    run_grid(grid, path, f"bench {links}", fresh=fresh, on_progress=lambda *_: None, on_line=lambda _: None)
    cells: list[dict[str, Any]] = json.loads(path.read_text())["cells"]
    return cells


def test_ranks_that_end_without_a_result_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a model that calls os._exit(0)."""
    monkeypatch.setattr(grid_module, "run_on", lambda *args: Finished(0, None, 1.0, None))
    task = Grid(workload="conv", programs=("exact",), links=("loopback",), hosts=(2,), steps=8).task()
    with pytest.raises(LabError, match="host 0 ended before it had measured, with exit code 0"):
        grid_module._run(Loopback(2), task, lambda line: None)


def test_a_rank_whose_model_ends_the_process_reports_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ends(*args: Any) -> None:
        sys.exit(0)

    task = Grid(workload="conv", programs=("exact",), links=("loopback",), hosts=(2,), steps=8).task()
    monkeypatch.setattr(sys, "argv", ["worker", json.dumps(asdict(task))])
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(worker, "work", ends)
    monkeypatch.setattr(worker, "_end_with_parent", lambda: None)
    with pytest.raises(SystemExit) as ended:
        worker.main()
    assert ended.value.code == 1
    assert "the model's code called sys.exit(0)" in capsys.readouterr().out


def test_finished_cells_are_not_measured_again(tmp_path: Path, measured: list[tuple[int, str]]) -> None:
    path = tmp_path / "b.json"
    run(path, "1gbit")
    cells = run(path, "1gbit,3gbit,1gbit")
    assert measured == [(2, "1gbit"), (2, "3gbit")]
    assert [cell["link"] for cell in cells] == ["1gbit", "3gbit"]
    assert json.loads(path.read_text())["command"] == "bench 1gbit,3gbit,1gbit"
    assert [track["peak_memory"] for track in cells[0]["tracks"]] == [1, 2, 3]


def test_further_seeds_are_trained_once_for_all_links(
    tmp_path: Path, measured: list[tuple[int, str]]
) -> None:
    cells = run(tmp_path / "b.json", "1gbit,3gbit", seeds=3)
    for cell in cells:
        found = [[loss for ((_, loss),) in track["seed_losses"]] for track in cell["tracks"]]
        assert found == [[1.1, 2.1], [1.2, 2.2], [1.0, 2.0]]


def test_with_timed_rounds_losses_of_all_seeds_are_trained_over_loopback(
    tmp_path: Path, measured: list[tuple[int, str]]
) -> None:
    cells = run(tmp_path / "b.json", "1gbit,3gbit", seeds=2, steps=20, timed=8)
    for cell in cells:
        assert [track["losses"] for track in cell["tracks"]] == [[[8, 0.1]], [[8, 0.2]], [[8, 0.0]]]
        assert [track["seed_losses"] for track in cell["tracks"]] == [
            [[[8, 1.1]]],
            [[[8, 1.2]]],
            [[[8, 1.0]]],
        ]


def test_losses_over_loopback_are_not_trained_again_for_links_that_are_added(
    tmp_path: Path, measured: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path / "b.json", "1gbit", seeds=2, steps=20, timed=8)
    monkeypatch.setattr(grid_module, "_run", None)
    first, added = run(tmp_path / "b.json", "1gbit,3gbit", seeds=2, steps=20, timed=8)
    for key in ("losses", "seed_losses", "peak_memory"):
        assert [track[key] for track in added["tracks"]] == [track[key] for track in first["tracks"]]


def test_progress_counts_rounds_of_links_and_of_losses() -> None:
    grid = Grid(
        workload="conv", programs=("exact",), links=("1gbit", "3gbit"), hosts=(2, 4), steps=20, seeds=3
    )
    assert grid.all_rounds == 4 * 20 + 2 * 2 * 20
    assert replace(grid, timed=8).all_rounds == 4 * 8 + 2 * 3 * 20


def test_timed_rounds_are_checked(tmp_path: Path, measured: list[tuple[int, str]]) -> None:
    with pytest.raises(OptionError, match=r"timed=30 exceeds steps=20: time no more than is trained"):
        run(tmp_path / "b.json", "1gbit", steps=20, timed=30)
    with pytest.raises(OptionError, match=r"timed=10 is too few for DiLoCo\(period=16\): .* use --timed 35"):
        run(tmp_path / "b.json", "1gbit", steps=60, timed=10, programs=("DiLoCo(period=16)",))


def test_a_cell_that_failed_is_kept_and_tried_again(tmp_path: Path, measured: list[tuple[int, str]]) -> None:
    path = tmp_path / "b.json"
    first, second = run(path, "2gbit,1gbit")
    assert first["error"] == "host 1 died"
    assert second["error"] is None
    cells = run(path, "2gbit,1gbit")
    assert [cell["error"] for cell in cells] == [None, None]
    assert measured == [(2, "2gbit"), (2, "1gbit"), (2, "2gbit")]


def test_other_settings_or_threads_are_not_mixed(
    tmp_path: Path, measured: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "b.json"
    run(path, "1gbit")
    with pytest.raises(StateError, match="differs in steps"):
        run(path, "1gbit", steps=9)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with pytest.raises(StateError, match="differs in threads per rank"):
        run(path, "1gbit")
    run(path, "1gbit", fresh=True)
    assert len(measured) == 2


def test_a_real_network_needs_two_ranks_and_a_free_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = Grid(workload="conv", programs=("exact",), links=("1gbit",), hosts=(2,), steps=8)
    path = tmp_path / "b.json"
    path.touch()
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "x", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert real.under_torchrun()
    with pytest.raises(OptionError, match="WORLD_SIZE=1 must be at least 2"):
        real.run_here(grid, path, "", fresh=False, on_round=lambda *_: None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(StateError, match="exists: choose another --out"):
        real.run_here(grid, path, "", fresh=False, on_round=lambda *_: None)


def test_a_lost_connection_is_not_the_cause_where_a_host_failed_by_itself() -> None:
    lost = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.3]:1"
    wire = "WireError: No word from rank 1 within 30 s"
    own = "ValueError: the data of rank 1 ended"
    for errors in ({0: lost, 1: own, 2: wire}, {2: wire, 1: own, 0: lost}):
        assert cause_of(errors) == f"host 1: {own}", "whichever was read first"
    assert cause_of({2: wire, 0: lost}) == f"host 0: {lost}"
    assert cause_of({}) == ""
