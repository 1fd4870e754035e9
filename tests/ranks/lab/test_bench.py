"""`thinwire bench` as a user runs it, on a model so small that it takes seconds."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
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


ALONE = ("unshare", "-Urn", "sh", "-c", 'ip link set lo up && exec "$0" "$@"')
"""Runs a command on a loopback of its own, whose counters other tests do not change."""


def thinwire(
    *words: str, launcher: tuple[str, ...] = ("thinwire",), folder: Path = ROOT, before: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    command = [*before, sys.executable, "-m", *launcher, *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)


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
    assert list(rows) == ["DDP", "Exact", "torch allreduce_hook", "BF16", "torch fp16_compress_hook"]
    for row in rows.values():
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


def test_floors_begin_with_the_first_gradient(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    path, process = finished
    rows = rows_of(process.stdout)
    alone = json.loads(path.read_text())["cells"][0]["tracks"][-1]
    assert alone["kind"] == "alone"
    for first, optimizer, step in zip(
        alone["first_gradient_seconds"], alone["optimizer_seconds"], alone["step_seconds"], strict=True
    ):
        assert 0 < first < 1.01 * step, "each is that of the slowest rank, and these may be two ranks"
        assert 0 < optimizer < 1.01 * step
    for row in rows.values():
        assert 0 < row["link_floor"] < row["floor"]
        assert row["bucket_mb"] == 0.1, "--bucket-mb is for all"
    assert rows["Exact"]["link_floor"] == pytest.approx(8 * rows["Exact"]["meter_bytes"] / 50e6)


@pytest.mark.slow
def test_averaged_models_and_sharded_optimizers_compete_with_torchs_own(folder: Path) -> None:
    programs = "exact,LocalSGD(period=2),ZeRO,DiLoCo(period=2,program=Int8)"
    words = ("bench", *MODEL, "--programs", programs, "--links", "loopback", "--seeds", "2", "--json")
    process = thinwire(*words, "--out", str(folder / "strategies.json"), folder=folder)
    assert process.returncode == 0, process.stderr
    rows = rows_of(process.stdout)
    exact, local, zero = rows["Exact"], rows["LocalSGD(period=2)"], rows["ZeRO"]
    assert local["meter_bytes"] == pytest.approx(exact["meter_bytes"] / 2, rel=0.01), (
        "one exchange in two steps"
    )
    assert rows["DiLoCo(period=2,program=Int8)"]["meter_bytes"] < 0.3 * local["meter_bytes"]
    assert zero["meter_bytes"] == pytest.approx(exact["meter_bytes"], rel=0.02)
    assert zero["loss"] == pytest.approx(exact["loss"], rel=1e-5)
    torchs = rows["torch PostLocalSGDOptimizer period 2"]
    assert torchs["unavailable"] is None
    assert local["loss"] == pytest.approx(torchs["loss"], rel=0.02)
    assert rows["torch ZeroRedundancyOptimizer"]["loss"] == pytest.approx(exact["loss"], rel=1e-5)
    assert exact["loss_spread"] > 0
    assert exact["gap_spread"] == 0, "each seed is compared with plain DDP's of the same seed"


def test_other_settings_do_not_overwrite(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    path, _ = finished
    process = thinwire("bench", *MODEL, "--programs", "exact", "--out", str(path), folder=path.parent)
    assert process.returncode == 1
    assert "holds a benchmark that differs in programs: choose" in process.stderr
    assert "--fresh" in process.stderr
    assert "Traceback" not in process.stderr


@pytest.mark.slow
def test_a_model_that_fails_on_one_host_is_one_line_and_the_file_keeps_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    words = ("--model", "tests.models:broken_for_bench", "--steps", "8", "--programs", "exact", "--no-torch")
    process = thinwire("bench", *words, "--links", "1gbit", "--out", str(path))
    assert process.returncode == 1
    assert "the data of rank 1 ended" in process.stderr
    assert "host 1: ValueError: the data of rank 1 ended" in process.stdout.replace("\n", " ")
    assert "the data of rank 1 ended" in json.loads(path.read_text())["cells"][0]["error"]


@pytest.mark.slow
def test_under_torchrun_it_measures_the_network_that_is_there(tmp_path: Path, folder: Path) -> None:
    torchrun = ("torch.distributed.run", "--nproc-per-node", "2", "-m", "thinwire")
    words = (
        "bench",
        *MODEL,
        "--programs",
        "exact",
        "--no-torch",
        "--seeds",
        "2",
        "--out",
        str(tmp_path / "b.json"),
        "--json",
    )
    process = thinwire(*words, launcher=torchrun, folder=folder, before=ALONE)
    assert process.returncode == 0, process.stderr
    (cell,) = json.loads(process.stdout)
    assert cell["hosts"] == 2
    assert "(measured)" in cell["network"]
    exact = rows_of(process.stdout)["Exact"]
    assert exact["loss_spread"] > 0, "the seeds' losses differ"
    assert exact["meter_bytes"] <= exact["device_bytes"] < 1.05 * exact["meter_bytes"]
