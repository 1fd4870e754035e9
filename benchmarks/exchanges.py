"""Time of one exchange on emulated links: Gloo's own collectives compared with messages.

    .venv/bin/python benchmarks/exchanges.py --links 10mbit,100mbit --hosts 2,4

Every round issues each exchange once in each way, in random order, between barriers. `one` is Gloo's
collective, `two` the same in two concurrent halves, and `messages` thinwire's own exchange, with all receives
posted first. Times are medians with quartiles, of the slowest rank. The floor is the time that the link needs
for the bytes that rank 0 sends.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from thinwire.engine.comm.group_communicator import GroupCommunicator
from thinwire.engine.ops import AllGather, AllToAll, Collective, Exchange
from thinwire.tools.lab.namespaces import Lab
from thinwire.tools.lab.network import plan
from thinwire.tools.lab.run import run_on

MARK = "exchanges "
WARM_UP = 2


def exchanges(rank: int, size: int, sent: int) -> dict[str, Collective]:
    """Return the exchanges, in each of which a rank sends about `sent` bytes."""
    each = sent // (size - 1)
    ragged = [each // 2 if (peer + rank) % 2 else each + each // 2 for peer in range(size)]
    ragged[rank] = 0
    total = sum(ragged)
    return {
        "AllGather": AllGather(torch.zeros(each, dtype=torch.uint8)),
        "AllToAll": AllToAll(torch.zeros(size, each, dtype=torch.uint8)),
        "Exchange": Exchange(torch.zeros(total, dtype=torch.uint8), sends=(*ragged,), receives=(*ragged,)),
    }


def in_halves(op: Collective, group: dist.ProcessGroup) -> None:
    """Run a collective of Gloo's as two concurrent halves."""
    size, works = group.size(), []
    rows = op.tensor.view(1 if isinstance(op, AllGather) else size, -1)
    for half in rows.chunk(2, dim=1):
        received = half.new_empty((size, half.shape[1]))
        if isinstance(op, AllGather):
            works.append(group.allgather([list(received)], [half[0]]))
        else:
            works.append(dist.all_to_all_single(received, half.contiguous(), group=group, async_op=True))
    for work in works:
        work.wait()


def gloos(op: Collective, group: dist.ProcessGroup) -> None:
    """Run a collective of Gloo's."""
    size = group.size()
    if isinstance(op, AllGather):
        group.allgather([list(op.tensor.new_empty((size, op.tensor.numel())))], [op.tensor]).wait()
    elif isinstance(op, Exchange):
        received = op.tensor.new_empty(sum(op.receives))
        dist.all_to_all_single(received, op.tensor, list(op.receives), list(op.sends), group=group)
    else:
        dist.all_to_all_single(torch.empty_like(op.tensor), op.tensor, group=group)


def rank_main(sizes: list[int], rounds: int) -> None:
    """Run one rank on its host."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.group.WORLD
    assert world is not None
    communicator, group = GroupCommunicator(world), dist.new_group()
    assert group is not None
    communicator.open()
    ways: dict[str, Callable[[Collective], object]] = {
        "one": lambda op: gloos(op, group),
        "two": lambda op: in_halves(op, group),
        "messages": lambda op: communicator.issue(op).wait(),
    }
    order, found = random.Random(0), {}
    for size in sizes:
        ops = exchanges(rank, world.size(), size)
        cells = [(kind, way) for kind in ops for way in ways if (kind, way) != ("Exchange", "two")]
        seconds: dict[tuple[str, str], list[float]] = {cell: [] for cell in cells}
        for number in range(WARM_UP + rounds):
            for kind, way in order.sample(cells, len(cells)):
                dist.barrier()
                started = time.perf_counter()
                ways[way](ops[kind])
                slowest = torch.tensor(time.perf_counter() - started)
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                if number >= WARM_UP:
                    seconds[kind, way].append(slowest.item())
        for (kind, way), own in seconds.items():
            sent = ops[kind].bytes_sent(rank, world.size())
            found[f"{size} {kind} {way}"] = (sent, statistics.quantiles(own, n=4))
    if rank == 0:
        print(f"\n{MARK}{json.dumps(found)}", flush=True)
    dist.barrier()
    communicator.close()
    dist.destroy_process_group()


def run(hosts: int, link: str, options: argparse.Namespace) -> dict[str, tuple[int, list[float]]]:
    """Measure one network; return bytes sent by rank 0 and quartiles of the seconds by exchange and way."""
    found: dict[str, tuple[int, list[float]]] = {}

    def listen(host: int, stream: str, line: str) -> None:
        if line.startswith(MARK):
            found.update(json.loads(line.removeprefix(MARK)))
        elif "Error" in line:
            print(f"host {host} | {line}", file=sys.stderr)

    arguments = ["--rank", "--sizes", options.sizes, "--rounds", str(options.rounds)]
    with Lab(plan(hosts=hosts, rate=link)) as lab:
        run_on(lab, [sys.executable, "-W", "ignore", __file__, *arguments], listen)
        rate = lab.network.rate or float("inf")
    for name, (sent, (low, middle, high)) in found.items():
        size, kind, way = name.split()
        if way == "one":
            print(f"{int(size) / 1e3:>8.0f} KB  {kind:<11}floor {8e3 * sent / rate:>6.0f} ms", end="")
        print(f"   {way} {1e3 * middle:.0f} ({1e3 * low:.0f} to {1e3 * high:.0f})", end="")
        if way == "messages":
            before = "one" if kind == "Exchange" else "two"
            print(f"   {middle / found[f'{size} {kind} {before}'][1][1]:.2f} x {before}")
    return found


def main() -> None:
    """Measure every network, and print its table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", default="2,4")
    parser.add_argument("--links", default="10mbit,100mbit")
    parser.add_argument("--sizes", default="131000,655000", help="bytes that a rank sends in an exchange")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main([int(size) for size in options.sizes.split(",")], options.rounds)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for hosts in map(int, options.hosts.split(",")):
        for link in options.links.split(","):
            print(f"\n{hosts} hosts at {link}, {options.rounds} rounds, ms", flush=True)
            run(hosts, link, options)


if __name__ == "__main__":
    main()
