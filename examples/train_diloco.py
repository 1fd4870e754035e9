"""Exchange models every 8 steps: `torchrun --standalone --nproc-per-node 2 examples/train_diloco.py`."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thinwire
from examples import tiny


def main() -> None:
    """Train for 32 steps with DiLoCo, and print the bytes sent."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    ddp = DistributedDataParallel(tiny.model())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    wire = thinwire.attach(ddp, thinwire.DiLoCo(period=8, program=thinwire.Int4()), optimizer=optimizer)
    rows = tiny.Rows(32 * 8).rows
    for batch in rows.view(32, 8, -1):
        optimizer.zero_grad()
        ddp(batch).square().mean().backward()
        optimizer.step()  # every eighth exchanges
    wire.finalize()  # one model on all ranks
    if dist.get_rank() == 0:
        print(wire.stats())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
