"""Lightning Fabric with thinwire: one line after `setup`.

torchrun --standalone --nproc-per-node 2 examples/train_fabric.py --program "Int8()"
"""

from typing import Any

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

import thinwire.integrations.fabric
from examples import tiny
from thinwire.integrations import Metrics
from thinwire.integrations.fabric import State


def train(options: tiny.Options, loggers: Any = None) -> dict[str, Any]:
    """Train to `options.steps`, and return what it has led to on this rank."""
    fabric = Fabric(
        accelerator="cpu",
        devices=int(torch.distributed.get_world_size()) if torch.distributed.is_initialized() else 2,
        strategy="ddp",
        precision="bf16-mixed" if options.bf16 else "32-true",
        loggers=loggers,
    )
    fabric.launch()
    module: Any = tiny.model()
    if options.compiled:
        module = torch.compile(module, backend="eager")
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4)
    model, optimizer = fabric.setup(module, optimizer)

    wire = thinwire.integrations.fabric.attach(fabric, model, tiny.program(options), optimizer=optimizer)
    metrics = Metrics(wire)

    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
    state["thinwire"] = State(wire)
    if options.resume:
        fabric.load(options.folder / "saved.ckpt", state)
    batches = list(DataLoader(tiny.Rows(), batch_size=8))[fabric.global_rank :: fabric.world_size]
    for step in range(state["step"], options.steps):
        for micro in range(options.accumulate):
            rows = batches[step * options.accumulate + micro]
            with fabric.no_backward_sync(model, enabled=micro < options.accumulate - 1):
                loss = tiny.loss_of(model(rows), rows)
                fabric.backward(loss / options.accumulate)
        if options.clip:
            fabric.clip_gradients(model, optimizer, max_norm=options.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        fabric.log_dict({"loss": loss.item(), **metrics()}, step=step)
        if step + 1 == options.save_at:
            fabric.save(options.folder / "saved.ckpt", {**state, "step": step + 1})
    wire.finalize()
    return tiny.result(wire, module)


if __name__ == "__main__":
    tiny.show(train(tiny.parsed(__doc__)))
