"""Loss by steps, bytes and time of DDP, post-local SGD, DiLoCo in several forms, and SparseLoCo.

    .venv/bin/python benchmarks/local_sgd.py                              # loss: four ranks, half an hour
    .venv/bin/python benchmarks/local_sgd.py --link 100mbit --steps 64    # time: four emulated hosts
    .venv/bin/python benchmarks/local_sgd.py --only "DDP,DiLoCo int4" --period 32

Every contestant trains the same small GPT from the same weights on the same batches, on real ranks. Bytes are
those that rank 0 sent, as counted by the wire's meter, including the last exchange of `finalize`. The loss is
that of rank 0's model on held-out text. All contestants use the same learning rate, which rises over a
sixteenth of the steps and then falls along a cosine to a tenth.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from benchmarks import ranks
from thinwire.tools.bench.workloads import Workload, find_workload
from thinwire.tools.lab.namespaces import Lab
from thinwire.tools.lab.network import plan
from thinwire.tools.lab.run import run_on

Point = tuple[int, float, int, float]
"""Finished steps, seconds, bytes sent and held-out loss."""
Options = argparse.Namespace
CONTESTANTS: dict[str, Callable[[Options], Any]] = {
    "DDP": lambda o: thinwire.Exact(),
    "post-local SGD": lambda o: thinwire.LocalSGD(period=o.period, warmup_steps=o.steps // 8),
    "DiLoCo exact": lambda o: diloco(o),
    "DiLoCo int8": lambda o: diloco(o, program=thinwire.Int8()),
    "DiLoCo int4": lambda o: diloco(o, program=thinwire.Int4()),
    "DiLoCo int4 default": lambda o: thinwire.DiLoCo(period=o.period, program=thinwire.Int4()),
    "SparseLoCo": lambda o: thinwire.SparseLoCo(period=o.period),
    "streaming int4": lambda o: diloco(o, program=thinwire.Int4(), fragments=4, overlap=2),
}
POINTS = 8
HELD_OUT = 16
MARK = "local_sgd "


def diloco(options: Options, **more: Any) -> thinwire.DiLoCo:
    """Return a DiLoCo configuration with the outer optimizer that all contestants share."""
    momentum = options.outer_momentum
    outer = partial(torch.optim.SGD, lr=options.outer_lr, momentum=momentum, nesterov=momentum > 0)
    return thinwire.DiLoCo(period=options.period, outer=outer, **more)


def train(rank: int, world_size: int, name: str, options: Options) -> list[Point]:
    """Train a contestant. Return some points, the last after `finalize`. Evaluation is not timed."""
    workload = find_workload(options.workload)
    ddp = DDP(workload.model())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=options.lr)
    total, rise = options.steps, max(1, options.steps // 16)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / rise, 0.55 + 0.45 * math.cos(math.pi * min(1.0, s / total)))
    )
    averaging = CONTESTANTS[name](options)
    # In so small a model, exact vectors would exceed a hundredth of the bytes.
    rules = [("*", averaging.program)] if isinstance(averaging, thinwire.DiLoCo) else []
    wire = thinwire.attach(ddp, averaging, rules=rules, optimizer=optimizer)
    points: list[Point] = []
    seconds, since = 0.0, time.perf_counter()
    for step in range(1, total + 1):
        optimizer.zero_grad()
        ddp(workload.batch(rank, step)).backward()
        optimizer.step()
        scheduler.step()
        if step == total:
            wire.finalize()
        if step * POINTS % total == 0:
            seconds += time.perf_counter() - since
            loss = held_out_loss(ddp.module, workload) if rank == 0 else 0.0
            points.append((step, seconds, wire.stats().bytes_sent, loss))
            dist.barrier()
            since = time.perf_counter()
    return points


def held_out_loss(model: torch.nn.Module, workload: Workload) -> float:
    """Return the mean loss over held-out batches."""
    assert workload.held_out is not None
    with torch.no_grad():
        losses = [float(model(workload.held_out(0, index))) for index in range(HELD_OUT)]
    return sum(losses) / len(losses)


def on_hosts(name: str, options: Options) -> list[Point]:
    """Train on emulated hosts, one rank each."""
    found: list[Point] = []

    def listen(host: int, stream: str, line: str) -> None:
        if line.startswith(MARK):
            found.extend(json.loads(line.removeprefix(MARK)))
        elif "Error" in line:
            print(f"host {host} | {line}", file=sys.stderr)

    passed = {key: value for key, value in vars(options).items() if key not in ("only", "link", "as_host")}
    arguments = [text for key, value in passed.items() for text in (f"--{key.replace('_', '-')}", str(value))]
    with Lab(plan(hosts=options.ranks, rate=options.link)) as lab:
        run_on(lab, [sys.executable, "-W", "ignore", __file__, "--as-host", name, *arguments], listen)
    return found


def as_host(options: Options) -> None:
    """Run one rank on its host."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    points = train(dist.get_rank(), dist.get_world_size(), options.as_host, options)
    if dist.get_rank() == 0:
        print(f"\n{MARK}{json.dumps(points)}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def show(name: str, points: list[Point], base: Point, timed: bool) -> None:
    """Print a contestant's points, and its last one compared with that of the first contestant."""
    _, seconds, sent, loss = points[-1]
    ratio = base[2] / sent if sent else math.inf
    print(
        f"\n{name}: loss {loss:.4f} ({loss / base[3] - 1:+.2%}), {sent / 1e6:.2f} MB, 1/{ratio:.0f}", end=""
    )
    print(f", {seconds:.1f} s, {base[1] / seconds:.2f} x as fast" if timed else "")
    print("  steps  " + "".join(f"{point[0]:>9}" for point in points))
    print("  MB     " + "".join(f"{point[2] / 1e6:>9.2f}" for point in points))
    print("  loss   " + "".join(f"{point[3]:>9.4f}" for point in points))
    if timed:
        print("  s      " + "".join(f"{point[1]:>9.1f}" for point in points))
    sys.stdout.flush()


def main() -> None:
    """Train each contestant, and print its points."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4096)
    parser.add_argument("--period", type=int, default=16)
    parser.add_argument("--lr", type=float, default=8e-3)
    parser.add_argument("--outer-lr", type=float, default=0.9)
    parser.add_argument("--outer-momentum", type=float, default=0.5)
    parser.add_argument("--workload", default="benchmarks.workloads:small_gpt")
    parser.add_argument("--only", default=",".join(CONTESTANTS), help="contestants, separated by commas")
    parser.add_argument("--link", help="rate of emulated links; needed to measure times")
    parser.add_argument("--as-host", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.as_host:
        as_host(options)
        return
    print(" ".join(f"{key}={value}" for key, value in vars(options).items() if value is not None))
    base: Point | None = None
    for name in options.only.split(","):
        points = on_hosts(name, options) if options.link else ranks.run(train, options.ranks, name, options)
        base = base or points[-1]
        show(name, points, base, timed=bool(options.link))


if __name__ == "__main__":
    main()
