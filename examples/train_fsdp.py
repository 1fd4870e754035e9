"""FSDP2 within a site, thinwire between sites.

torchrun --standalone --nproc-per-node 4 examples/train_fsdp.py --replicas 2 --program "Int8()"
thinwire lab --groups 2x2 --rate 100mbit -- python examples/train_fsdp.py --replicas 2 --program "Int8()"

`--native` has FSDP average across replicas itself (HSDP), for comparison. With `--folder` it saves a
checkpoint every ten steps, and continues from the one that is there.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

import thinwire
from thinwire.wire import Wire


class Block(nn.Module):
    """A residual layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what the layer computes."""
        result: torch.Tensor = x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))
        return result


def sharded(mesh: DeviceMesh, width: int, layers: int) -> Any:
    """Return a model with the same values in every replica, each layer sharded on its own."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(layers)), nn.Linear(width, 1))
    for block in list(model)[:-1]:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def loss_of(model: nn.Module, step: int, width: int) -> torch.Tensor:
    """Return the loss on this rank's batch: the model learns a fixed function of its inputs."""
    own = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    x = torch.randn(32, width, generator=own)
    target = (x[:, :8].sin().sum(1, keepdim=True)) + x[:, 8:16].prod(1, keepdim=True)
    result: torch.Tensor = nn.functional.mse_loss(model(x), target)
    return result


def save(folder: Path, model: Any, optimizer: Optimizer, wire: Wire) -> None:
    """Save a checkpoint. Residuals are saved by shard and replica, model and optimizer once."""
    tensors, moments = get_state_dict(model, optimizer)
    dcp.save({"model": tensors, "optimizer": moments, "wire": wire}, checkpoint_id=folder)


def load(folder: Path, model: Any, optimizer: Optimizer, wire: Wire) -> int:
    """Load the checkpoint, and return the number of steps that were taken."""
    tensors, moments = get_state_dict(model, optimizer)
    dcp.load({"model": tensors, "optimizer": moments, "wire": wire}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=tensors, optim_state_dict=moments)
    return wire.step


def train(options: argparse.Namespace) -> None:
    """Train to `options.steps`, and print the loss over all ranks and what was sent."""
    size, rank = dist.get_world_size(), dist.get_rank()
    shape = options.replicas, size // options.replicas
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh if options.native else mesh["shard"], options.width, options.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    wire, first = None, 0
    if not options.native:
        program = eval(options.program, vars(thinwire))
        wire = thinwire.attach(model, program, replicas=mesh["replicate"], optimizer=optimizer)
        if options.folder is not None and (options.folder / ".metadata").exists():
            first = load(options.folder, model, optimizer, wire)
    began, total = time.perf_counter(), torch.zeros(())
    for step in range(first, options.steps):
        optimizer.zero_grad()
        loss = loss_of(model, step, options.width)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total = loss.detach().clone()
        if wire is not None and options.folder is not None and (step + 1) % 10 == 0:
            save(options.folder, model, optimizer, wire)
    seconds = time.perf_counter() - began
    if wire is not None:
        wire.finalize()
    dist.all_reduce(total)
    if rank == 0:
        sent = "FSDP's own all-reduce" if wire is None else str(wire.stats())
        print(f"loss {total.item() / size:.4f}, {seconds / (options.steps - first):.3f} s a step, {sent}")


def main() -> None:
    """Read the command line, and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, default=2, help="sites, each of which holds the whole model")
    parser.add_argument("--program", default="Int8()", help="what replicas exchange, as Python text")
    parser.add_argument("--native", action="store_true", help="let FSDP average across replicas (HSDP)")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--folder", type=Path, help="where checkpoints are saved")
    dist.init_process_group("gloo")
    try:
        train(parser.parse_args())
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
