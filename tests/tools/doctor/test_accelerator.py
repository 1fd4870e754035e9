"""`thinwire doctor --accelerator` on the shadow device: it finds nothing, and every planted defect."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import native_build

pytestmark = pytest.mark.slow  # each case is a job under torchrun, whose checks are processes
ROOT = Path(__file__).parents[3]


def doctor(tmp_path: Path, *words: str, planted: str = "") -> tuple[int, str, dict[str, Any]]:
    """Run the command on two ranks. Return its exit code, what it printed, and its report."""
    if reason := native_build.missing(python=True):
        pytest.skip(reason)
    path = tmp_path / "accelerator.json"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "thinwire",
    ]
    command += ["doctor", "--accelerator", "--import", "tests.shadow.planted", "--parameters", "300000"]
    ran = subprocess.run(
        [*command, "--out", str(path), *words],
        cwd=ROOT,
        env={**os.environ, "PLANTED": planted, "PYTHONPATH": f"{ROOT}/src:{ROOT}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return ran.returncode, ran.stdout, json.loads(path.read_text()) if path.exists() else {}


def test_the_shadow_device_passes_every_check(tmp_path: Path) -> None:
    code, printed, report = doctor(tmp_path)
    assert {name: check["verdict"] for name, check in report["checks"].items()} == dict.fromkeys(
        report["checks"], "ok"
    ), printed
    assert len(report["checks"]) == 12
    rates = report["checks"]["rates"]["ranks"][0]["details"]
    assert rates["launch_us"] > 0
    assert rates["memory_gb_per_s"] > 0
    assert rates["planned_as"] is None
    assert code == 0
    assert "no check found anything" in printed


@pytest.mark.parametrize(
    ("planted", "check", "verdict", "text"),
    [
        ("race", "streams", "DIFFERS", "races"),
        ("bits", "bits", "DIFFERS", "numbers differ"),
        ("read", "host reads", "DIFFERS", "the host waits"),
        ("stuck", "overflow", "HUNG", "no result after 45 s"),
    ],
)
def test_a_planted_defect_is_found(tmp_path: Path, planted: str, check: str, verdict: str, text: str) -> None:
    limit = ("--limit", "45") if planted == "stuck" else ()  # before the device's own watchdog ends it
    code, printed, report = doctor(tmp_path, "--only", check, *limit, planted=planted)
    found = report["checks"][check]
    assert code != 0
    assert (found["verdict"], text in found["text"]) == (verdict, True), printed
    if planted == "stuck":
        assert "most recent call first" in found["ranks"][0]["details"]["stacks"]
