"""Loss against steps and against bytes: DDP, post-local SGD, DiLoCo exact and compressed, streaming.

    .venv/bin/python benchmarks/local_sgd.py                    # four ranks, 512 steps, about 10 minutes
    .venv/bin/python benchmarks/local_sgd.py --period 16 --steps 256 --only "DDP,DiLoCo int4"

Every contestant trains the same small GPT from the same weights on the same batches, on real ranks. Bytes are
those that rank 0 sent, from the wire's meter, the last exchange of `finalize` included. The loss is that of
rank 0's model on held-out text. The learning rate warms up and falls along a cosine, the same for all.
"""

import argparse
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from benchmarks import ranks
from thinwire.bench.workloads import find_workload

Contestant = Callable[[argparse.Namespace], Any]
CONTESTANTS: dict[str, Contestant] = {
    "DDP": lambda o: thinwire.Exact(),
    "post-local SGD": lambda o: thinwire.LocalSGD(period=o.period, warmup_steps=o.steps // 8),
    "DiLoCo exact": lambda o: diloco(o),
    "DiLoCo int8": lambda o: diloco(o, program=thinwire.Int8()),
    "DiLoCo int4": lambda o: diloco(o, program=thinwire.Int4()),
    "streaming int4": lambda o: diloco(o, program=thinwire.Int4(), fragments=4, overlap=2),
}
POINTS = 8
HELD_OUT = 16


def diloco(options: argparse.Namespace, **more: Any) -> thinwire.DiLoCo:
    """All of them with the same outer optimizer."""
    momentum = options.outer_momentum
    outer = partial(torch.optim.SGD, lr=options.outer_lr, momentum=momentum, nesterov=momentum > 0)
    return thinwire.DiLoCo(period=options.period, outer=outer, **more)


def train(rank: int, world_size: int, name: str, options: argparse.Namespace) -> list[tuple[int, int, float]]:
    """(steps, bytes sent, held-out loss) at a few points, the last after `finalize`."""
    workload = find_workload(options.workload)
    ddp = DDP(workload.model())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=options.lr)
    total, warm = options.steps, max(1, options.steps // 16)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda s: min((s + 1) / warm, 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, s / total)))),
    )
    wire = thinwire.attach(ddp, CONTESTANTS[name](options), optimizer=optimizer)
    points = []
    for step in range(1, total + 1):
        optimizer.zero_grad()
        ddp(workload.batch(rank, step)).backward()
        optimizer.step()
        scheduler.step()
        if step == total:
            wire.finalize()
        if step * POINTS % total == 0 and rank == 0:
            points.append((step, wire.stats().bytes_sent, held_out_loss(ddp.module, workload)))
    return points


def held_out_loss(model: torch.nn.Module, workload: Any) -> float:
    """The mean over some batches that nobody trains on."""
    with torch.no_grad():
        losses = [float(model(workload.held_out(0, index))) for index in range(HELD_OUT)]
    return sum(losses) / len(losses)


def main() -> None:
    """Train each, and print what came of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=512)
    parser.add_argument("--period", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--outer-lr", type=float, default=0.7)
    parser.add_argument("--outer-momentum", type=float, default=0.9)
    parser.add_argument("--workload", default="gpt-1m")
    parser.add_argument("--only", default=",".join(CONTESTANTS))
    options = parser.parse_args()
    print(vars(options))
    base: tuple[int, int, float] | None = None
    for name in options.only.split(","):
        points = ranks.run(train, options.ranks, name, options)
        _, sent, loss = points[-1]
        base = base or points[-1]
        print(f"\n{name}: loss {loss:.4f} ({loss / base[2] - 1:+.2%}), {sent / 1e6:.2f} MB sent", end="")
        print(f" (1/{base[1] / sent:.0f} of {options.only.split(',')[0]}'s)" if sent else "")
        print("  steps  " + "".join(f"{step:>9}" for step, _, _ in points))
        print("  MB     " + "".join(f"{sent / 1e6:>9.2f}" for _, sent, _ in points))
        print("  loss   " + "".join(f"{loss:>9.4f}" for _, _, loss in points), flush=True)


if __name__ == "__main__":
    main()
