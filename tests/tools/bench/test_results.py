"""Results on disk."""

import json
import math
from pathlib import Path

import pytest

from thinwire import StateError
from thinwire.tools.bench.grid import Grid
from thinwire.tools.bench.results import Cell, Results, Track, plain

TRACK = Track("DDP", "ddp", "", step_seconds=[1.0, 2.0], losses=[(0, 4.0), (2, 3.0)], peak_memory=5)


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    results = Results(
        "thinwire bench", {"steps": 2}, {"cores": "2"}, [Cell("conv", 2, "1gbit", "x", 10**9, 7, [TRACK])]
    )
    results.save(tmp_path / "r.json", summary=[])
    assert Results.load(tmp_path / "r.json") == results
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "{", '{"format": 99}', '{"format": 1, "cells": [1]}', '{"format": 1, "cells": [{}]}'],
)
def test_what_is_no_results_file_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(StateError, match=r"r\.json"):
        Results.load(path)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="cannot be read"):
        Results.load(tmp_path / "none.json")


def test_the_file_is_plain_json_with_a_summary(tmp_path: Path) -> None:
    Results("c", {}, {}).save(tmp_path / "r.json", summary=[{"advice": "x"}])
    assert json.loads((tmp_path / "r.json").read_text())["summary"] == [{"advice": "x"}]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 3}, "steps=3 must be at least 8"),
        ({"programs": ("LocalSGD(period=4)",)}, r"steps=8 is too few for LocalSGD.* use --steps 11"),
        ({"seeds": 0}, "seeds=0 must be at least 1"),
        ({"bucket_mb": 0}, "bucket_mb=0 must be positive"),
        ({"bucket_mb": float("nan")}, "bucket_mb=nan must be positive"),
        ({"hosts": (1,)}, "hosts=1 must be from 2"),
        ({"links": ("fast",)}, "rate='fast'"),
        ({"programs": ("none",)}, "program='none' is unknown"),
        ({"workload": "bert"}, "workload='bert' is not one of"),
        ({"workload": "tests.nowhere:build"}, "No module named"),
        ({"workload": "tests.models:batch"}, "model='tests.models:batch'"),
    ],
)
def test_a_grid_is_checked_before_anything_runs(change: dict[str, object], message: str) -> None:
    settings: dict[str, object] = {
        "workload": "conv",
        "programs": ("exact",),
        "links": ("1gbit",),
        "hosts": (2,),
        "steps": 8,
    }
    with pytest.raises(ValueError, match=message):
        Grid(**{**settings, **change})  # type: ignore[arg-type]


def test_a_loss_that_is_no_number_is_kept_as_json_can() -> None:
    assert plain({"a": [1.0, float("nan"), (float("inf"),)], "b": "x"}) == {
        "a": [1.0, None, [None]],
        "b": "x",
    }


def test_a_diverged_run_can_be_saved_and_read(tmp_path: Path) -> None:
    track = Track("DDP", "ddp", "", step_seconds=[1.0], losses=[(0, 4.0), (1, float("nan"))])
    Results("c", {}, {}, [Cell("conv", 2, "1gbit", "x", tracks=[track])]).save(
        tmp_path / "r.json", summary=[]
    )
    (_, (step, loss)) = Results.load(tmp_path / "r.json").cells[0].tracks[0].losses
    assert step == 1
    assert math.isnan(loss)


def test_a_folder_cannot_be_written_to(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(StateError, match="cannot be written"):
        Results("c", {}, {}).save(folder, summary=[])
    assert list(tmp_path.iterdir()) == [folder]
