"""Step time over the synchronous floor, and against plain DDP and torch, on emulated links.

    .venv/bin/python benchmarks/step_floor.py                                # 2 hosts at 100 Mbit/s
    .venv/bin/python benchmarks/step_floor.py --hosts 2 --links 10mbit
    .venv/bin/python benchmarks/step_floor.py --hosts 4 --links 100mbit
    .venv/bin/python benchmarks/step_floor.py --against ../old/src           # nothing got slower?

The floor is max(compute, time of the first gradient + bytes / bandwidth + optimizer). Every round has one
step of each contestant, in random order. Figures are medians with quartiles. Below each table are the aims
for that network. With --against, the same contestants of another checkout take every second round.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.checkouts import SOURCE, Turns, use_checkout

if TYPE_CHECKING:  # a rank must choose the checkout before it imports thinwire
    from thinwire.tools.bench.results import Cell
    from thinwire.tools.bench.summary import Row

MARK = "step_floor "
POWERSGD = "PowerSGD(rank=4,factor_dtype='bf16')"
PROGRAMS = ["Int8", "Int4", POWERSGD, "ZeRO", "ZeRO(interleaved=True)"]
PORTS_APART = 100


@dataclass(frozen=True)
class Aim:
    """A ratio of step times that should not be exceeded.

    Attributes:
        name: The contestant.
        against: "floor", "DDP" or "torch".
        most: The largest ratio that meets the aim.
        hosts: The number of hosts to which it applies.
        links: The links to which it applies.
    """

    name: str
    against: str
    most: float
    hosts: tuple[int, ...] = (2,)
    links: tuple[str, ...] = ("100mbit",)

    def measured(self, row: "Row") -> float:
        """Return the measured ratio."""
        if self.against == "floor":
            return row.over_floor or float("nan")
        speed_up = row.speed_up[1] if self.against == "DDP" and row.speed_up else row.torch_speed_up
        return 1 / speed_up if speed_up else float("nan")


BOTH_LINKS = ("10mbit", "100mbit")
AIMS = [
    *(Aim(name, "floor", 1.15) for name in ("Int8", "Int4")),
    *(Aim(name, "floor", 1.10, links=("10mbit",)) for name in ("Int8", "Int4")),
    Aim(POWERSGD, "floor", 1.25),
    *(Aim(name, "floor", 1.25, hosts=(4,), links=BOTH_LINKS) for name in ("Int8", "Int4", POWERSGD)),
    Aim("ZeRO", "DDP", 1.10, hosts=(2, 4), links=BOTH_LINKS),
    Aim("ZeRO(interleaved=True)", "DDP", 1.00, hosts=(2, 4), links=BOTH_LINKS),
    Aim(POWERSGD, "torch", 0.85),
    Aim(POWERSGD, "torch", 0.65, links=("10mbit",)),
]


def rank(options: argparse.Namespace) -> None:
    """Run one rank of one checkout on its host."""
    use_checkout(Path(options.checkout))
    import torch
    import torch.distributed as dist

    from thinwire.tools.bench.contestants import line_up
    from thinwire.tools.bench.measure import measure
    from thinwire.tools.bench.workloads import find_workload

    turns = Turns(Path(options.turns), options.number, options.count)

    def next_round(kind: str, done: int) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            turns.pass_on()
            turns.wait()
        dist.barrier()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        turns.wait()
    dist.barrier()
    tracks = measure(
        find_workload(options.workload),
        line_up(options.programs, with_torch=not options.no_torch),
        options.rounds,
        options.bucket_mb,
        next_round,
        overtime=None,
    )
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"\n{MARK}{json.dumps([asdict(track) for track in tracks])}", flush=True)
        turns.pass_on()
    dist.destroy_process_group()


def measure_cell(hosts: int, link: str, options: argparse.Namespace) -> list["Cell"]:
    """Measure one network. Return one cell for each checkout."""
    from thinwire.tools.bench.results import Cell, Track
    from thinwire.tools.lab.namespaces import Lab
    from thinwire.tools.lab.network import parse_rate, plan
    from thinwire.tools.lab.run import run_on

    checkouts = [SOURCE, *([options.against] if options.against else [])]
    found: list[list[Track]] = [[] for _ in checkouts]
    network = plan(hosts=hosts, rate=link)

    def run(number: int, lab: Lab, folder: str) -> None:
        def listen(host: int, stream: str, line: str) -> None:
            if line.startswith(MARK):
                found[number] = [Track(**track) for track in json.loads(line.removeprefix(MARK))]
            elif "Error" in line:
                print(f"host {host} | {line}", file=sys.stderr)

        command = rank_command(options, number, len(checkouts), checkouts[number], folder)
        port = int(lab.environment(0)["MASTER_PORT"]) + number * PORTS_APART
        finished = run_on(lab, ["env", "THINWIRE_BENCH_ON_CPU=1", f"MASTER_PORT={port}", *command], listen)
        if finished.exit_code:
            Turns(Path(folder, "turn"), number, len(checkouts)).fail()

    with tempfile.TemporaryDirectory() as folder, Lab(network) as lab:
        threads = [
            threading.Thread(target=run, args=(number, lab, folder)) for number in range(len(checkouts))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if not all(found):
        raise SystemExit("a rank failed: see the error above")
    return [
        Cell(options.workload, hosts, link, str(network), parse_rate(link), 0, tracks) for tracks in found
    ]


def rank_command(
    options: argparse.Namespace, number: int, count: int, source: Path, folder: str
) -> list[str]:
    """Return the command of a rank."""
    words = ["--workload", options.workload, "--rounds", str(options.rounds)]
    words += ["--bucket-mb", str(options.bucket_mb)] if options.bucket_mb else []
    own = ["--number", str(number), "--count", str(count), "--checkout", str(source)]
    flags = ["--no-torch"] if options.no_torch else []
    place = ["--turns", f"{folder}/turn", *flags, "--programs", *options.programs]
    return [sys.executable, "-W", "ignore", __file__, *words, *own, *place]


def show(cell: "Cell") -> None:
    """Print one line for each contestant."""
    from thinwire.tools.bench.summary import rows

    widths = {"step (quartiles)": 24, "link": 9, "floor": 9, "vs floor": 10, "x DDP": 8, "x torch": 9}
    print(" " * 40 + "".join(f"{head:>{width}}" for head, width in widths.items()))
    for row in rows(cell):
        if row.step is None or row.speed_up is None:
            print(f"{row.name:<40}  {row.unavailable}")
            continue
        low, middle, high = (1e3 * seconds for seconds in row.step)
        link, floor = 1e3 * (row.link_floor or 0.0), 1e3 * (row.floor or 0.0)
        torchs = f"{1 / row.torch_speed_up:>9.2f}" if row.torch_speed_up else f"{'-':>9}"
        print(
            f"{row.name:<40}{f'{middle:.0f} ms ({low:.0f}-{high:.0f})':>24}{link:>6.0f} ms{floor:>6.0f} ms"
            f"{row.over_floor:>10.2f}{1 / row.speed_up[1]:>8.2f}{torchs}"
        )


def show_aims(cell: "Cell") -> None:
    """Print each aim for this network with its measured figure."""
    from thinwire.tools.bench.summary import rows

    found = {row.name: row for row in rows(cell) if row.step}
    for aim in AIMS:
        if cell.hosts in aim.hosts and cell.link in aim.links and aim.name in found:
            measured = aim.measured(found[aim.name])
            outcome = "met" if measured <= aim.most else "not met"
            what = {"floor": "the floor", "DDP": "plain DDP", "torch": "torch's hook"}[aim.against]
            print(f"  {aim.name:<38} at most {aim.most:.2f} x {what:<13} {measured:.2f}  {outcome}")


def compare(new: "Cell", old: "Cell") -> None:
    """Print the step of this checkout over that of the other, by round."""
    print(f"{'':<40}{'other':>10}{'this':>10}{'this / other (quartiles)':>30}")
    others = {track.name: track for track in old.tracks}
    for track in new.tracks:
        other = others.get(track.name)
        if other is None or not other.step_seconds or not track.step_seconds:
            continue
        mine, theirs = track.step_seconds[3:], other.step_seconds[3:]
        low, middle, high = statistics.quantiles([a / b for a, b in zip(mine, theirs, strict=True)], n=4)
        verdict = "slower" if low > 1 else "faster" if high < 1 else "as fast"
        steps = "".join(f"{1e3 * statistics.median(seconds):>7.0f} ms" for seconds in (theirs, mine))
        print(f"{track.name:<40}{steps}{f'{middle:.2f} ({low:.2f}-{high:.2f})':>20} {verdict:>9}")


def main() -> None:
    """Measure every network, and print its table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add: Callable[..., object] = parser.add_argument
    add("--hosts", default="2")
    add("--links", default="100mbit")
    add("--workload", default="gpt-1m")
    add("--rounds", type=int, default=30)
    add("--bucket-mb", type=float, help="default: the best for each contestant")
    add("--programs", nargs="+", default=PROGRAMS, help="as for thinwire bench, but separated by spaces")
    add("--no-torch", action="store_true")
    add("--against", type=Path, metavar="SRC", help="the folder src of another checkout")
    for hidden in ("--checkout", "--turns"):
        add(hidden, help=argparse.SUPPRESS)
    for hidden in ("--number", "--count"):
        add(hidden, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.checkout:
        rank(options)
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    for hosts in map(int, options.hosts.split(",")):
        for link in options.links.split(","):
            cells = measure_cell(hosts, link, options)
            print(f"\n{cells[0].network}, {options.workload}, {options.rounds} rounds")
            show(cells[0])
            show_aims(cells[0])
            for old in cells[1:]:
                print(f"\nagainst {options.against}, in turns")
                compare(cells[0], old)


if __name__ == "__main__":
    main()
