"""Ray Train: its own launcher, workers, reports and restarts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples import tiny
from tests.integrations.frameworks import on_ranks, plain

SCRIPT = """
import sys
from pathlib import Path
from examples import tiny, train_ray
options = tiny.Options(program="DiLoCo(4, program=Int8())", save_at=3, folder=Path(sys.argv[1]))
metrics = train_ray.train(options, kill_at=5).metrics
assert metrics["thinwire/overflows"] == 0, metrics
assert metrics["thinwire/exposed_seconds"] >= 0, metrics
assert "thinwire/bytes_per_step" in metrics, metrics
"""


def expected(rank: int) -> str:
    options = tiny.Options(program="DiLoCo(4, program=Int8())")
    digest: str = plain(rank, options, inside=False, lr_every=1000)["digest"]
    return digest


@pytest.mark.timeout(300)  # Ray starts, stops and starts its workers
def test_a_worker_dies_and_the_restarted_job_ends_as_without_the_loss(tmp_path: Path) -> None:
    """The checkpoint lies between two averages, so every worker has a model and moments of its own."""
    environment = {**os.environ, "RAY_TRAIN_V2_ENABLED": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    results = [json.loads((tmp_path / f"result-{rank}.json").read_text()) for rank in range(2)]
    assert [one["step"] for one in results] == [8, 8]
    assert [one["digest"] for one in results] == on_ranks(expected, 2)
    assert results[0]["ddp_bytes"] == 5 * 33408, "of the five steps since the checkpoint"
