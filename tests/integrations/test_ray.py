"""Ray Train: its own launcher, workers, reports and restarts."""

import json
import os
import subprocess
import sys
from pathlib import Path

from examples import tiny
from tests.integrations.frameworks import on_ranks, plain
from tests.surface.test_docs import python_blocks

SCRIPT = """
import sys
from pathlib import Path

import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from examples import tiny, train_ray

options = tiny.Options(program="DiLoCo(4, program=Int8())", save_at=3, folder=Path(sys.argv[1]))
metrics = train_ray.train(options, kill_at=5).metrics
assert metrics["thinwire/overflows"] == 0, metrics
assert metrics["thinwire/exposed_seconds"] >= 0, metrics
assert "thinwire/bytes_per_step" in metrics, metrics
shown = {}
exec(sys.argv[2], shown)  # the page's worker

def make():
    model = tiny.model()
    return model, torch.optim.AdamW(model.parameters()), [torch.ones(2, tiny.WIDTH)] * 2, torch.Tensor.sum

trainer = TorchTrainer(
    shown["train_worker"],
    train_loop_config={"make": make},
    torch_config=TorchConfig(backend="gloo"),
    scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
    run_config=RunConfig(name="page", storage_path=sys.argv[1]),
)
result = trainer.fit()
assert result.metrics["thinwire/compression"] > 3.5, result.metrics
with result.checkpoint.as_directory() as folder:
    saved = torch.load(f"{folder}/job.pt")
assert sorted(saved) == ["model", "optimizer", "thinwire"]
"""


def expected(rank: int) -> str:
    options = tiny.Options(program="DiLoCo(4, program=Int8())")
    digest: str = plain(rank, options, inside=False, lr_every=1000)["digest"]
    return digest


def test_a_worker_dies_and_the_restarted_job_ends_as_without_the_loss(tmp_path: Path) -> None:
    """The checkpoint lies between two averages, so every worker has a model and moments of its own.

    In the same Ray, the worker of the page trains.
    """
    environment = {**os.environ, "RAY_TRAIN_V2_ENABLED": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    (page,) = python_blocks("docs/integrations/ray.md")
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), page]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=850, check=False)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    results = [json.loads((tmp_path / f"result-{rank}.json").read_text()) for rank in range(2)]
    assert [one["step"] for one in results] == [8, 8]
    assert [one["digest"] for one in results] == on_ranks(expected, 2)
    assert results[0]["ddp_bytes"] == 5 * 33408, "of the five steps since the checkpoint"
