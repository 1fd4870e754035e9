"""PowerSGD compared with plain DDP, torch's hook and the floor, on a GPT of 6.5 M parameters.

    .venv/bin/python benchmarks/powersgd.py buckets    # which hooks run with more than one bucket
    .venv/bin/python benchmarks/powersgd.py cpu        # time in the hook itself, one rank
    .venv/bin/python benchmarks/powersgd.py links      # 10mbit, 100mbit, unlimited; 2 and 4 hosts
    .venv/bin/python benchmarks/powersgd.py loss       # ranks 1, 2, 4, 8 and both residuals, equal steps

torch's hook gets one bucket, because it fails with more. Results of `links` and `loss` are saved to --out,
from which an interrupted run is resumed.
"""

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch.distributed as dist
from rich.console import Console
from torch.nn.parallel import DistributedDataParallel as DDP

from benchmarks.ranks import run
from thinwire.tools.bench.contestants import Contestant
from thinwire.tools.bench.grid import Grid, run_grid
from thinwire.tools.bench.measure import Entry, enter
from thinwire.tools.bench.results import Results
from thinwire.tools.bench.summary import rows
from thinwire.tools.bench.torch_baselines import ONE_BUCKET_MB
from thinwire.tools.bench.workloads import WORKLOADS
from thinwire.tools.cli.output import tables, title
from thinwire.tools.cli.progress import progress

OURS, HALF = "PowerSGD(rank=4,warmup=0)", "PowerSGD(rank=4,factor_dtype='bf16',warmup=0)"
CONTESTANTS = {
    "DDP": Contestant("DDP", "ddp", ""),
    "torch": Contestant("torch powerSGD_hook", "torch", OURS),
    "thinwire": Contestant(OURS, "thinwire", OURS),
    "thinwire bf16": Contestant(HALF, "thinwire", HALF),
}
WORK = WORKLOADS["gpt-6m"]
SURVIVAL_STEPS, SURVIVAL_SECONDS = 20, 60


def survive(rank: int, world_size: int, name: str) -> int:
    """Train a contestant for some steps in buckets of 1 MB."""
    ddp = DDP(WORK.model(), bucket_cap_mb=1)
    CONTESTANTS[name].prepare(ddp, WORK.optimizer)
    for step in range(SURVIVAL_STEPS):
        ddp(WORK.batch(rank, step)).backward()
    return SURVIVAL_STEPS


def last_line(text: str) -> str:
    """Return the last non-empty line of a process's output."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no output")


def buckets() -> None:
    """Run each hook with many buckets in a separate process group, which may hang or abort."""
    for name in ("thinwire", "torch"):
        command = [sys.executable, __file__, "survive", "--name", name]
        process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True)
        try:
            _, said = process.communicate(timeout=SURVIVAL_SECONDS)
            outcome = f"{SURVIVAL_STEPS} steps" if process.returncode == 0 else f"fails: {last_line(said)}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            outcome = f"hangs (given up after {SURVIVAL_SECONDS} s)"
        print(f"{name:<10}2 ranks, buckets of 1 MB: {outcome}")


def hook_seconds(rank: int, world_size: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of forward and backward on one rank, where a hook never waits for the network."""
    entries: dict[str, Entry] = {}
    for name, contestant in CONTESTANTS.items():
        entries[name] = enter(contestant, WORK.model(), WORK, ONE_BUCKET_MB)
    seconds: dict[str, list[float]] = {name: [] for name in entries}
    shuffled = random.Random(0)
    for step in range(rounds):
        for name in shuffled.sample(list(entries), len(entries)):
            batch = WORK.batch(rank, step)
            entries[name].model.zero_grad()
            dist.barrier()
            started = time.perf_counter()
            entries[name].model(batch).backward()
            seconds[name].append(time.perf_counter() - started)
    return {name: own[5:] for name, own in seconds.items()}


def cpu(rounds: int) -> None:
    """Print the time of encoding and decoding, as the difference to plain DDP in each round."""
    seconds = run(hook_seconds, 1, rounds)
    extra = {
        name: statistics.median(own - plain for own, plain in zip(seconds[name], seconds["DDP"], strict=True))
        for name in ("torch", "thinwire", "thinwire bf16")
    }
    print(f"one rank, one bucket, {rounds} rounds: time beyond plain DDP's forward and backward")
    for name, own in extra.items():
        print(f"{name:<16}{1e3 * own:>8.1f} ms{own / extra['torch']:>8.2f} x torch's")


def measured(grid: Grid, out: Path) -> Results:
    """Run a grid of `thinwire bench`, or resume it."""
    with progress(grid.steps * len(grid.cells)) as tracker:
        return run_grid(grid, out, " ".join(sys.argv), fresh=False, on_progress=tracker, on_line=print)


def show(results: Results) -> None:
    """Print the tables, and each row compared with torch's."""
    console = Console(width=220)
    for cell in results.cells:
        console.print(title(cell), *(tables(cell) if cell.error is None else [cell.error]))
        found = {row.name: row for row in rows(cell) if row.step}
        rival = next((row for row in found.values() if row.kind == "torch"), None)
        for row in found.values():
            if row.kind == "thinwire" and rival and rival.step and row.step and row.meter_bytes:
                against = row.meter_bytes / (rival.device_bytes or 1)
                print(
                    f"  {row.name}: {against:.2f} x torch's bytes, {1 / (row.torch_speed_up or 1):.2f} x step"
                )


def final_losses(results: Results) -> None:
    """Print the held-out loss after equal steps, compared with plain DDP's."""
    for cell in results.cells:
        ran = [row for row in rows(cell) if row.loss is not None]
        for row in ran:
            ratio = (row.loss or 0.0) / (ran[0].loss or 1.0) - 1
            print(f"{row.name:<60}{row.loss:>9.4f}{100 * ratio:>+8.2f} %")


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["buckets", "cpu", "links", "loss", "survive"])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--links", default="10mbit,100mbit,unlimited")
    parser.add_argument("--hosts", default="2,4")
    parser.add_argument("--name", choices=list(CONTESTANTS), help="contestant of the part survive")
    parser.add_argument("--out", type=Path, default=Path("powersgd.json"))
    options = parser.parse_args()
    if options.part == "survive":
        run(survive, 2, options.name)
    elif options.part == "buckets":
        buckets()
    elif options.part == "cpu":
        cpu(options.steps or 60)
    elif options.part == "links":
        hosts = tuple(int(count) for count in options.hosts.split(","))
        links, steps = tuple(options.links.split(",")), options.steps or 12
        grid = Grid(workload="gpt-6m", programs=(OURS, HALF), links=links, hosts=hosts, steps=steps)
        show(measured(grid, options.out))
    else:
        by_rank = [f"PowerSGD(rank={rank})" for rank in (1, 2, 4, 8)]
        grid = Grid(
            workload="gpt-6m",
            programs=(*by_rank, HALF, HALF.replace(")", ",residual='sent')")),
            links=("loopback",),
            hosts=(2,),
            steps=options.steps or 256,
            with_torch=False,
        )
        final_losses(measured(grid, options.out))


if __name__ == "__main__":
    main()
