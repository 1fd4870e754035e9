"""Every program in every precision: resumed, overflowing, accumulating, with unused layers and other buckets.

Each cell trains three times on two ranks: without a break; resumed half-way by a new DDP model, with buckets
of another size; and with an extra step in which one rank's gradients are infinite or NaN. All three must end
with the same parameters, bit by bit, on all ranks, and the bad step must have been skipped on all.
"""

import copy
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.harness import run_ranks
from tests.models import flat_parameters

STEPS, BREAK, BAD = 4, 2, 1

PROGRAMS: dict[str, Any] = {
    "Exact": thinwire.Exact(),
    "BF16": thinwire.BF16(),
    "FP16": thinwire.FP16(),
    "Int8": thinwire.Int8(),
    "Int4 stochastic": thinwire.Int4(stochastic=True),
    "Int2": thinwire.Int2(),
    "FP8": thinwire.FP8(),
    "Sign": thinwire.Sign(),
    "TopK": thinwire.TopK(0.1),
    "RandomK": thinwire.RandomK(0.25),
    "PowerSGD": thinwire.PowerSGD(rank=2, warmup=2),
    "PowerSGD int8": thinwire.PowerSGD(rank=2, factor_dtype="int8", warmup=0),
    "PowerSGD flatten": thinwire.PowerSGD(rank=1, flatten=True, warmup=0),
    "Warmup": thinwire.Warmup(thinwire.Int4(), steps=3),
    "Partition": thinwire.Partition([("*.bias", thinwire.Exact())], default=thinwire.Int4()),
    "AcrossNodes": thinwire.AcrossNodes(thinwire.Int8(), node_size=1),
    "ZeRO": thinwire.ZeRO(),
    "ZeRO Int8": thinwire.ZeRO(thinwire.Int8()),
    "ZeRO PowerSGD": thinwire.ZeRO(thinwire.PowerSGD(rank=2, warmup=0)),
    "LocalSGD": thinwire.LocalSGD(period=2, warmup_steps=2, gradients=thinwire.Int8()),
    "Hierarchical": thinwire.Hierarchical({2: None}, warmup_steps=2, gradients=thinwire.Int4()),
    "DiLoCo": thinwire.DiLoCo(period=2, warmup_steps=2, program=thinwire.Int4()),
    "SparseLoCo": thinwire.SparseLoCo(period=2, warmup_steps=2),
    "Schedule": thinwire.Schedule({0: thinwire.Exact(), 1: thinwire.Int4(), 3: thinwire.LocalSGD(period=2)}),
}


@dataclass(frozen=True)
class Way:
    """How a cell trains."""

    no_sync: bool = False
    unused: bool = False
    buckets: float = 25.0
    buckets_after: float = 25.0


WAYS = {
    "no_sync": Way(no_sync=True),
    "unused parameters": Way(unused=True, buckets=0.002),
    "bucket rebuild": Way(buckets=0.002, buckets_after=0.006),
}


class Net(nn.Module):
    """Layers in another order than they are used in, so that DDP rebuilds its buckets; one is optional."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last = nn.Linear(32, 4)
        self.optional = nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)
        self.first = nn.Linear(16, 32)

    def forward(self, x: torch.Tensor, *, detour: bool) -> torch.Tensor:
        hidden = self.norm(torch.tanh(self.first(x)))
        out: torch.Tensor = self.last(torch.tanh(self.optional(hidden)) if detour else hidden)
        return out


class Job:
    """One rank's training run in one precision."""

    def __init__(self, rank: int, program: Any, precision: str, way: Way, buckets: float) -> None:
        self.rank, self.way, self.precision = rank, way, precision
        net = Net().to(torch.bfloat16) if precision == "bf16" else Net()
        self.ddp = DDP(net, bucket_cap_mb=buckets, find_unused_parameters=way.unused)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.05, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=precision == "fp16 scaled")
        self.wire = thinwire.attach(self.ddp, program, optimizer=self.optimizer, scaler=self.scaler)

    def state(self) -> list[Any]:
        held = (self.ddp.module, self.optimizer, self.scaler, self.wire)
        return [one.state_dict() for one in held]

    def load(self, states: list[Any]) -> None:
        held = (self.ddp.module, self.optimizer, self.scaler, self.wire)
        for one, state in zip(held, states, strict=True):
            one.load_state_dict(state)

    def train(self, first: int, last: int, bad: float | None = None) -> None:
        """The steps; before one of them, an extra one that overflows, or just what a scaler does after it."""
        for step in range(first, last):
            if step == BAD and bad is not None:
                self.step(step, factor=bad if self.rank == 1 else 1.0)
            elif step == BAD and self.scaler.is_enabled():
                self.scaler.update(self.scaler.get_scale() / 2)
            self.step(step)

    def step(self, step: int, factor: float = 1.0) -> None:
        self.optimizer.zero_grad()
        halves = self.batch(step).chunk(2) if self.way.no_sync else [self.batch(step)]
        for half in halves[:-1]:
            with self.ddp.no_sync():
                self.backward(half, step, 1.0)
        self.backward(halves[-1], step, factor)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def batch(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * step + self.rank)
        x = torch.randn(8, 16, generator=generator)
        return x.to(torch.bfloat16) if self.precision == "bf16" else x

    def backward(self, x: torch.Tensor, step: int, factor: float) -> None:
        detour = not self.way.unused or step % 2 == 0
        with torch.autocast("cpu", torch.float16, enabled=self.precision == "fp16 scaled"):
            loss = self.ddp(x, detour=detour).square().mean()
        self.scaler.scale(loss.float() * factor).backward()

    def result(self) -> torch.Tensor:
        self.wire.finalize()
        return flat_parameters(self.ddp.module).clone()


def cell(rank: int, program: Any, precision: str, way: Way) -> str:
    """What is wrong with it; empty if nothing is."""
    whole = Job(rank, program, precision, way, way.buckets)
    whole.train(0, BREAK)
    state = copy.deepcopy(whole.state())
    whole.train(BREAK, STEPS)
    expected = whole.result()
    resumed = Job(rank, program, precision, way, way.buckets_after)
    resumed.load(state)
    resumed.train(BREAK, STEPS)
    overflowing = Job(rank, program, precision, way, way.buckets)
    overflowing.train(0, STEPS, bad=math.inf if way.no_sync else math.nan)
    return "; ".join(
        wrong
        for wrong, holds in {
            "ranks differ": same_everywhere(expected),
            "not finite": bool(expected.isfinite().all()),
            "a resumed run differs": torch.equal(resumed.result(), expected),
            "a run with a bad step differs": torch.equal(overflowing.result(), expected),
            "the bad step was not skipped": overflowing.wire.stats().overflows == 1,
            "steps were miscounted": overflowing.wire.step == whole.wire.step == STEPS,
        }.items()
        if not holds
    )


def same_everywhere(own: torch.Tensor) -> bool:
    all_ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(all_ranks, own)
    return all(torch.equal(own, other) for other in all_ranks)


def cells(rank: int, world_size: int, name: str, precision: str) -> dict[str, str]:
    return {kind: cell(rank, PROGRAMS[name], precision, way) for kind, way in WAYS.items()}


@pytest.mark.parametrize(
    "precision",
    [
        "fp32",
        pytest.param("bf16", marks=pytest.mark.slow),
        pytest.param("fp16 scaled", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_matrix(name: str, precision: str) -> None:
    """What is wrong in each way of training, on each rank."""
    assert run_ranks(cells, 2, name, precision) == [dict.fromkeys(WAYS, "")] * 2
