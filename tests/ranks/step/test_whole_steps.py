"""A step counts as a whole or not at all: with GradScalers, several optimizers, users' and torch's programs.

That all programs do is in test_matrix.py.
"""

import gc
import math
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.harness import run_ranks
from tests.models import Staged, batch, equal, flat_gradients, flat_parameters, mlp, own
from thinwire.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
from thinwire.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook


def backward(ddp: DDP, rank: int, step: int, *, bad: float = 1.0, scale: float = 1.0) -> None:
    ddp.zero_grad()
    (ddp(batch(rank, step)).square().mean() * (bad if rank == 1 else 1.0) * scale).backward()


def every_bucket(rank: int, world_size: int) -> None:
    """A NaN in one parameter's gradient, on one rank, undoes all buckets and reaches all gradients."""
    ddp = DDP(mlp(), bucket_cap_mb=0.002)
    wire = thinwire.attach(ddp, thinwire.Int4())
    backward(ddp, rank, 0)
    before = wire.state_dict()
    handle = ddp.module[10].bias.register_hook(lambda gradient: gradient * (math.nan if rank == 1 else 1.0))
    backward(ddp, rank, 1)
    handle.remove()
    assert flat_gradients(ddp.module).isnan().all()
    assert equal(wire.state_dict(), before)
    assert (wire.step, wire.stats().overflows, wire.stats().steps) == (1, 1, 2)
    backward(ddp, rank, 1)
    assert flat_gradients(ddp.module).isfinite().all()
    assert wire.step == 2


def test_one_number_undoes_all_buckets() -> None:
    run_ranks(every_bucket, 3)


def users_program(rank: int, world_size: int) -> None:
    """One that changes what it keeps in place, before its first collective."""
    ddp = DDP(mlp(), bucket_cap_mb=0.002)
    wire = thinwire.attach(ddp, Staged())
    for bad in (1.0, math.inf, 1.0):
        backward(ddp, rank, 0, bad=bad)
    assert own(wire.state_dict())["memory"]["0.weight"]["steps"].item() == 2


def test_programs_of_users_are_undone_too() -> None:
    run_ranks(users_program, 2)


class Counting(thinwire.Exact):
    """A subclass of a stateless program that counts the steps of each parameter."""

    def __call__(
        self, bucket: thinwire.Bucket, memory: thinwire.Memory
    ) -> thinwire.Collectives[thinwire.Outcome]:
        for name in bucket.names:
            memory.slot(name, "steps", lambda: torch.zeros(())).add_(1)
        return (yield from super().__call__(bucket, memory))


def subclasses(rank: int, world_size: int) -> None:
    """Two models with equal names, of which one takes two steps and an overflow between them."""
    models = [DDP(mlp()), DDP(mlp())]
    wires = [thinwire.attach(ddp, Counting()) for ddp in models]
    for bad in (1.0, math.inf, 1.0):
        backward(models[0], rank, 0, bad=bad)
    backward(models[1], rank, 0)
    counts = [own(wire.state_dict())["memory"]["0.weight"]["steps"].item() for wire in wires]
    assert counts == [2, 1]


def test_what_a_subclass_of_a_stateless_program_keeps_is_saved_undone_and_each_models_own() -> None:
    run_ranks(subclasses, 2)


def torch_named(rank: int, world_size: int, wrapped: bool) -> None:
    runs = []
    for bads in ((), (1, 2)):
        ddp = DDP(mlp(), bucket_cap_mb=0.002)
        ddp(batch(rank, 9)).sum().backward()  # DDP has its final buckets after its first backward
        state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=1)
        ddp.register_comm_hook(state, fp16_compress_wrapper(powerSGD_hook) if wrapped else powerSGD_hook)
        for step in range(4):
            if step in bads:
                backward(ddp, rank, step, bad=math.nan)
            backward(ddp, rank, step)
        runs.append([state.iter, state.error_dict, state.q_memory_dict, flat_gradients(ddp.module)])
    assert equal(*runs)


@pytest.mark.parametrize("wrapped", [False, True])
def test_torch_named_powersgd_is_undone_too(wrapped: bool) -> None:
    run_ranks(torch_named, 2, wrapped)


def several_optimizers(rank: int, world_size: int) -> None:
    """Each has a found_inf of its own: all must hear of an overflow in the other's parameters."""
    ddp = DDP(mlp(), bucket_cap_mb=0.002)
    thinwire.attach(ddp, thinwire.Int8())
    parameters = list(ddp.parameters())
    optimizers = [torch.optim.SGD(part, lr=0.1) for part in (parameters[:6], parameters[6:])]
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    before = flat_parameters(ddp.module).clone()
    hook = parameters[0].register_hook(lambda gradient: gradient * (math.inf if rank == 0 else 1.0))
    scaler.scale(ddp(batch(rank, 0)).square().mean()).backward()
    hook.remove()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert torch.equal(flat_parameters(ddp.module), before)


def test_all_optimizers_skip() -> None:
    run_ranks(several_optimizers, 2)


def growing(rank: int, world_size: int, which: str) -> None:
    """A scale that doubles and halves changes no bit of training in fp32, nor does another model's."""
    results = []
    other = torch.amp.GradScaler("cpu", init_scale=2.0)
    if which in ("of two", "another's"):
        other.scale(torch.ones(1))
    for scales in ((64.0,) * 6, (64.0, 128.0, 128.0, 256.0, 32.0, 64.0)):
        ddp = DDP(mlp(), bucket_cap_mb=0.002)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=which != "another's")
        if which == "frozen":
            gc.freeze()
        thinwire.attach(ddp, thinwire.Int4(), scaler=scaler if which == "named" else "auto")
        for step, scale in enumerate(scales):
            scaler.update(scale) if step else None
            if which == "another's":
                other.update(scale)
            optimizer.zero_grad()
            scaler.scale(ddp(batch(rank, step)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append(flat_parameters(ddp.module))
        del scaler
    assert torch.equal(*results)


@pytest.mark.parametrize("which", ["named", "the only one", "of two", "another's", "frozen"])
def test_residuals_follow_the_models_own_gradscaler(which: str) -> None:
    run_ranks(growing, 2, which)


class Detour(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.sometimes = torch.nn.Linear(24, 24), torch.nn.Linear(24, 24)

    def forward(self, x: torch.Tensor, sometimes: bool) -> Any:
        return self.always(torch.tanh(self.sometimes(x)) if sometimes else x)


def unused(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """What was applied, and what is still owed, of parameters that no rank uses in some steps."""
    ddp = DDP(Detour(), find_unused_parameters=True)
    wire = thinwire.attach(ddp, thinwire.TopK(0.05))
    applied = torch.zeros(24, 24)
    for step in range(9):
        ddp.zero_grad()
        ddp(batch(rank, step), sometimes=step % 3 == 0).square().mean().backward()
        gradient = ddp.module.sometimes.weight.grad
        assert (gradient is None) == (step % 3 > 0)
        applied += 0 if gradient is None else gradient
    return {"applied": applied, **own(wire.state_dict())["memory"]["sometimes.weight"]}


def given(rank: int) -> torch.Tensor:
    model, total = Detour(), torch.zeros(24, 24)
    for step in range(0, 9, 3):
        model.zero_grad()
        model(batch(rank, step), sometimes=True).square().mean().backward()
        assert model.sometimes.weight.grad is not None
        total += model.sometimes.weight.grad
    return total


def test_nothing_is_lost_of_parameters_that_nobody_used() -> None:
    found = run_ranks(unused, 2)
    owed = sum(one["residual"] for one in found) / 2
    torch.testing.assert_close(found[0]["applied"] + owed, sum(given(rank) for rank in range(2)) / 2)


def skipping(rank: int, world_size: int) -> None:
    ddp = DDP(mlp())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.1)
    thinwire.attach(ddp, thinwire.Int8(), optimizer=optimizer, skip_overflows=True)
    before = flat_parameters(ddp.module).clone()
    backward(ddp, rank, 0, bad=math.inf)
    optimizer.step()
    assert torch.equal(flat_parameters(ddp.module), before)
    assert not optimizer.state, "not even counted"
    assert not flat_gradients(ddp.module).any(), "and no NaN is left to overflow later steps"
    backward(ddp, rank, 1)
    optimizer.step()
    assert not torch.equal(flat_parameters(ddp.module), before)
    assert flat_parameters(ddp.module).isfinite().all()


def test_without_a_gradscaler_steps_are_skipped_if_asked() -> None:
    run_ranks(skipping, 2)
