"""The functions through which a gradient passes from DDP's hook, or the optimizer's step, to the network.

    .venv/bin/python benchmarks/call_chain.py [--show]

Recorded on rank 0 of two ranks, in the fourth step, on a model of one bucket, until torch.distributed sends
the gradient. A function is on the way if it is on the stack when a program yields a collective, when the
gradient is handed to the wire thread, or when torch.distributed is called. A helper gets the gradient as an
argument (a bucket, a large tensor, a collective, or a program that holds one) and returns before. `calls`
counts all calls of thinwire's functions in that time. `--show` lists the hops, and marks helpers with a dot.
`PYTHONPATH=other/src:.` records another checkout.
"""

import argparse
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, GeneratorType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from benchmarks.ranks import run
from thinwire.ddp_comm_hooks import powerSGD_hook as power

SOURCE = str(Path(thinwire.__file__).parent)
NETWORK = (
    "send",
    "recv",
    "allreduce",
    "alltoall_base",
    "_allgather_base",
    "_reduce_scatter_base",
    "broadcast",
)
"""Methods of process groups that send or receive."""
WIDTH = 256
GRADIENT = WIDTH * WIDTH // 8
"""Bytes of the weight's gradient in Int4, divided by four: smaller tensors are messages about an exchange."""
Call = tuple[str, str]
Attach = Callable[[torch.optim.Optimizer, nn.Module], Any]


def _power(optimizer: torch.optim.Optimizer, ddp: Any) -> None:
    ddp.register_comm_hook(power.PowerSGDState(None, 16, start_powerSGD_iter=2), power.powerSGD_hook)


def _with(program: Any) -> Attach:
    return lambda optimizer, model: thinwire.attach(model, program, optimizer=optimizer)


def _between_replicas(optimizer: torch.optim.Optimizer, model: nn.Module) -> Any:
    return thinwire.attach(model, thinwire.Int8(), replicas=_mesh()["replicate"], optimizer=optimizer)


def _mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))


CASES: dict[str, Attach] = {
    "Exact": _with(thinwire.Exact()),
    "Int8": _with(thinwire.Int8()),
    "PowerSGD": _with(thinwire.PowerSGD(rank=16, warmup=0)),
    "powerSGD_hook": _power,
    "DiLoCo(Int4)": _with(thinwire.DiLoCo(period=1, program=thinwire.Int4())),
    "ZeRO": _with(thinwire.ZeRO()),
    "FSDP2 + Int8": _between_replicas,
}


def _holds_gradient(value: object, depth: int = 2) -> bool:
    """Return whether a value is the gradient, or holds it directly."""
    if isinstance(value, torch.Tensor):
        return value.nbytes >= GRADIENT
    if isinstance(value, dist.GradBucket):
        return True
    if not depth:
        return False
    if isinstance(value, GeneratorType):
        held = list(value.gi_frame.f_locals.values()) if value.gi_frame is not None else []
    else:
        held = [getattr(value, name, None) for name in ("buffer", "tensor", "program", "mean", "values")]
    return any(_holds_gradient(inner, depth - 1) for inner in held)


class Recorder:
    """A recorder of calls of thinwire's functions until the network is reached."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.hops: list[Call] = []
        self.way: set[Call] = set()
        self._on = False
        self._latest: tuple[int, list[Call]] = (0, [])
        """The thread of the latest hop, and the stack under it."""

    def begin(self) -> None:
        """Drop earlier records, and start to record."""
        self.calls, self.hops, self.way, self._latest, self._on = [], [], set(), (0, []), True

    def network(self, tensors: object) -> None:
        """End the record if a process group gets the gradient."""
        listed = tensors if isinstance(tensors, list) else [tensors]
        if self._on and any(map(_holds_gradient, listed)):
            self._found(list(self._stack(sys._getframe(1))))
            self._on = False

    def profile(self, frame: FrameType, event: str, arg: object) -> None:
        """Record an event of Python's profiler."""
        if not self._on or not frame.f_code.co_filename.startswith(SOURCE):
            return
        if event == "return" and isinstance(arg, thinwire.AllReduce.__mro__[1]) and _holds_gradient(arg):
            self._found(list(self._stack(frame)))  # a program yields a collective
        if event != "call" or frame.f_code.co_name.startswith("<"):
            return
        call = _call_of(frame)
        self.calls.append(call)
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if any(_holds_gradient(frame.f_locals.get(name)) for name in names if name != "self"):
            if call not in self.hops:
                self.hops.append(call)
            thread, stack = self._latest
            if thread not in (0, threading.get_ident()):
                self._found(stack)  # handed from one thread to another
            self._latest = threading.get_ident(), list(self._stack(frame))

    def _found(self, stack: list[Call]) -> None:
        self.way.update(stack)
        self.hops += [call for call in reversed(stack) if call not in self.hops]

    def _stack(self, frame: FrameType | None) -> Iterator[Call]:
        while frame is not None:
            if frame.f_code.co_filename.startswith(SOURCE) and not frame.f_code.co_name.startswith("<"):
                yield _call_of(frame)
            frame = frame.f_back


def _call_of(frame: FrameType) -> Call:
    return frame.f_code.co_filename[len(SOURCE) + 1 :], frame.f_code.co_name


def _watch_network(recorder: Recorder) -> None:
    """Report the tensors of every call of a process group's methods to the recorder."""
    for name in NETWORK:
        method = getattr(dist.ProcessGroup, name)

        def watched(group: Any, tensors: object, *args: Any, method: Any = method, **options: Any) -> Any:
            recorder.network(tensors)
            return method(group, tensors, *args, **options)

        setattr(dist.ProcessGroup, name, watched)


def chains(rank: int, world_size: int) -> dict[str, tuple[int, list[Call], set[Call]]]:
    """Return the number of calls, the hops, and those on the way, of every case."""
    recorder, found = Recorder(), {}
    _watch_network(recorder)
    for name, attach in CASES.items():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        model: Any = fully_shard(module, mesh=_mesh()["shard"]) if name.startswith("FSDP2") else DDP(module)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wire = attach(optimizer, model)
        threading.setprofile(recorder.profile)
        for step in range(5):
            optimizer.zero_grad()
            loss = model(torch.randn(4, WIDTH)).sum()
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
        found[name] = len(recorder.calls), recorder.hops, recorder.way
        dist.barrier()
        del wire, model, module, optimizer
    return found


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--show", action="store_true", help="list the hops")
    show = parser.parse_args().show
    print("                on the way     with helpers")
    print("case            hops  files    hops  files    calls")
    for name, (calls, hops, way) in run(chains, 2).items():
        files, through = {file for file, _ in hops}, {file for file, _ in way}
        print(f"{name:14}  {len(way):4}  {len(through):5}    {len(hops):4}  {len(files):5}    {calls:5}")
        for call in hops if show else ():
            print(f"  {' ' if call in way else '·'} {call[0]}  {call[1]}")


if __name__ == "__main__":
    main()
