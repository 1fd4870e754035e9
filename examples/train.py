"""Train with 8-bit gradients: `torchrun --standalone --nproc-per-node 2 examples/train.py`."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thinwire


def main() -> None:
    """Train for 50 steps, and print the bytes sent."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    wire = thinwire.attach(ddp, thinwire.Int8())
    for step in range(50):
        inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        loss = (ddp(inputs) - inputs.roll(1, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.4f}; {wire.stats()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
