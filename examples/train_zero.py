"""Shard, save and resume: `torchrun --standalone --nproc-per-node 2 examples/train_zero.py`."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thinwire
from examples import tiny
from thinwire.wire import Wire

Job = tuple[DistributedDataParallel, torch.optim.Optimizer, Wire]


def job() -> Job:
    """Return a model, its optimizer and a wire that shards the optimizer's state."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(tiny.model())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    return ddp, optimizer, thinwire.attach(ddp, thinwire.ZeRO(), optimizer=optimizer)


def train(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, begin: int, end: int) -> None:
    """Train from step `begin` to step `end`."""
    for batch in tiny.Rows(16 * 8).rows.view(16, 8, -1)[begin:end]:
        optimizer.zero_grad()
        ddp(batch).square().mean().backward()
        optimizer.step()


def main(folder: Path = Path("zero-checkpoint")) -> None:
    """Train 8 steps, save to `folder`, continue in a new job, and compare with 16 steps in one."""
    dist.init_process_group("gloo")
    ddp, optimizer, wire = job()
    train(ddp, optimizer, 0, 8)
    thinwire.save_checkpoint(folder, ddp, optimizer, wire, step=8)
    train(ddp, optimizer, 8, 16)
    again, its_optimizer, its_wire = job()
    step = thinwire.load_checkpoint(folder, again, its_optimizer, its_wire)["step"]
    train(again, its_optimizer, step, 16)
    equal = all(
        torch.equal(one, other) for one, other in zip(ddp.parameters(), again.parameters(), strict=True)
    )
    if dist.get_rank() == 0:
        print(f"the resumed job equals the uninterrupted one: {equal}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
