"""What does thinwire cost where it does not help? The exact mean over loopback, against plain DDP.

    .venv/bin/python benchmarks/overhead.py

Every round runs one step of each variant, in random order, between barriers; the ratio to plain DDP is
taken within the round, and the median over rounds is reported with its quartiles.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from benchmarks.ranks import run
from benchmarks.workloads import WORKLOADS

PLAIN = "DDP, no hook"
VARIANTS: dict[str, Callable[[DDP], object]] = {
    PLAIN: lambda ddp: None,
    "torch allreduce_hook": lambda ddp: ddp.register_comm_hook(None, allreduce_hook),
    "thinwire Exact()": lambda ddp: thinwire.attach(ddp, thinwire.Exact()),
}
WARM_UP = 5


def measure(
    rank: int, world_size: int, workload: str, rounds: int, bucket_mb: float
) -> dict[str, list[float]]:
    """Seconds of forward and backward, by variant and round."""
    work = WORKLOADS[workload]
    models = {name: DDP(work.model(), bucket_cap_mb=bucket_mb) for name in VARIANTS}
    for name, prepare in VARIANTS.items():
        prepare(models[name])
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    shuffled = random.Random(0)  # the same order on every rank
    for step in range(WARM_UP + rounds):
        for name in shuffled.sample(list(VARIANTS), len(VARIANTS)):
            batch = work.batch(rank, step)
            models[name].zero_grad()
            dist.barrier()
            started = time.perf_counter()
            models[name](batch).backward()
            if step >= WARM_UP:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--bucket-mb", type=float, default=4.0)
    options = parser.parse_args()
    print(
        f"{options.ranks} ranks over loopback, {options.rounds} rounds, buckets of {options.bucket_mb:g} MB"
    )
    print(f"{'workload':<10}{'variant':<24}{'median step':>12}{'against plain DDP':>28}")
    for workload in WORKLOADS:
        seconds = run(measure, options.ranks, workload, options.rounds, options.bucket_mb)
        for name, own in seconds.items():
            ratios = [ours / plain for ours, plain in zip(own, seconds[PLAIN], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(
                f"{workload:<10}{name:<24}{1e3 * statistics.median(own):>9.1f} ms"
                f"{middle:>10.3f} x  ({low:.3f} to {high:.3f})"
            )


if __name__ == "__main__":
    main()
