"""Train, save and resume: `torchrun --standalone --nproc-per-node 2 examples/train.py`."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thinwire


def main() -> None:
    """Train for 50 steps with 8-bit gradients, and print the loss and the bytes sent."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    wire = thinwire.attach(ddp, thinwire.Int8(), optimizer=optimizer)
    job = ("checkpoint", ddp, optimizer, wire)
    saved = thinwire.load_checkpoint(*job, missing_ok=True, scheduler=scheduler)
    for step in range(saved.get("step", 0), 50):
        inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        loss = (ddp(inputs) - inputs.roll(1, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        wire.clip_grad_norm_(1.0)
        optimizer.step()
        scheduler.step()
        if step % 20 == 19:
            thinwire.save_checkpoint(*job, scheduler=scheduler, step=step + 1)
    wire.finalize()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.4f}; {wire.stats()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
