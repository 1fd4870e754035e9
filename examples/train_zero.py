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


def train(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, begin: int, end: int) -> float:
    """Train from step `begin` to step `end`, and return the last loss."""
    for batch in tiny.batches(256, dist.get_rank(), dist.get_world_size())[begin:end]:
        loss = tiny.loss_of(ddp(batch), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main(folder: Path = Path("zero-checkpoint")) -> None:
    """Train 128 steps, save to `folder`, continue in a new job, and compare with 256 steps in one."""
    dist.init_process_group("gloo")
    ddp, optimizer, wire = job()
    first = train(ddp, optimizer, 0, 128)
    thinwire.save_checkpoint(folder, ddp, optimizer, wire, step=128)
    last = train(ddp, optimizer, 128, 256)
    again, its_optimizer, its_wire = job()
    step = thinwire.load_checkpoint(folder, again, its_optimizer, its_wire)["step"]
    train(again, its_optimizer, step, 256)
    equal = all(
        torch.equal(parameter, other)
        for parameter, other in zip(ddp.parameters(), again.parameters(), strict=True)
    )
    if dist.get_rank() == 0:
        print(f"loss {first:.3f} after 128 steps, {last:.3f} after 256; {wire.stats()}")
        print(f"the resumed job equals the uninterrupted one: {equal}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
