"""Step time, bytes and optimizer memory of DDP, torch's ZeRO and thinwire's ZeRO on emulated links.

    .venv/bin/python benchmarks/zero.py --links 100mbit,unlimited --hosts 4

Every round has one step of each contestant, in random order. All use AdamW. Figures are medians. Ratios to
DDP's step are taken within a round and shown with quartiles. Bytes are those that rank 0's network device
sent in a step. `--only` keeps the contestants whose names contain a word of it, and DDP. torch's hooks that
overlap the step with backward do not support Gloo, so torch's ZeroRedundancyOptimizer steps after backward.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchsZeRO
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from thinwire.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step_interleaved
from thinwire.ddp_comm_hooks.default_hooks import allreduce_hook
from thinwire.optim import ZeroRedundancyOptimizer
from thinwire.tools.bench.devices import device_bytes
from thinwire.tools.bench.workloads import find_workload
from thinwire.tools.lab.namespaces import Lab
from thinwire.tools.lab.network import plan
from thinwire.tools.lab.run import run_on

MARK = "zero "
DDPS = "DDP and AdamW"
LR = 1e-3


def plain(ddp: DDP) -> Any:
    """Return AdamW for plain DDP."""
    return torch.optim.AdamW(ddp.parameters(), lr=LR)


def attached(program: Any) -> Callable[[DDP], Any]:
    """Return a function that sets up thinwire's ZeRO by `attach`."""

    def make(ddp: DDP) -> Any:
        optimizer = plain(ddp)
        thinwire.attach(ddp, program, optimizer=optimizer)
        return optimizer

    return make


def hooked(ddp: DDP) -> Any:
    """Set up thinwire's hook of torch's name, which steps inside backward."""
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=LR)
    ddp.register_comm_hook(None, hook_with_zero_step_interleaved(allreduce_hook, ddp, zero))
    return zero


CONTESTANTS: dict[str, Callable[[DDP], Any]] = {
    "torch ZeroRedundancyOptimizer": lambda ddp: TorchsZeRO(
        ddp.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=LR
    ),
    DDPS: plain,
    "thinwire ZeroRedundancyOptimizer": lambda ddp: ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=LR
    ),
    "hook_with_zero_step_interleaved": hooked,
    "ZeRO()": attached(thinwire.ZeRO()),
    "ZeRO(interleaved=True)": attached(thinwire.ZeRO(interleaved=True)),
    "ZeRO(BF16(), parameters=bf16)": attached(thinwire.ZeRO(thinwire.BF16(), parameters=torch.bfloat16)),
    "ZeRO(Int8(), parameters=bf16)": attached(thinwire.ZeRO(thinwire.Int8(), parameters=torch.bfloat16)),
}


@dataclass
class Found:
    """The measurements of a contestant."""

    seconds: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    state_bytes: int = 0


def rank(workload_name: str, rounds: int, only: list[str]) -> None:
    """Run one rank on its host."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    workload, order = find_workload(workload_name), random.Random(0)
    entries = {}
    for name, make in CONTESTANTS.items():
        if name != DDPS and not any(word in name for word in only):
            continue
        ddp = DDP(workload.model())
        entries[name] = (ddp, make(ddp), Found())
    for number in range(rounds):
        names = list(entries)
        order.shuffle(names)
        for name in names:
            ddp, optimizer, found = entries[name]
            batch = workload.batch(dist.get_rank(), number)
            dist.barrier()
            before, started = device_bytes() or 0.0, time.perf_counter()
            ddp.zero_grad()
            ddp(batch).backward()
            optimizer.step()
            found.seconds.append(time.perf_counter() - started)
            dist.barrier()
            found.sent.append((device_bytes() or 0.0) - before)
    for _, optimizer, found in entries.values():
        kept = getattr(optimizer, "optim", optimizer).state
        tensors = [value for state in kept.values() for value in state.values()]
        found.state_bytes = sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))
    if dist.get_rank() == 0:
        report = {name: asdict(found) for name, (_, _, found) in entries.items()}
        print(f"\n{MARK}{json.dumps(report)}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def run(hosts: int, link: str, options: argparse.Namespace) -> dict[str, Found]:
    """Measure one cell."""
    found: dict[str, Found] = {}

    def listen(host: int, stream: str, line: str) -> None:
        if line.startswith(MARK):
            report = json.loads(line.removeprefix(MARK))
            found.update({name: Found(**values) for name, values in report.items()})
        elif "Error" in line:
            print(f"host {host} | {line}", file=sys.stderr)

    arguments = ["--rank", "--workload", options.workload, "--rounds", str(options.rounds)]
    arguments += ["--only", options.only]
    with Lab(plan(hosts=hosts, rate=link)) as lab:
        run_on(lab, [sys.executable, "-W", "ignore", __file__, *arguments], listen)
    return found


def show(found: dict[str, Found]) -> None:
    """Print one line for each contestant, compared with the first one and with plain DDP."""
    skip = 2
    first, ddps = next(iter(found.values())), found[DDPS].seconds[skip:]
    base_step, base_sent = statistics.median(first.seconds[skip:]), statistics.median(first.sent[skip:])
    rival = "x torch" if next(iter(found)) != DDPS else "x DDP"
    print(f"{'':<34}{'step':>10}{rival:>9}{'sent':>11}{rival:>9}{'state':>10}   x DDP's step")
    for name, measured in found.items():
        step, sent = statistics.median(measured.seconds[skip:]), statistics.median(measured.sent[skip:])
        ratios = [own / plain for own, plain in zip(measured.seconds[skip:], ddps, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(
            f"{name:<34}{1e3 * step:>7.0f} ms{step / base_step:>9.2f}{sent / 1e6:>8.2f} MB"
            f"{sent / base_sent:>9.2f}{measured.state_bytes / 1e6:>7.1f} MB"
            f"   {middle:.2f} ({low:.2f} to {high:.2f})"
        )


def main() -> None:
    """Measure every cell, and print its table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", default="4")
    parser.add_argument("--links", default="100mbit,unlimited")
    parser.add_argument("--workload", default="gpt-1m")
    parser.add_argument("--rounds", type=int, default=14)
    parser.add_argument("--only", default="e", help="words, such as 'ZeRO(),interleaved'")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options.workload, options.rounds, options.only.split(","))
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for hosts in map(int, options.hosts.split(",")):
        for link in options.links.split(","):
            print(f"\n{hosts} hosts at {link}, {options.workload}, {options.rounds} rounds")
            show(run(hosts, link, options))


if __name__ == "__main__":
    main()
