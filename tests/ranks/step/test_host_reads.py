"""How often the host reads a value in a step: once, after backward; on an accelerator each read is a stop."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode

import thinwire
from tests.harness import run_ranks
from tests.models import batch, mlp
from thinwire import AllReduce, Bucket, Collectives, Memory, Outcome
from thinwire.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
from thinwire.ddp_comm_hooks.default_hooks import allreduce_hook
from thinwire.optim import ZeroRedundancyOptimizer
from thinwire.step.runner import AttachedRun
from thinwire.strategies.zero.overlap import Overlap

aten = torch.ops.aten
folder, torch_folder = (str(Path(str(one.__file__)).parent) for one in (thinwire, torch))
READING = {
    aten._local_scalar_dense.default,  # item(), bool(), float(), int()
    aten.nonzero.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.masked_select.default,
    aten.unique_dim.default,
    aten._unique2.default,
}


class Reads(TorchDispatchMode):
    """Counts reads of values by the host, during backward and after it, when the step is settled."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.during = self.after = 0
        self.settling = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masks = func is aten.index.Tensor and any(
            one is not None and one.dtype == torch.bool for one in args[1]
        )
        self.read((func in READING or masks) and _ours())
        return func(*args, **(kwargs or {}))

    def read(self, happened: bool = True) -> None:
        if self.settling:
            self.after += happened
        else:
            self.during += happened

    def settled(self, ends: Callable[[Any], None]) -> Callable[[Any], None]:
        def marked(owner: Any) -> None:
            self.settling = True
            ends(owner)

        return marked

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count reads; those of a step's end, after DDP's final callback, apart from those of backward."""
        tolist = torch.Tensor.tolist

        def listed(tensor: torch.Tensor) -> Any:
            self.read()  # a copy to host memory, which no dispatch mode sees on the CPU
            return tolist(tensor)

        with pytest.MonkeyPatch.context() as patch, self:
            patch.setattr(torch.Tensor, "tolist", listed)
            patch.setattr(AttachedRun, "settle", self.settled(AttachedRun.settle))
            patch.setattr(Overlap, "_finish", self.settled(Overlap._finish))
            yield


def _ours() -> bool:
    """Whether thinwire asks, and not DDP itself, which reads its own map of used parameters in C++."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith(torch_folder + "/autograd"):
        if frame.f_code.co_filename.startswith(folder):
            return True
        frame = frame.f_back
    return False


def as_on_an_accelerator(*engines: Any) -> None:
    for engine in engines:
        engine._inline = True  # all of it on backward's thread


def optimizer_of(ddp: DDP) -> torch.optim.Optimizer:
    return torch.optim.SGD(ddp.parameters(), lr=1e-3, momentum=0.9)  # Adam reads its own count, on the CPU


CASES: dict[str, tuple[Callable[[], Any], dict[str, Any], int]] = {
    "Exact": (thinwire.Exact, {}, 1),
    "Int8": (thinwire.Int8, {}, 1),
    "PowerSGD": (lambda: thinwire.PowerSGD(rank=2, min_compression=1, warmup=0), {}, 1),
    "Sign": (thinwire.Sign, {}, 1),
    "GradScaler": (thinwire.Int8, {"scaled": True}, 1),
    "split buckets": (thinwire.Int8, {"rules": [("2.*", thinwire.Int4())]}, 1),
    # One read shows both whether means are finite and which parameters were used.
    "unused parameters": (thinwire.Int8, {"ddp": {"find_unused_parameters": True}}, 1),
    "a static graph": (thinwire.Int8, {"ddp": {"static_graph": True}}, 1),
    "audit": (thinwire.Int8, {"audit_every": 1}, 2),  # and the figures, in one piece
    "check_every": (thinwire.Int8, {"check_every": 1}, 2),  # and the fingerprints, in one piece
    "all of them": (thinwire.Int8, {"check_every": 1, "audit_every": 1, "scaled": True}, 3),
    # The second is of a tensor that the host has made of the first.
    "ZeRO": (thinwire.ZeRO, {"optimizer": True}, 2),
    "ZeRO of Int8": (lambda: thinwire.ZeRO(thinwire.Int8()), {"optimizer": True}, 2),
    "ZeRO, scaled": (lambda: thinwire.ZeRO(thinwire.Int8()), {"optimizer": True, "scaled": True}, 2),
    "ZeRO, interleaved": (lambda: thinwire.ZeRO(interleaved=True), {"optimizer": True}, 1),
    "DiLoCo": (lambda: thinwire.DiLoCo(2, program=thinwire.Int4()), {"optimizer": True}, 1),
    "DiLoCo, warm": (lambda: thinwire.DiLoCo(2, warmup_steps=99), {"optimizer": True}, 1),
    "LocalSGD": (lambda: thinwire.LocalSGD(2), {"optimizer": True}, 1),
}


def reads(rank: int, world_size: int, names: list[str]) -> dict[str, list[tuple[int, int]]]:
    found = {}
    for name in names:
        make, options, _ = CASES[name]
        options = dict(options)
        ddp = DDP(mlp(), bucket_cap_mb=0.004, **options.pop("ddp", {}))
        optimizer, scaled = optimizer_of(ddp), options.pop("scaled", False)
        scaler = GradScaler("cpu", init_scale=4.0, growth_interval=1, enabled=scaled)
        if options.pop("optimizer", False):
            options["optimizer"] = optimizer
        wire = thinwire.attach(ddp, make(), **options)
        runner = wire._runner
        own = getattr(runner.strategy, "_engine", None)
        as_on_an_accelerator(runner.engine, *([own] if own else []))
        counts = []
        for step in range(4):
            loss = scaler.scale(ddp(batch(rank, step)).square().mean())
            seen = Reads()
            with seen.watching():
                loss.backward()
            counts.append((seen.during, seen.after))
            scaler.step(optimizer)
            scaler.update()
            ddp.zero_grad()
        if own is None and "DiLoCo" not in name and "LocalSGD" not in name:
            assert len({op.bucket for op in wire.stats().records[-1].ops}) > 1, "one bucket shows nothing"
        found[name] = counts[1:]
        del wire, runner, own, ddp
    return found


@pytest.mark.parametrize("names", [list(CASES)[start::3] for start in range(3)], ids=["1", "2", "3"])
def test_the_host_reads_after_backward_only_and_as_little_as_it_can(names: list[str]) -> None:
    for found in run_ranks(reads, 2, names):
        assert found == {name: [(0, CASES[name][2])] * 3 for name in names}


class Branches(nn.Module):
    """Layers that some ranks do not use in some steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.seldom = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: torch.Tensor, used: bool) -> torch.Tensor:
        x = self.always(x)
        result: torch.Tensor = self.seldom(x) if used else x
        return result


def optimizer_in_backward(rank: int, world_size: int) -> list[tuple[int, int]]:
    ddp = DDP(Branches(), bucket_cap_mb=0.001, find_unused_parameters=True)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, zero))
    counts = []
    for step in range(4):
        ddp.zero_grad()
        loss = ddp(batch(rank, step), used=(step + rank) % 2 == 0).square().mean()
        seen = Reads()
        with seen.watching():
            loss.backward()
        counts.append((seen.during, seen.after))
    return counts[1:]


def test_steps_inside_backward_read_the_use_of_parameters_after_it() -> None:
    for counts in run_ranks(optimizer_in_backward, 2):
        assert counts == [(0, 2)] * 3, "the means, and the parameters that ranks have used"


def curious(bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
    mean = yield AllReduce(bucket.buffer)
    return Outcome(mean if mean.isfinite().all() and mean.tolist() else bucket.buffer)


def watched(rank: int, world_size: int) -> tuple[int, int]:
    ddp = DDP(mlp())
    engine = thinwire.attach(ddp, curious)._runner.engine
    as_on_an_accelerator(engine)
    with (seen := Reads()).watching():
        ddp(batch(rank, 0)).square().mean().backward()
    return seen.during, seen.after


def test_a_read_during_backward_is_seen() -> None:
    """Without it the tests above would show nothing."""
    assert run_ranks(watched, 2) == [(2, 1)] * 2
