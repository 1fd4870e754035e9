"""Exact vectors beside compressed matrices: in the same exchange, or in one all-reduce at a step's end."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.harness import run_ranks
from tests.models import batch, flat_gradients, mlp, own

PROGRAMS: dict[str, thinwire.Program] = {
    "Int8": thinwire.Int8(),
    "TopK": thinwire.TopK(0.1),
    "BF16": thinwire.BF16(),
    "PowerSGD": thinwire.PowerSGD(rank=2, min_compression=1, factor_dtype="bf16", warmup=0),
}
OPS: dict[str, dict[str, int]] = {
    "Int8": {"AllToAll": 1, "AllGather": 1},
    "TopK": {"AllGather": 1},
    "BF16": {"AllReduce": 1},
    "PowerSGD": {"AllReduce": 2},
}
"""The collectives of a bucket. From three ranks on, TopK's are those of Int8."""


def collectives(rank: int, world_size: int) -> dict[str, Any]:
    """The collectives of a step of several buckets, and the gradients of vectors, exact and beside others."""
    found = {}
    for name, program in PROGRAMS.items():
        plain, wired = DDP(mlp(), bucket_cap_mb=0.002), DDP(mlp(), bucket_cap_mb=0.002)
        wire = thinwire.attach(wired, program)
        for step in range(3):
            for ddp in (plain, wired):
                ddp.zero_grad()
                ddp(batch(rank, step)).square().mean().backward()
        last = wire.stats().last
        assert last is not None
        vectors = [
            (one.grad, other.grad)
            for one, other in zip(plain.parameters(), wired.parameters(), strict=True)
            if one.dim() == 1
        ]
        matrices = [
            torch.equal(one.grad, other.grad)
            for one, other in zip(plain.parameters(), wired.parameters(), strict=True)
            if one.dim() == 2 and one.grad is not None and other.grad is not None
        ]
        buckets = own(wire.state_dict())["buckets"]
        if name != "Int8":  # a bucket of vectors has no exchange of its own
            buckets = [bucket for bucket in buckets if any("weight" in one for one in bucket)]
        ops = {} if world_size == 1 else OPS["Int8" if name == "TopK" and world_size > 2 else name]
        wanted = Counter({kind: count * len(buckets) for kind, count in ops.items()})
        wanted["AllReduce"] += name != "Int8"
        assert len(buckets) > 2
        assert Counter(op.kind for op in last.ops) == +wanted, name
        found[name] = (vectors, matrices, flat_gradients(wired.module))
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_vectors_cost_no_collective_of_their_own_or_one_a_step(world_size: int) -> None:
    ranks = run_ranks(collectives, world_size)
    for name in PROGRAMS:
        vectors, matrices, gradients = ranks[0][name]
        assert all(matrices) if world_size == 1 else not any(matrices)
        for exact, found in vectors:
            torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-9)
        assert all(torch.equal(one[name][2], gradients) for one in ranks)


class Mixed(nn.Module):
    """Vectors of two dtypes, which DDP puts in different buckets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.two(self.one(x).double())
        return found


def of_two_dtypes(rank: int, world_size: int) -> None:
    for program in PROGRAMS.values():
        plain, wired = DDP(Mixed()), DDP(Mixed())
        wire = thinwire.attach(wired, program, check_every=1)
        for step in range(3):
            for ddp in (plain, wired):
                ddp.zero_grad()
                ddp(batch(rank, step, width=16)).square().mean().backward()
            for name in ("one.bias", "two.bias"):
                exact, found = (ddp.module.get_parameter(name).grad for ddp in (plain, wired))
                torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-9)
        del wire


def test_vectors_of_several_dtypes() -> None:
    run_ranks(of_two_dtypes, 2)


class Vectors(nn.Module):
    """A model in bf16, nearly all of whose parameters are one vector."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.scale = nn.Linear(32, 32, bias=False), nn.Parameter(torch.ones(32 * 400))
        self.to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x).repeat(1, 400) * self.scale
        return found


def in_bf16(rank: int, world_size: int) -> dict[str, tuple[int, torch.Tensor]]:
    """Bytes of a step and the vector's gradient, by program."""
    found = {}
    for name, program in {"Exact": thinwire.Exact(), "Int8": thinwire.Int8()}.items():
        ddp = DDP(Vectors())
        wire = thinwire.attach(ddp, program)
        ddp(batch(rank, 0, width=32).to(torch.bfloat16)).square().mean().backward()
        last, gradient = wire.stats().last, ddp.module.get_parameter("scale").grad
        assert last is not None
        assert gradient is not None
        found[name] = (last.bytes_sent, gradient.clone())
    return found


def test_vectors_of_a_bf16_model_send_no_more_bytes_than_plain_ddp() -> None:
    ranks = run_ranks(in_bf16, 2)
    for found in ranks:
        assert found["Int8"][0] <= found["Exact"][0]
        torch.testing.assert_close(found["Int8"][1], found["Exact"][1], rtol=2**-7, atol=0)
        assert torch.equal(found["Int8"][1], ranks[0]["Int8"][1])
