"""The planner's predictions of step times, compared with measurements on emulated links.

    .venv/bin/python benchmarks/plan.py                                      # all, half an hour
    .venv/bin/python benchmarks/plan.py --workloads gpt-1m --links 100mbit   # a part
    .venv/bin/python benchmarks/plan.py --no-run                             # only predict again
    .venv/bin/python benchmarks/plan.py --published                          # predict docs/benchmarks.md

The grid is plain DDP and six programs on two GPTs, 2 and 4 hosts, 10 Mbit/s to unlimited. Each cell probes
its network as `thinwire plan` does under torchrun, then measures, in rounds with one step of each contestant.
Cells are saved to --out, from which an interrupted run is resumed. The time without communication is taken
from the cell. Everything else is predicted: the model's gradients and the speed of programs are measured once
in this process.

An error is predicted over measured, minus 1. The winner is the fastest contestant. A predicted winner is
right if its measured step is within 5 % of the fastest.
"""

import argparse
import json
import os
import statistics
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from thinwire.plan import compute
from thinwire.plan.network import Link, Network
from thinwire.plan.probe import probe_group
from thinwire.tools.bench.contestants import BUCKET_MB, line_up
from thinwire.tools.bench.devices import ON_CPU
from thinwire.tools.bench.measure import measure
from thinwire.tools.bench.predict import Prediction, predict
from thinwire.tools.bench.results import Cell, Track, plain
from thinwire.tools.bench.workloads import find_workload
from thinwire.tools.lab.namespaces import Lab
from thinwire.tools.lab.network import parse_rate, plan
from thinwire.tools.lab.run import run_on

MARK = "plan "
PROGRAMS = ["BF16", "Int8", "Int4", "Sign", "TopK", "PowerSGD(rank=4,factor_dtype='bf16',warmup=0)"]
MEDIAN, WORST, RIGHT, NEAR = 0.10, 0.30, 0.95, 1.05
SLOW_STEPS = 6
"""Rounds at 10 Mbit/s, where a step of plain DDP takes up to half a minute and hardly varies."""

POWERSGD = "PowerSGD(rank=4,factor_dtype='bf16')"
PUBLISHED: list[tuple[int, str, tuple[float, float, float], dict[str, float]]] = [
    (2, "100mbit", (76, 24, 7), {"": 471, "BF16": 263, "Int8": 159, "Int4": 120, "Int2": 109, POWERSGD: 105}),
    (2, "10mbit", (76, 24, 7), {"": 4342, "Int8": 1167, "Int4": 683, "Int2": 386, POWERSGD: 205}),
    (4, "100mbit", (153, 54, 14), {"": 759, "Int8": 289, "Int4": 259, "Int2": 235, POWERSGD: 223}),
]
"""Steps over the floor of docs/benchmarks.md, gpt-1m: hosts, link, and milliseconds.

The first three are a step without communication, its first gradient and its optimizer. The table has the sum
of the last two. The others are measured steps, plain DDP first.
"""

Saved = dict[str, Any]
"""A cell as saved: `cell` and `network` as plain values."""


def rank(options: argparse.Namespace) -> None:
    """Run one rank on its host."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    network = probe_group(dist.group.WORLD)  # type: ignore[arg-type] # there is one
    workload = find_workload(options.workloads)
    contestants = line_up(options.programs, with_torch=False)
    tracks = measure(workload, contestants, options.steps, None, lambda *_: None, overtime=None)
    if dist.get_rank() == 0:
        found = {"tracks": [asdict(track) for track in tracks], "network": asdict(network)}
        print(f"\n{MARK}{json.dumps(plain(found))}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def run(workload: str, hosts: int, link: str, options: argparse.Namespace) -> Saved:
    """Probe and measure one cell."""
    found: dict[str, Any] = {}

    def listen(host: int, stream: str, line: str) -> None:
        if line.startswith(MARK):
            found.update(json.loads(line.removeprefix(MARK)))
        elif "Error" in line:
            print(f"host {host} | {line}", file=sys.stderr)

    steps = min(options.steps, SLOW_STEPS) if link == "10mbit" else options.steps
    words = ["--rank", "--workloads", workload, "--steps", str(steps + 3), "--programs", *options.programs]
    with Lab(plan(hosts=hosts, rate=link)) as lab:
        run_on(lab, ["env", f"{ON_CPU}=1", sys.executable, "-W", "ignore", __file__, *words], listen)
    if not found:
        raise SystemExit(f"{workload}, {hosts} hosts at {link}: a rank failed, see the error above")
    tracks = [Track(**track) for track in found["tracks"]]
    size = sum(parameter.numel() for parameter in find_workload(workload).model().parameters())
    cell = Cell(workload, hosts, link, f"{hosts} hosts at {link}", parse_rate(link), size, tracks)
    return {"cell": asdict(cell), "network": found["network"]}


def network_of(saved: Saved) -> Network:
    """Return the probed network of a saved cell."""
    values = saved["network"]
    return Network(**{**values, "link": Link(**values["link"])})


def load(path: Path) -> dict[str, Saved]:
    """Return the saved cells by their names."""
    saved: dict[str, Saved] = json.loads(path.read_text()) if path.exists() else {}
    return saved


def show(name: str, found: list[Prediction]) -> None:
    """Print one line for each contestant: predicted and measured steps, and the error of each term."""
    print(
        f"\n{name}\n{'':<38}{'predicted':>11}{'measured':>11}{'step':>8}{'bytes':>8}{'encode':>8}{'wire':>8}"
    )
    for prediction in found:
        times = f"{1e3 * prediction.predicted.step:>8.0f} ms{1e3 * prediction.measured['step']:>8.0f} ms"
        errors = (prediction.error(term) for term in ("step", "bytes", "encode", "wire"))
        print(f"{prediction.name:<38}{times}{''.join(_percent(error) for error in errors)}")


def _percent(error: float | None) -> str:
    return f"{'-':>8}" if error is None else f"{100 * error:>+6.0f} %"


def winner_is_right(found: list[Prediction]) -> bool:
    """Return whether the contestant that is predicted to be fastest is so, or within 5 % of the fastest."""
    chosen = min(found, key=lambda prediction: prediction.predicted.step)
    return chosen.measured["step"] <= NEAR * min(prediction.measured["step"] for prediction in found)


def conclude(cells: dict[str, list[Prediction]]) -> None:
    """Print the errors of all cells, with the aims."""
    errors = [abs(prediction.error() or 0.0) for found in cells.values() for prediction in found]
    right = statistics.mean(winner_is_right(found) for found in cells.values())
    middle, worst = statistics.median(errors), max(errors)
    print(f"\n{len(errors)} rows in {len(cells)} cells")
    for what, value, met in (
        (f"median error, aim at most {MEDIAN:.0%}", middle, middle <= MEDIAN),
        (f"worst error, aim at most {WORST:.0%}", worst, worst <= WORST),
        (f"right winner, aim at least {RIGHT:.0%} of cells", right, right >= RIGHT),
    ):
        print(f"  {what:<44}{value:>7.1%}  {'met' if met else 'not met'}")


def published() -> dict[str, list[Prediction]]:
    """Predict the steps of docs/benchmarks.md, with the rates of links."""
    work = find_workload("gpt-1m")
    model, found = compute.measure(work.model(), partial(work.batch, 0), work.optimizer), {}
    for hosts, link, (step, first, optimizer), steps in PUBLISHED:
        alone = Track("alone", "alone", "", step_seconds=[step / 1e3] * 4, losses=[(4, 1.0)])
        alone.first_gradient_seconds, alone.optimizer_seconds = [first / 1e3], [optimizer / 1e3]
        tracks = [_track(text, milliseconds / 1e3) for text, milliseconds in steps.items()]
        cell = Cell("gpt-1m", hosts, link, f"{hosts} hosts at {link}", parse_rate(link), 0, [*tracks, alone])
        found[cell.network] = predict(cell, model, 2)
    return found


def _track(text: str, seconds: float) -> Track:
    """Return a contestant whose steps all took the same time."""
    track = Track(text or "DDP", "thinwire" if text else "ddp", text, step_seconds=[seconds] * 4)
    track.losses, track.bucket_mb = [(0, 1.0), (4, 1.0)], BUCKET_MB.get(text)
    return track


def main() -> None:
    """Measure the cells that --out lacks, predict all of them, and print the errors."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", default="gpt-1m,gpt-6m")
    parser.add_argument("--hosts", default="2,4")
    parser.add_argument("--links", default="10mbit,100mbit,1gbit,unlimited")
    parser.add_argument("--programs", nargs="+", default=PROGRAMS)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("plan-grid.json"))
    parser.add_argument("--no-run", action="store_true", help="predict saved cells only")
    parser.add_argument("--given", action="store_true", help="take the link's rate instead of the probe")
    parser.add_argument("--published", action="store_true", help="predict docs/benchmarks.md only")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    if options.published:
        cells = published()
        for name, found in cells.items():
            show(name, found)
        conclude(cells)
        return
    saved, predicted = load(options.out), {}
    for workload in options.workloads.split(","):
        work = find_workload(workload)
        model = compute.measure(work.model(), partial(work.batch, 0), work.optimizer)
        for hosts in map(int, options.hosts.split(",")):
            for link in options.links.split(","):
                name = f"{workload}, {hosts} hosts at {link}"
                if name not in saved and not options.no_run:
                    saved[name] = run(workload, hosts, link, options)
                    options.out.write_text(json.dumps(plain(saved)))
                if name in saved:
                    cell = Cell.from_json(saved[name]["cell"])
                    network = None if options.given else network_of(saved[name])
                    predicted[name] = predict(cell, model, os.cpu_count() or 1, network)
                    show(name, predicted[name])
    conclude(predicted)


if __name__ == "__main__":
    main()
