"""Ray Train with thinwire: one line after `prepare_model`.

    python examples/train_ray.py --program "Int8()" --save-at 3 --folder ray-results

A worker that dies is restarted with the others, and training continues from the last checkpoint.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

import thinwire
from examples import tiny
from thinwire.integrations import Metrics


def train_worker(config: dict[str, Any]) -> None:
    """Train on one worker. Ray calls it on every one."""
    options, rank = tiny.Options(**config["options"]), ray.train.get_context().get_world_rank()
    size = ray.train.get_context().get_world_size()
    module = tiny.model()
    ddp = ray.train.torch.prepare_model(module)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)

    wire = thinwire.attach(ddp, tiny.program(options), optimizer=optimizer)
    state, metrics = thinwire.GatheredState(wire), Metrics(wire)

    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / "job.pt")
        module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        state.load_state_dict(saved["thinwire"])  # on every worker, after model and optimizer
    for step in range(wire.step, options.steps):
        if checkpoint is None and (step, rank) == (config.get("kill_at"), 1):
            os._exit(1)  # as if its host were lost, in the first run only
        rows = tiny.Rows().rows[8 * (step * size + rank) :][:8]
        optimizer.zero_grad()
        loss = tiny.loss_of(ddp(rows), rows)
        loss.backward()
        optimizer.step()
        report({"loss": loss.item(), **metrics()}, options, (module, optimizer, state, wire))
    wire.finalize()
    tiny.show(tiny.result(wire, module), options.folder / f"result-{rank}.json")


def report(figures: dict[str, Any], options: tiny.Options, job: tuple[Any, ...]) -> None:
    """Report a step's figures to Ray, with a checkpoint every `save_at` steps."""
    module, optimizer, state, wire = job
    if not options.save_at or wire.step % options.save_at:
        ray.train.report(figures)
        return
    gathered = state.state_dict()  # on every worker
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if ray.train.get_context().get_world_rank() == 0:
            saved = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "thinwire": gathered}
            torch.save(saved, Path(folder) / "job.pt")
            checkpoint = Checkpoint.from_directory(folder)
        ray.train.report(figures, checkpoint=checkpoint)


def train(options: tiny.Options, workers: int = 2, **config: Any) -> Any:
    """Train with Ray, and return its result."""
    folder = str(options.folder.resolve())
    trainer = TorchTrainer(
        train_worker,
        train_loop_config={"options": {**vars(options), "folder": options.folder.resolve()}, **config},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(name="tiny", storage_path=folder, failure_config=FailureConfig(max_failures=1)),
    )
    return trainer.fit()


if __name__ == "__main__":
    train(tiny.parsed(__doc__))
