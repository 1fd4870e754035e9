"""`thinwire bench` as a user runs it, on a model so small that it takes seconds."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MODEL = ("--model", "beside:build", "--steps", "8", "--bucket-mb", "0.1")
BESIDE = """
import sys, torch
from tests.models import LossOfMLP, batch
print("hello from the import")

class Talkative(LossOfMLP):
    def forward(self, x):
        sys.stdout.write(".")
        return super().forward(x)

def build():
    return Talkative(), lambda rank, step: batch(rank, step, width=128, rows=16)
"""
"""A model that prints whenever it can, in a module that only the user's folder has."""


def thinwire(
    *words: str, launcher: tuple[str, ...] = ("thinwire",), folder: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *launcher, *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=110, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("bench")
    (place / "beside.py").write_text(BESIDE)
    return place


@pytest.fixture(scope="module")
def finished(folder: Path) -> tuple[Path, subprocess.CompletedProcess[str]]:
    path = folder / "bench.json"
    words = ("bench", *MODEL, "--programs", "exact,bf16", "--links", "50mbit", "--out", str(path), "--json")
    return path, thinwire(*words, folder=folder)


def rows_of(text: str) -> dict[str, dict[str, Any]]:
    (cell,) = json.loads(text)
    return {row["name"]: row for row in cell["rows"]}


def test_it_prints_a_summary_of_all_contestants(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    _, process = finished
    assert process.returncode == 0, process.stderr
    rows = rows_of(process.stdout)
    assert list(rows) == ["DDP", "Exact", "torch allreduce_hook", "BF16", "torch bf16_compress_hook"]
    assert "NCCL" in rows["torch bf16_compress_hook"]["unavailable"]
    for name in ("DDP", "Exact", "torch allreduce_hook", "BF16"):
        row = rows[name]
        assert row["loss"] < row["loss_at_time"] + 1e-6
        assert row["peak_memory"] > 50e6
        assert row["step"][0] <= row["step"][1] <= row["step"][2]
        assert row["floor"] > 0
    assert rows["Exact"]["loss"] == rows["DDP"]["loss"], "the exact mean is the same to the bit"


def test_meter_and_device_agree(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    rows = rows_of(finished[1].stdout)
    for name in ("Exact", "BF16"):
        meter, device = rows[name]["meter_bytes"], rows[name]["device_bytes"]
        assert meter <= device < 1.05 * meter, name
    half = rows["Exact"]["meter_bytes"] / 2
    assert half < rows["BF16"]["meter_bytes"] < 1.02 * half  # biases travel as they are
    assert rows["DDP"]["device_bytes"] == pytest.approx(rows["Exact"]["device_bytes"], rel=0.02)


def test_other_settings_do_not_overwrite(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    path, _ = finished
    process = thinwire("bench", *MODEL, "--programs", "exact", "--out", str(path), folder=path.parent)
    assert process.returncode == 1
    assert "holds a benchmark with another programs" in process.stderr
    assert "--fresh" in process.stderr
    assert "Traceback" not in process.stderr


def test_a_model_that_fails_on_one_host_is_one_line_and_the_file_keeps_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    words = ("--model", "tests.models:broken_for_bench", "--steps", "8", "--programs", "exact", "--no-torch")
    process = thinwire("bench", *words, "--links", "1gbit", "--out", str(path))
    assert process.returncode == 1
    assert "the data of rank 1 ended" in process.stderr
    assert "host 1: ValueError: the data of rank 1 ended" in process.stdout.replace("\n", " ")
    assert "the data of rank 1 ended" in json.loads(path.read_text())["cells"][0]["error"]


def test_under_torchrun_it_measures_the_network_that_is_there(tmp_path: Path, folder: Path) -> None:
    torchrun = ("torch.distributed.run", "--nproc-per-node", "2", "-m", "thinwire")
    words = (
        "bench",
        *MODEL,
        "--programs",
        "exact",
        "--no-torch",
        "--out",
        str(tmp_path / "b.json"),
        "--json",
    )
    process = thinwire(*words, launcher=torchrun, folder=folder)
    assert process.returncode == 0, process.stderr
    (cell,) = json.loads(process.stdout)
    assert cell["hosts"] == 2
    assert "(measured)" in cell["network"]
    exact = rows_of(process.stdout)["Exact"]
    assert exact["meter_bytes"] <= exact["device_bytes"] < 1.05 * exact["meter_bytes"]
