"""The functions through which a gradient passes from DDP's hook, or the optimizer's step, to the network.

    .venv/bin/python benchmarks/call_chain.py [--show]

Recorded on rank 0 of two ranks, in the fourth step, on a model of one bucket, until torch.distributed is
called. A hop is a function that gets the gradient as an argument: a bucket, a large tensor, a collective, or
a program that holds one. `calls` counts all calls of thinwire's functions in that time, including small
helpers. `--show` lists the hops. `PYTHONPATH=other/src:.` records another checkout.
"""

import argparse
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType, GeneratorType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from benchmarks.ranks import run
from thinwire.ddp_comm_hooks import powerSGD_hook as power

SOURCE = str(Path(thinwire.__file__).parent)
NETWORK = ("all_reduce", "all_to_all_single", "all_gather_single", "broadcast", "_tag")
"""Functions of torch.distributed, and the one that names every message."""
GRADIENT = 64 * 64
"""Elements of the model's weight: tensors of at least this size are gradients."""
Call = tuple[str, str]
Attach = Callable[[DDP, torch.optim.Optimizer], Any]


def _power(ddp: DDP, _: torch.optim.Optimizer) -> None:
    ddp.register_comm_hook(power.PowerSGDState(None, 2, start_powerSGD_iter=0), power.powerSGD_hook)


def _with(program: Any) -> Attach:
    return lambda ddp, optimizer: thinwire.attach(ddp, program, optimizer=optimizer)


CASES: dict[str, Attach] = {
    "Exact": _with(thinwire.Exact()),
    "PowerSGD": _with(thinwire.PowerSGD(rank=2, warmup=0)),
    "powerSGD_hook": _power,
    "DiLoCo(Int4)": _with(thinwire.DiLoCo(period=1, program=thinwire.Int4())),
    "ZeRO": _with(thinwire.ZeRO()),
}


def _holds_gradient(value: object) -> bool:
    """Return whether a value is the gradient, or holds it directly."""
    if isinstance(value, torch.Tensor):
        return value.numel() >= GRADIENT
    if isinstance(value, dist.GradBucket | GeneratorType):
        return True
    held = [getattr(value, name, None) for name in ("buffer", "tensor", "program", "mean", "values")]
    return any(isinstance(value, torch.Tensor | GeneratorType) for value in held)


class Recorder:
    """A recorder of calls of thinwire's functions until the network is reached."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.hops: list[Call] = []
        self._on = False

    def begin(self) -> None:
        """Drop earlier records, and start to record."""
        self.calls, self.hops, self._on = [], [], True

    def profile(self, frame: FrameType, event: str, arg: object) -> None:
        """Record an event of Python's profiler."""
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if not self._on or (name in NETWORK and event == "call"):
            self._on = False
            return
        if event != "call" or not file.startswith(SOURCE) or name.startswith("<"):
            return
        call = (file[len(SOURCE) + 1 :], name)
        self.calls.append(call)
        arguments = frame.f_code.co_varnames[: frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount]
        given = [frame.f_locals.get(name) for name in arguments if name != "self"]
        if any(map(_holds_gradient, given)) and call not in self.hops:
            self.hops.append(call)


def chains(rank: int, world_size: int) -> dict[str, tuple[int, list[Call]]]:
    """Return the number of calls and the hops of every case."""
    found = {}
    for name, attach in CASES.items():
        torch.manual_seed(0)
        ddp = DDP(nn.Linear(64, 64))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        wire, recorder = attach(ddp, optimizer), Recorder()
        threading.setprofile(recorder.profile)
        for step in range(5):
            loss = ddp(torch.randn(4, 64)).sum()
            sys.setprofile(recorder.profile if step == 3 else None)
            averages = name.startswith("DiLoCo")
            if step == 3 and not averages:
                recorder.begin()
            loss.backward()
            if step == 3 and averages:
                recorder.begin()
            optimizer.step()
            sys.setprofile(None)
        threading.setprofile(None)
        found[name] = len(recorder.calls), recorder.hops
        dist.barrier()
        del wire, ddp, optimizer
    return found


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--show", action="store_true", help="list the calls")
    show = parser.parse_args().show
    print("case            hops  files  calls")
    for name, (calls, hops) in run(chains, 2).items():
        print(f"{name:14}  {len(hops):4}  {len({file for file, _ in hops}):5}  {calls:5}")
        for file, function in hops if show else ():
            print(f"    {file}  {function}")


if __name__ == "__main__":
    main()
