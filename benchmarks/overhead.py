"""Overhead of thinwire where it cannot help: the exact mean over loopback, compared with plain DDP.

    .venv/bin/python benchmarks/overhead.py
    .venv/bin/python benchmarks/overhead.py --against ../old/src    # another checkout, in turns

Every round runs one step of each variant, in random order, between barriers. The ratio to plain DDP is
computed within each round. The median over rounds is printed with its quartiles.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from benchmarks.checkouts import SOURCE, Turns, check_imported
from benchmarks.ranks import run
from benchmarks.workloads import WORKLOADS

PLAIN = "DDP, no hook"
VARIANTS: dict[str, Callable[[DDP], object]] = {
    PLAIN: lambda ddp: None,
    "torch allreduce_hook": lambda ddp: ddp.register_comm_hook(None, allreduce_hook),
    "thinwire Exact()": lambda ddp: thinwire.attach(ddp, thinwire.Exact()),
}
WARM_UP = 5
Seconds = dict[str, list[float]]
"""Seconds of forward and backward in each round, by variant."""


def measure(
    rank: int, world_size: int, workload: str, rounds: int, bucket_mb: float, turns: Turns
) -> Seconds:
    """Return the seconds of forward and backward, by variant and round."""
    work = WORKLOADS[workload]
    models = {name: DDP(work.model(), bucket_cap_mb=bucket_mb) for name in VARIANTS}
    for name, prepare in VARIANTS.items():
        prepare(models[name])
    seconds: Seconds = {name: [] for name in VARIANTS}
    shuffled = random.Random(0)  # the same order on every rank
    for step in range(WARM_UP + rounds):
        if rank == 0:
            turns.wait()
        for name in shuffled.sample(list(VARIANTS), len(VARIANTS)):
            batch = work.batch(rank, step)
            models[name].zero_grad()
            dist.barrier()
            started = time.perf_counter()
            models[name](batch).backward()
            if step >= WARM_UP:
                seconds[name].append(time.perf_counter() - started)
        dist.barrier()
        if rank == 0:
            turns.pass_on()
    return seconds


def measure_all(options: argparse.Namespace) -> dict[str, Seconds]:
    """Measure every workload with the thinwire that this process imports."""
    turns = Turns(Path(options.turns), options.number, options.count)
    settings = (options.rounds, options.bucket_mb, turns)
    try:
        return {workload: run(measure, options.ranks, workload, *settings) for workload in WORKLOADS}
    except BaseException:
        turns.fail()
        raise


def in_turns(options: argparse.Namespace) -> list[dict[str, Seconds]]:
    """Measure this checkout and the other one in processes that take rounds in turns."""
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for number, source in enumerate((SOURCE, options.against)):
            words = ["--ranks", options.ranks, "--rounds", options.rounds, "--bucket-mb", options.bucket_mb]
            words += ["--turns", f"{folder}/turn", "--number", number, "--count", 2]
            environment = {**os.environ, "PYTHONPATH": f"{source}:{SOURCE.parent}"}
            command = [sys.executable, __file__, *map(str, words)]
            processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        return [json.loads(process.communicate()[0]) for process in processes]


def show(found: dict[str, Seconds]) -> None:
    """Print each variant's step, compared with plain DDP's of the same round."""
    print(f"{'workload':<10}{'variant':<24}{'median step':>12}{'against plain DDP':>28}")
    for workload, seconds in found.items():
        for name, own in seconds.items():
            low, middle, high = ratios(own, seconds[PLAIN])
            print(
                f"{workload:<10}{name:<24}{1e3 * statistics.median(own):>9.1f} ms"
                f"{middle:>10.3f} x  ({low:.3f} to {high:.3f})"
            )


def compare(new: dict[str, Seconds], old: dict[str, Seconds]) -> None:
    """Print each variant's ratio to plain DDP in both checkouts, and this one's step over the other's."""
    print(f"{'workload':<10}{'variant':<24}{'other / DDP':>12}{'this / DDP':>12}{'this / other':>16}")
    for workload, seconds in new.items():
        for name, own in seconds.items():
            theirs = old[workload][name]
            before, now = ratios(theirs, old[workload][PLAIN])[1], ratios(own, seconds[PLAIN])[1]
            low, middle, high = ratios(own, theirs)
            print(
                f"{workload:<10}{name:<24}{before:>10.3f} x{now:>10.3f} x{middle:>10.3f} x"
                f"  ({low:.3f} to {high:.3f})"
            )


def ratios(own: list[float], other: list[float]) -> tuple[float, float, float]:
    """Return the quartiles of the ratios by round."""
    by_round = [mine / theirs for mine, theirs in zip(own, other, strict=True)]
    low, middle, high = statistics.quantiles(by_round, n=4)
    return low, middle, high


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--bucket-mb", type=float, default=4.0)
    parser.add_argument("--against", type=Path, metavar="SRC", help="the folder src of another checkout")
    parser.add_argument("--turns", help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.turns:
        check_imported(Path(os.environ["PYTHONPATH"].partition(":")[0]))
        print(json.dumps(measure_all(options)))
        return
    settings = f"{options.rounds} rounds, buckets of {options.bucket_mb:g} MB"
    print(f"{options.ranks} ranks over loopback, {settings}", flush=True)
    if options.against:
        compare(*in_turns(options))
        return
    options.turns = os.devnull
    show(measure_all(options))


if __name__ == "__main__":
    main()
