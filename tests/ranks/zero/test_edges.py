"""ZeRO with models and loops that are not plain."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.harness import run_ranks
from tests.models import COMPLEX, batch, flat_parameters, mlp
from thinwire import Exact, ZeRO
from thinwire.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step, hook_with_zero_step_interleaved
from thinwire.ddp_comm_hooks.default_hooks import allreduce_hook
from thinwire.ddp_comm_hooks.optimizer_overlap_hooks import register_optimizer_overlap
from thinwire.optim import ZeroRedundancyOptimizer


class Kinds(nn.Module):
    """Parameters with strides of their own, of complex numbers, of one number and of none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.pairs = nn.Parameter(torch.randn(3, dtype=COMPLEX))
        self.single = nn.Parameter(torch.randn(()))
        self.nothing = nn.Parameter(torch.randn(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.conv(x).square().mean((0, 2, 3))
        result: torch.Tensor = features.sum() + (self.pairs * features[:3]).abs().sum() + self.single.square()
        return result + self.nothing.sum()


def image(rank: int, step: int) -> torch.Tensor:
    return torch.randn(2, 2, 5, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def trained(
    rank: int, make: Callable[[DDP], Any], build: Any = Kinds, inputs: Any = image
) -> list[torch.Tensor]:
    ddp = DDP(build())
    optimizer = make(ddp)
    for step in range(4):
        ddp.zero_grad()
        ddp(inputs(rank, step)).sum().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in ddp.parameters()]


def attached(program: Any, kind: Any = torch.optim.SGD, **options: Any) -> Callable[[DDP], Any]:
    def make(ddp: DDP) -> Any:
        optimizer = kind(ddp.parameters(), lr=0.05, **options)
        thinwire.attach(ddp, program, optimizer=optimizer)
        return optimizer

    return make


def hooked(wrap: Any) -> Callable[[DDP], Any]:
    def make(ddp: DDP) -> Any:
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.05)
        ddp.register_comm_hook(None, wrap(allreduce_hook, ddp, zero))
        return zero

    return make


def kinds_of_parameters(rank: int) -> None:
    expected = trained(rank, attached(Exact()))
    for make in (
        attached(ZeRO()),
        attached(ZeRO(interleaved=True)),
        hooked(hook_with_zero_step),
        hooked(hook_with_zero_step_interleaved),
        overlapped,
    ):
        for one, other in zip(trained(rank, make), expected, strict=True):
            torch.testing.assert_close(one, other)
            assert one.stride() == other.stride()


def users_changes(rank: int) -> None:
    """What a user writes to parameters stays, although owners keep more of them than they send."""
    ddp = DDP(mlp(width=8, layers=2))
    optimizer = attached(ZeRO(parameters=torch.bfloat16))(ddp)
    for step in range(3):
        optimizer.zero_grad()
        ddp(batch(rank, step, 8)).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        for parameter in ddp.parameters():
            parameter.clamp_(-0.01, 0.01)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.zero_grad()
    ddp(batch(rank, 9, 8)).square().mean().backward()
    optimizer.step()
    assert flat_parameters(ddp.module).abs().max() <= 0.0101


def kept_optimizer(rank: int) -> None:
    ddp = DDP(mlp(width=8, layers=2))
    before = flat_parameters(ddp.module)
    thinwire.attach(ddp, ZeRO(interleaved=True), optimizer=torch.optim.SGD(ddp.parameters(), lr=0.1))
    ddp(batch(rank, 0, 8)).square().mean().backward()
    assert not torch.equal(flat_parameters(ddp.module), before), "nobody else holds the optimizer"


class Counting(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


def counters(rank: int) -> None:
    with pytest.raises(thinwire.UnavailableError, match="Counting keeps 'k' for all of its parameters"):
        trained(rank, attached(ZeRO(interleaved=True), Counting), lambda: mlp(width=8, layers=2), small)
    trained(rank, attached(ZeRO(), Counting), lambda: mlp(width=8, layers=2), small)


def small(rank: int, step: int) -> torch.Tensor:
    return batch(rank, step, 8)


def wrong_clipping(rank: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        ddp = DDP(mlp(width=8, layers=1).to(dtype))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        wire = thinwire.attach(ddp, ZeRO(), optimizer=optimizer)
        for scaled in (False, True):
            optimizer.zero_grad()
            (100 * ddp(batch(rank, 0, 8).to(dtype))).square().mean().backward()
            if scaled:
                halve(ddp)
                wire.clip_grad_norm_(math.inf)
            optimizer.step()
        optimizer.zero_grad()
        (100 * ddp(batch(rank, 0, 8).to(dtype))).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
        with pytest.raises(thinwire.UnavailableError, match=r"use wire\.clip_grad_norm_"):
            optimizer.step()


def halve(ddp: DDP) -> None:
    """Not clipping: biases only."""
    for parameter in ddp.parameters():
        if parameter.dim() == 1 and parameter.grad is not None:
            parameter.grad.mul_(0.5)


def micro_batches_after_a_skipped_step(rank: int) -> None:
    """A GradScaler has left out a step: the next one's micro-batches are no leftovers of it."""
    for zero_first in (True, False):
        ddp = DDP(mlp(width=8, layers=2))
        optimizer = attached(ZeRO())(ddp)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(ddp(small(rank, 0)).square().mean() * (torch.inf if rank else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        before = flat_parameters(ddp.module)
        if zero_first:
            optimizer.zero_grad()
        with ddp.no_sync():
            loss = ddp(small(rank, 1)).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
        scaler.scale(ddp(small(rank, 2)).square().mean()).backward()
        scaler.step(optimizer)
        after = flat_parameters(ddp.module)
        assert after.isfinite().all()
        assert not torch.equal(after, before)

        optimizer.zero_grad()
        scaler.scale(ddp(small(rank, 3)).square().mean()).backward()
        with ddp.no_sync():
            ddp(small(rank, 4)).square().mean().backward()
        with pytest.raises(RuntimeError, match="adds to gradients that were already exchanged"):
            ddp(small(rank, 5)).square().mean().backward()
        del scaler  # others step inside backward, where none may be in use


def overlapped(ddp: DDP) -> Any:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    register_optimizer_overlap(ddp, optimizer)
    return optimizer


def misuse(rank: int) -> None:
    ddp = DDP(mlp(width=8, layers=2))
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.05)
    with pytest.raises(RuntimeError, match="pass all groups when the optimizer is made"):
        zero.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(ddp(small(rank, 0)).square().mean()).backward()
    with pytest.raises(thinwire.UnavailableError, match="a GradScaler was used"):
        scaler.step(zero)
    for register in (attached(ZeRO(interleaved=True)), hooked(hook_with_zero_step), overlapped):
        fresh = DDP(mlp(width=8, layers=2))
        register(fresh)
        before = flat_parameters(fresh.module)
        with pytest.raises(RuntimeError, match="a GradScaler is in use"):
            scaler.scale(fresh(small(rank, 0)).square().mean()).backward()
        assert torch.equal(flat_parameters(fresh.module), before)
    fresh = DDP(mlp(width=8, layers=2))
    optimizer = torch.optim.SGD(fresh.parameters(), lr=0.1)
    with pytest.raises(thinwire.OptionError, match=r"cannot unscale gradients before ZeRO.*bf16"):
        thinwire.attach(fresh, ZeRO(interleaved=True), optimizer=optimizer, scaler=scaler)
    thinwire.attach(fresh, ZeRO(interleaved=True), optimizer=optimizer, scaler=None)
    fresh(small(rank, 0)).square().mean().backward()  # the scaler in use is another model's
    del scaler
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    single = ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.SGD, process_group=alone, overlap_with_ddp=True, lr=0.05
    )
    with pytest.raises(thinwire.OptionError, match="give both the same process_group"):
        hook_with_zero_step(allreduce_hook, ddp, single)


def two_ranks(rank: int, world_size: int) -> None:
    micro_batches_after_a_skipped_step(rank)
    for check in (kinds_of_parameters, users_changes, kept_optimizer, counters, wrong_clipping, misuse):
        check(rank)


def owning_nothing(rank: int, world_size: int) -> None:
    """More ranks than parameters: a scaler works, and owners are the same whatever was loaded."""
    ddp = DDP(nn.Linear(4, 4))
    optimizer = attached(ZeRO(), torch.optim.AdamW)(ddp)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(4):
        optimizer.zero_grad()
        loss = ddp(batch(rank, step, 4)).square().mean() * (torch.inf if step == 1 and rank == 2 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0
    del scaler  # the next model steps inside backward, where none may be in use
    assert optimizer.param_groups[0]["params"][0].isfinite().all()

    plain = torch.optim.SGD(nn.Linear(4, 4).parameters(), lr=0.05, momentum=0.9)
    plain.param_groups[0]["params"][0].grad = torch.ones(4, 4)
    plain.param_groups[0]["params"][1].grad = torch.ones(4)
    plain.step()
    ddp = DDP(nn.Linear(4, 4))
    zero = ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.05, momentum=0.9
    )
    zero.load_state_dict(plain.state_dict())
    ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, zero))
    for step in range(2):
        ddp.zero_grad()
        ddp(batch(rank, step, 4)).square().mean().backward()
    own = flat_parameters(ddp.module)
    others = [torch.zeros_like(own) for _ in range(world_size)]
    dist.all_gather(others, own)
    assert all(torch.equal(other, own) for other in others)


def test_models_and_loops_that_are_not_plain() -> None:
    assert run_ranks(two_ranks, 2) == [None, None]


def test_ranks_that_own_nothing() -> None:
    assert run_ranks(owning_nothing, 3) == [None] * 3
