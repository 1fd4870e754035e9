"""FSDP2 on two sites: FSDP's own hybrid sharding (HSDP) compared with thinwire between the sites.

    .venv/bin/python benchmarks/fsdp.py

Two sites of two hosts each, with fast links within a site and a slow one between them. Every round takes one
training step with each contestant, in random order, each with a separate model. Times are medians with
quartiles over the rounds, of the slowest rank. Bytes are those that a site has sent to the other in a step,
counted at its slow link. The floor is what that link needs for them.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import thinwire
from examples.train_fsdp import Block, loss_of, sharded
from thinwire.tools.lab.namespaces import Lab
from thinwire.tools.lab.network import plan
from thinwire.tools.lab.run import run_on

MARK = "fsdp "
NATIVE = "HSDP"
WARM_UP = 2
SITES = 2


def contestant(name: str, mesh: DeviceMesh, options: argparse.Namespace) -> Callable[[int], torch.Tensor]:
    """Return a function that takes a training step, and returns this rank's loss."""
    model = sharded(mesh if name == NATIVE else mesh["shard"], options.width, options.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if name != NATIVE:
        program = eval(name, vars(thinwire))
        thinwire.attach(model, program, replicas=mesh["replicate"], optimizer=optimizer)

    def step(number: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, number, options.width)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return step


def rank_main(options: argparse.Namespace) -> None:
    """Run one rank on its host."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size, order = dist.get_rank(), dist.get_world_size(), random.Random(0)
    mesh = init_device_mesh("cpu", (SITES, size // SITES), mesh_dim_names=("replicate", "shard"))
    steps = {name: contestant(name, mesh, options) for name in options.contestants.split(";")}
    seconds: dict[str, list[float]] = defaultdict(list)
    losses = {}
    for number in range(WARM_UP + options.rounds):
        for name in order.sample(list(steps), len(steps)):
            moment(f"{number} begin {name}", options.folder)
            started = time.perf_counter()
            loss = steps[name](number)
            slowest = torch.tensor(time.perf_counter() - started)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            moment(f"{number} end {name}", options.folder)
            if number >= WARM_UP:
                seconds[name].append(slowest.item())
            dist.all_reduce(loss)
            losses[name] = loss.item() / size
    if rank == 0:
        print(f"\n{MARK}{json.dumps({'seconds': seconds, 'losses': losses})}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def moment(text: str, folder: Path) -> None:
    """Wait until all ranks are here, and the program outside has read the counters of the slow links."""
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"\n{MARK}{json.dumps(text)}", flush=True)
        while not (folder / text).exists():
            time.sleep(0.001)
    dist.barrier()


def measure(
    options: argparse.Namespace, arguments: list[str]
) -> tuple[dict[str, Any], dict[str, list[int]], float]:
    """Run all ranks; return times and losses, bytes of each step by contestant, and the slow link's rate."""
    found: dict[str, Any] = {}
    sent: dict[str, list[int]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder, Lab(network(options)) as lab:
        before = 0

        def listen(host: int, stream: str, line: str) -> None:
            nonlocal before
            if not line.startswith(MARK):
                if "Error" in line:
                    print(f"host {host} | {line}", file=sys.stderr)
                return
            reported = json.loads(line.removeprefix(MARK))
            if isinstance(reported, dict):
                found.update(reported)
                return
            number, when, name = reported.split(" ", 2)
            count = (lab.bytes_between() or [0])[0]
            if when == "begin":
                before = count
            elif int(number) >= WARM_UP:
                sent[name].append(count - before)
            (Path(folder) / reported).touch()

        command = [sys.executable, "-W", "ignore", __file__, *arguments, "--rank", "--folder", folder]
        run_on(lab, command, listen)
        return found, sent, float(lab.network.rate or "inf")


def network(options: argparse.Namespace) -> Any:
    """Return the network: two sites of two hosts each."""
    return plan(groups=f"{SITES}x{options.hosts}", rate=options.rate, inside=options.inside)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="100mbit", help="of the link between sites")
    parser.add_argument("--inside", default="unlimited", help="rate of each host within its site")
    parser.add_argument("--hosts", type=int, default=2, help="in each site")
    parser.add_argument("--contestants", default=f"{NATIVE};Exact();Int8()", help="separated by semicolons")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(options)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    count = sum(parameter.numel() for parameter in meta_model(options).parameters())
    print(f"{network(options)}; {count / 1e6:.1f} M parameters, {4 * count / 1e6:.1f} MB of gradients")
    found, sent, rate = measure(options, sys.argv[1:])
    print(f"{options.rounds} steps each, interleaved; ms a step, median (quartiles)")
    first = statistics.median(found["seconds"][options.contestants.split(";")[0]])
    for name in options.contestants.split(";"):
        low, middle, high = statistics.quantiles(found["seconds"][name], n=4)
        each = statistics.median(sent[name])
        print(
            f"{name:<10}{1e3 * middle:>7.0f} ({1e3 * low:.0f} to {1e3 * high:.0f})   {first / middle:.2f} x"
            f"   a site sent {each / 1e6:.2f} MB, floor {8e3 * each / rate:.0f} ms"
            f"   loss {found['losses'][name]:.4f}"
        )


def meta_model(options: argparse.Namespace) -> nn.Module:
    """Return the model without values and shards, to count its parameters."""
    with torch.device("meta"):
        return nn.Sequential(
            *(Block(options.width) for _ in range(options.layers)), nn.Linear(options.width, 1)
        )


if __name__ == "__main__":
    main()
