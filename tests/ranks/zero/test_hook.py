"""The ZeRO hooks under torch's names: from the first step, what plain DDP and the same optimizer compute."""

import os
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torchs_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.harness import run_ranks
from tests.models import batch, flat_parameters, late, mlp
from thinwire import ZeRO
from thinwire.ddp_comm_hooks import ddp_zero_hook, default_hooks
from thinwire.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step, hook_with_zero_step_interleaved
from thinwire.optim import ZeroRedundancyOptimizer
from thinwire.optim.zero_redundancy_optimizer import _OverlapStatus

KINDS: dict[str, Any] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.003}),
}


def groups_of(ddp: DDP) -> list[dict[str, Any]]:
    weights = [p for p in ddp.parameters() if p.dim() > 1]
    return [{"params": weights}, {"params": [p for p in ddp.parameters() if p.dim() <= 1], "lr": 0.01}]


def train(rank: int, kind: str, wrap: Any, hook: Any = None, steps: int = 50, **options: Any) -> torch.Tensor:
    """With `wrap` None: plain DDP."""
    random.seed(rank)
    shard = options.pop("shard_buckets", False)
    ddp = DDP(mlp(width=16, layers=4), bucket_cap_mb=options.pop("bucket_mb", 0.001), **options)
    for parameter in ddp.parameters():
        parameter.register_hook(late)
    optimizer_class, defaults = KINDS[kind]
    if wrap is None:
        optimizer = optimizer_class(groups_of(ddp), **defaults)
    else:
        optimizer = ZeroRedundancyOptimizer(
            groups_of(ddp), optimizer_class, overlap_with_ddp=True, **defaults
        )
        assert optimizer._overlap_info.status == _OverlapStatus.UNINITIALIZED
        ddp.register_comm_hook(None, wrap(hook or default_hooks.allreduce_hook, ddp, optimizer, shard))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 15, 0.5)
    for step in range(steps):
        ddp.zero_grad()
        ddp(batch(rank, step, 16)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    if wrap is not None:
        assert optimizer._overlap_info.status == _OverlapStatus.INITIALIZED
    return flat_parameters(ddp.module)


def against_ddp(rank: int, world_size: int) -> None:
    for kind in ("SGD", "AdamW") if world_size == 2 else ("SGD",):
        expected = train(rank, kind, None)
        for wrap in (hook_with_zero_step, hook_with_zero_step_interleaved):
            for shard in (False, True):
                got = train(rank, kind, wrap, shard_buckets=shard)
                if kind == "SGD":
                    assert torch.equal(got, expected), (wrap, shard)
                torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    "world_size", [1, pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)]
)
def test_from_the_first_step_bits_are_those_of_plain_ddp(world_size: int) -> None:
    assert run_ranks(against_ddp, world_size) == [None] * world_size


def users_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    assert dist.group.WORLD is not None
    return torchs_hooks._allreduce_fut(dist.group.WORLD, bucket.buffer())


def hooks_and_modes(rank: int, world_size: int) -> None:
    expected = train(rank, "SGD", None, steps=8)
    for wrap in (hook_with_zero_step, hook_with_zero_step_interleaved):
        for hook in (torchs_hooks.allreduce_hook, users_hook):
            assert torch.equal(train(rank, "SGD", wrap, hook, steps=8), expected)
        cast = train(rank, "SGD", wrap, default_hooks.fp16_compress_wrapper(users_hook), steps=8)
        torch.testing.assert_close(cast, expected, rtol=0.01, atol=0.001)
        for options in ({"static_graph": True}, {"gradient_as_bucket_view": True}, {"bucket_mb": 25}):
            assert torch.equal(train(rank, "SGD", wrap, steps=8, **options), expected), options
    refusals(rank)
    parts(rank, world_size)


def refusals(rank: int) -> None:
    ddp = DDP(mlp(width=16, layers=2))
    plain = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="zero was made without overlap_with_ddp=True"):
        hook_with_zero_step(default_hooks.allreduce_hook, ddp, plain)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    with pytest.raises(thinwire.UnavailableError, match="the step is inside backward"):
        zero.step(lambda: 0.0)


def parts(rank: int, world_size: int) -> None:
    """torch's helpers by their names: a step and a broadcast by hand come to the same."""
    ddp = DDP(mlp(width=16, layers=2))
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    expected = flat_parameters(ddp.module)

    def by_hand(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        reduced = default_hooks.allreduce_hook(state, bucket)
        reduced.wait()
        ddp_zero_hook._save_ddp_bucket_info(bucket, zero)
        ddp_zero_hook._perform_local_step(bucket, zero, rank)
        ddp_zero_hook._broadcast_bucket(bucket.index(), zero)
        return reduced

    ddp.register_comm_hook(None, by_hand)
    ddp(batch(rank, 0, 16)).square().mean().backward()
    gradients = torch.cat([p.grad.flatten() for p in ddp.parameters() if p.grad is not None])
    torch.testing.assert_close(flat_parameters(ddp.module), expected - 0.1 * gradients)


def test_any_hook_any_mode_and_refusals() -> None:
    assert run_ranks(hooks_and_modes, 2) == [None, None]


class Branches(nn.Module):
    """Three layers: one for all, one that no rank uses at some steps, one that only rank 1 uses at others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.seldom, self.on_1 = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor, rank: int, step: int) -> torch.Tensor:
        x = self.always(x)
        if step % 3 == 0:
            x = self.seldom(x)
        if rank == 1 and step % 2:
            x = self.on_1(x)
        return x


def branching(rank: int, overlap: Any, bucket_mb: float, steps: int = 8) -> torch.Tensor:
    """Momentum and weight decay change a parameter whose gradient is zero, and not one that has none."""
    ddp = DDP(Branches(), bucket_cap_mb=bucket_mb, find_unused_parameters=True)
    options: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}
    if overlap is None:
        optimizer = torch.optim.SGD(ddp.parameters(), **options)
    else:
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, **options)
        ddp.register_comm_hook(None, overlap(default_hooks.allreduce_hook, ddp, zero))
    for step in range(steps):
        ddp.zero_grad()
        ddp(batch(rank, step, 16), rank, step).square().mean().backward()
        if overlap is None:
            optimizer.step()
    return flat_parameters(ddp.module)


def unused(rank: int, world_size: int) -> None:
    for bucket_mb in (0.001, 25.0):
        expected = branching(rank, None, bucket_mb)
        for wrap in (hook_with_zero_step, hook_with_zero_step_interleaved):
            assert torch.equal(branching(rank, wrap, bucket_mb), expected), (wrap, bucket_mb)


def test_what_no_rank_used_is_not_stepped() -> None:
    run_ranks(unused, 2)


class Partly(nn.Module):
    """Four layers, one of which is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in (0, 1, 3):
            x = self.layers[number](x)
        return x


def partly(rank: int, wrap: Any, bucket_mb: float) -> torch.Tensor:
    ddp = DDP(Partly(), static_graph=True, bucket_cap_mb=bucket_mb)
    options: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}
    optimizer = torch.optim.SGD(ddp.parameters(), **options)
    if isinstance(wrap, ZeRO):
        thinwire.attach(ddp, wrap, optimizer=optimizer)
    elif wrap is not None:
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, **options)
        ddp.register_comm_hook(None, wrap(default_hooks.allreduce_hook, ddp, zero))
    for step in range(5):
        ddp.zero_grad()
        ddp(batch(rank, step, 16)).square().mean().backward()
        if wrap is None or isinstance(wrap, ZeRO):
            optimizer.step()
    return flat_parameters(ddp.module)


def unused_in_static_graphs(rank: int, world_size: int) -> None:
    for bucket_mb in (0.001, 25.0):
        expected = partly(rank, None, bucket_mb)
        for wrap in (
            hook_with_zero_step,
            hook_with_zero_step_interleaved,
            ZeRO(),
            ZeRO(interleaved=True),
        ):
            assert torch.equal(partly(rank, wrap, bucket_mb), expected), (wrap, bucket_mb)


def test_what_a_static_graph_never_uses_is_not_stepped() -> None:
    run_ranks(unused_in_static_graphs, 2)


def bereft(rank: int, world_size: int) -> str:
    ddp = DDP(mlp(width=16, layers=4), bucket_cap_mb=0.001)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    ddp.register_comm_hook(None, hook_with_zero_step_interleaved(default_hooks.allreduce_hook, ddp, zero))
    for step in range(3):
        if rank == 1 and step == 2:
            ddp(batch(rank, step, 16))
            os._exit(3)
        try:
            ddp(batch(rank, step, 16)).square().mean().backward()
        except RuntimeError as error:
            return str(error)
    return "nothing"


def test_a_rank_that_dies_mid_step_is_an_error() -> None:
    told, _ = run_ranks(bereft, 2, dies=[1], group_timeout=6)
    assert "rank 1" in told.lower()
