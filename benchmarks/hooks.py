"""Step time and bytes of thinwire's programs, plain DDP and torch's hooks on emulated links.

    .venv/bin/python benchmarks/hooks.py --hosts 2,4 --links 10mbit,100mbit,unlimited

Every round has one step of each contestant, in random order. Figures are medians. Bytes are per rank and
step. torch's quantization hooks raise IndexError on Gloo. They run repaired (benchmarks/mended.py) and in one
bucket, because they race with more. torch's bf16 hook does not support CPUs.
"""

import argparse
import json
import os
import statistics
import sys
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from benchmarks.mended import mend
from thinwire.tools.bench.contestants import Contestant
from thinwire.tools.bench.devices import ON_CPU
from thinwire.tools.bench.measure import measure
from thinwire.tools.bench.results import Track
from thinwire.tools.bench.torch_baselines import COUNTERPARTS, ONE_BUCKET_MB, Counterpart, hook_counterpart
from thinwire.tools.bench.workloads import find_workload
from thinwire.tools.lab.namespaces import Lab
from thinwire.tools.lab.network import plan
from thinwire.tools.lab.run import run_on

MARK = "hooks "
PER_TENSOR, PER_CHANNEL = "quantization_pertensor_hook", "quantization_perchannel_hook"
OURS = ["BF16", "TwoShot(Quantize(block=64))", "Int8", "Int4", "Int2", "FP8", "Sign", "TopK"]


def _mended(name: str) -> Counterpart:
    """Return torch's hook of that name, repaired and in one bucket."""

    def register(ddp: DDP, program: Any) -> None:
        ddp.register_comm_hook(ddp.process_group, getattr(mend(), name))

    return hook_counterpart(lambda program: name, register, ONE_BUCKET_MB)


def contestants() -> list[Contestant]:
    """Return plain DDP, torch's hooks and thinwire's programs."""
    # A torch contestant is found by the name of the program that it is compared with.
    COUNTERPARTS["Int8"], COUNTERPARTS["Int4"] = _mended(PER_TENSOR), _mended(PER_CHANNEL)
    return [
        Contestant("DDP", "ddp", ""),
        Contestant("torch fp16_compress_hook", "torch", "FP16"),
        Contestant(f"torch {PER_TENSOR}", "torch", "Int8"),
        Contestant(f"torch {PER_CHANNEL}", "torch", "Int4"),
        *(Contestant(text, "thinwire", text) for text in OURS),
    ]


def rank(workload: str, steps: int, bucket_mb: float) -> None:
    """Run one rank on its host."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = measure(find_workload(workload), contestants(), steps, bucket_mb, lambda *_: None, overtime=None)
    if dist.get_rank() == 0:
        print(f"\n{MARK}{json.dumps([asdict(track) for track in found])}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def run(hosts: int, link: str, options: argparse.Namespace) -> list[Track]:
    """Measure one cell of the grid."""
    tracks: list[Track] = []

    def listen(host: int, stream: str, line: str) -> None:
        if line.startswith(MARK):
            tracks.extend(Track(**track) for track in json.loads(line.removeprefix(MARK)))
        elif "Error" in line:
            print(f"host {host} | {line}", file=sys.stderr)

    arguments = [
        "--rank",
        "--bucket-mb",
        str(options.bucket_mb),
        "--workload",
        options.workload,
        "--steps",
        str(options.steps + 2),
    ]
    with Lab(plan(hosts=hosts, rate=link)) as lab:
        run_on(lab, ["env", f"{ON_CPU}=1", sys.executable, "-W", "ignore", __file__, *arguments], listen)
    return tracks


def show(tracks: list[Track], skip: int) -> None:
    """Print one line for each contestant."""
    ran = [track for track in tracks if track.unavailable is None]
    step = {track.name: statistics.median(track.step_seconds[skip:]) for track in ran}
    rival = step[f"torch {PER_TENSOR}"]
    channel = step[f"torch {PER_CHANNEL}"]
    heads = {"step": 10, "spread": 9, "x DDP": 8, "x per t.": 9, "x per ch.": 10, "device": 11, "meter": 11}
    print(" " * 36 + "".join(f"{head:>{width}}" for head, width in heads.items()))
    for track in tracks:
        if track.unavailable is not None:
            print(f"{track.name:<36}  cannot run: {track.unavailable[:70]}")
            continue
        own, times = step[track.name], track.step_seconds[skip:]
        quarters = statistics.quantiles(times, n=4)
        sent = [
            statistics.median(values[skip:]) if values else None
            for values in (track.device_bytes, track.meter_bytes)
        ]
        print(
            f"{track.name:<36}{1e3 * own:>7.0f} ms{100 * (quarters[2] - quarters[0]) / own:>7.0f} %"
            f"{step['DDP'] / own:>8.2f}{rival / own:>9.2f}{channel / own:>10.2f}"
            + "".join(f"{f'{value / 1e6:.3f} MB' if value is not None else '':>11}" for value in sent)
        )


def main() -> None:
    """Measure every cell, and print its table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", default="2,4")
    parser.add_argument("--links", default="10mbit,100mbit,unlimited")
    parser.add_argument("--workload", default="gpt-1m")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--bucket-mb", type=float, default=25, help="except for torch's quantization hooks")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options.workload, options.steps, options.bucket_mb)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for hosts in map(int, options.hosts.split(",")):
        for link in options.links.split(","):
            size = f"{options.workload} in buckets of {options.bucket_mb:g} MB"
            print(f"\n{hosts} hosts at {link}, {size}, {options.steps} rounds")
            show(run(hosts, link, options), skip=2)


if __name__ == "__main__":
    main()
