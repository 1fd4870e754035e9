"""Parameters of every dtype, size and layout train with a wire as in plain DDP, bit by bit."""

import functools

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.harness import run_ranks
from tests.models import Staged, batch, flat_gradients, mlp
from tests.ranks.ddp.test_modes import TINY_BUCKETS, both_ways, train
from thinwire.engine.comm.process_group import torch_version

WIDTH = 24


class Odd(nn.Module):
    """Parameters of one element, of none, of no dimension, and complex ones."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(WIDTH, dtype=dtype))
        self.one = nn.Parameter(torch.randn(1, dtype=dtype))
        self.scalar = nn.Parameter(torch.randn((), dtype=dtype))
        self.nothing = nn.Parameter(torch.empty(0, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = x.to(self.weight.dtype) * self.weight * self.one * self.scalar
        return product + self.nothing.sum()


REAL = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def dtypes(rank: int, world_size: int, kinds: list[torch.dtype]) -> None:
    for dtype in kinds:
        for exact_program in (thinwire.Exact(), Staged()):
            both_ways(rank, functools.partial(Odd, dtype), program=exact_program, bucket_cap_mb=1e-5)
        for cast_program in (thinwire.FP16(), thinwire.BF16()):
            ddp = DDP(Odd(dtype), bucket_cap_mb=1e-5)
            thinwire.attach(ddp, cast_program)
            exact = train(DDP(Odd(dtype), bucket_cap_mb=1e-5), rank, steps=1)[0]
            torch.testing.assert_close(train(ddp, rank, steps=1)[0], exact, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kinds", [REAL, [torch.complex64]], ids=["real", "complex"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_dtypes_and_odd_parameters(world_size: int, kinds: list[torch.dtype]) -> None:
    if kinds == [torch.complex64] and torch_version() < (2, 9):
        pytest.skip(f"DDP of torch {torch.__version__} cannot broadcast complex parameters by Gloo (2.9 can)")
    run_ranks(dtypes, world_size, kinds)


class Empty(nn.Module):
    """Its second bucket holds nothing at all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.nothing = nn.Parameter(torch.empty(0, dtype=torch.float64))
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.nothing.sum().float()


def empty_bucket(rank: int, world_size: int) -> None:
    for program in (thinwire.Exact(), Staged()):
        assert both_ways(rank, Empty, program=program) >= 2


def test_an_empty_bucket() -> None:
    run_ranks(empty_bucket, 2)


def channels_last(rank: int, world_size: int) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
        for parameter in model.parameters():
            if parameter.dim() == 4:
                parameter.data = parameter.data.to(memory_format=torch.channels_last)
        return model

    def images(rank: int, step: int) -> torch.Tensor:
        return batch(rank, step, width=3 * 8 * 8).view(-1, 3, 8, 8).to(memory_format=torch.channels_last)

    plain, wired = DDP(build()), DDP(build())
    thinwire.attach(wired, Staged())
    for expected, got in zip(train(plain, rank, make=images), train(wired, rank, make=images), strict=True):
        assert torch.equal(expected, got)


def test_channels_last_parameters() -> None:
    run_ranks(channels_last, 2)


def frozen(rank: int, world_size: int) -> None:
    """Some parameters frozen before DDP is made, some after, some ignored by it."""

    def run(attached: bool) -> torch.Tensor:
        model = mlp()
        model[0].bias.requires_grad_(False)
        DDP._set_params_and_buffers_to_ignore_for_model(model, ["4.bias"])
        ddp = DDP(model, bucket_cap_mb=TINY_BUCKETS, find_unused_parameters=True)
        model[2].weight.requires_grad_(False)
        if attached:
            thinwire.attach(ddp, Staged(), check_every=1)
        for step in range(3):
            ddp(batch(rank, step)).square().mean().backward()
        return flat_gradients(model)

    assert torch.equal(run(attached=True), run(attached=False))


def test_frozen_and_ignored_parameters() -> None:
    run_ranks(frozen, 2)


def unfrozen(rank: int, world_size: int) -> None:
    for program in (thinwire.Exact(), thinwire.Int8(), thinwire.Schedule({0: thinwire.BF16()}), "auto"):
        for unfrozen_before_attach in (False, True):
            model = mlp()
            model[0].weight.requires_grad_(False)
            ddp = DDP(model, bucket_cap_mb=TINY_BUCKETS)
            model[0].weight.requires_grad_(unfrozen_before_attach)
            thinwire.attach(ddp, program)
            if not unfrozen_before_attach:
                ddp(batch(rank, 0)).square().mean().backward()
            model[0].weight.requires_grad_(True)
            with torch.no_grad():
                ddp(batch(rank, 1))
            with pytest.raises(thinwire.AttachError, match=r"'0\.weight' was frozen.*not exchanged.*now it"):
                ddp(batch(rank, 1))
            model[0].weight.requires_grad_(False)
            ddp(batch(rank, 1)).square().mean().backward()


def test_a_parameter_that_ddp_does_not_average_raises_when_it_is_unfrozen() -> None:
    run_ranks(unfrozen, 2)


def frozen_for_a_while(rank: int, world_size: int) -> None:
    """DDP averages what was frozen after it was made, so unfreezing that again is right."""
    models = [mlp(), mlp()]
    ddps = [DDP(one, bucket_cap_mb=TINY_BUCKETS, find_unused_parameters=True) for one in models]
    for one in models:
        one[0].requires_grad_(False)
    wire = thinwire.attach(ddps[1], thinwire.Exact())
    for trains in (False, True):
        for model, ddp in zip(models, ddps, strict=True):
            model[0].requires_grad_(trains)
            ddp.zero_grad()
            ddp(batch(rank, 0)).square().mean().backward()
        assert torch.equal(*(flat_gradients(one) for one in models))
    assert not wire._runner._unreduced


def test_a_parameter_that_was_frozen_after_ddp_was_made_may_be_unfrozen() -> None:
    run_ranks(frozen_for_a_while, 2)


def clipped_beside_an_ignored_one(rank: int, world_size: int) -> torch.Tensor:
    model = mlp(width=8, layers=2)
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["2.bias"])
    ddp = DDP(model)
    wire = thinwire.attach(ddp, thinwire.Int8())
    ddp(batch(rank, 0, width=8)).square().mean().backward()
    ignored = next(one for name, one in model.named_parameters() if name == "2.bias")
    ignored.grad = torch.full_like(ignored, 100.0 * (rank + 1))  # larger than all others
    wire.clip_grad_norm_(1e-3)
    assert ignored.grad.eq(100.0 * (rank + 1)).all()
    return torch.cat(
        [one.grad.flatten() for one in model.parameters() if one.grad is not None and one is not ignored]
    )


def test_a_parameter_that_ddp_ignores_does_not_make_ranks_clip_differently() -> None:
    first, second = run_ranks(clipped_beside_an_ignored_one, 2)
    assert torch.equal(first, second)
    assert first.norm() == pytest.approx(1e-3, rel=1e-3)
