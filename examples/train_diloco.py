"""Exchange models every 8 steps: `torchrun --standalone --nproc-per-node 2 examples/train_diloco.py`."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thinwire
from examples import tiny


def main() -> None:
    """Train for 256 steps with DiLoCo, and print the loss and the bytes sent."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    ddp = DistributedDataParallel(tiny.model())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    wire = thinwire.attach(ddp, thinwire.DiLoCo(period=8, program=thinwire.Int4()), optimizer=optimizer)
    for step, batch in enumerate(tiny.batches(256, dist.get_rank(), dist.get_world_size())):
        loss = tiny.loss_of(ddp(batch), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # every eighth exchanges
        if dist.get_rank() == 0 and step % 64 == 63:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    wire.finalize()  # one model on all ranks
    if dist.get_rank() == 0:
        print(wire.stats())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
