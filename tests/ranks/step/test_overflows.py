"""An inf or NaN on one rank skips the optimizer's step on all ranks, without a GradScaler and by default."""

import copy
import gc
import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

import thinwire
from tests.harness import run_ranks
from tests.models import batch, equal, flat_gradients, flat_parameters, mlp, own
from thinwire import DiLoCo, Exact, Int8, LocalSGD, PowerSGD, Schedule, TopK, ZeRO
from thinwire.ddp_comm_hooks.default_hooks import allreduce_hook

PROGRAMS: dict[str, Callable[[], Any]] = {
    "Exact": Exact,
    "Int8": Int8,
    "PowerSGD": lambda: PowerSGD(rank=2, min_compression=1, warmup=0),
    "TopK": lambda: TopK(0.05),
    "Schedule": lambda: Schedule({0: Exact(), 1: Int8()}),
    "ZeRO": lambda: ZeRO(Int8()),
    "ZeRO, rounded": lambda: ZeRO(parameters=torch.bfloat16),
    "DiLoCo, warm": lambda: DiLoCo(2, warmup_steps=99),
}
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": partial(SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "AdamW": partial(AdamW, lr=0.01),
    "fused AdamW": partial(AdamW, lr=0.01, fused=True),
}


class Records(logging.Handler):
    """The warnings of thinwire, as texts."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logging.getLogger("thinwire").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def backward(ddp: Any, rank: int, step: int, bad: float = 1.0) -> None:
    (ddp(batch(rank, step)).square().mean() * (bad if rank == 1 else 1.0)).backward()


def states(ddp: DDP, optimizer: Optimizer, wire: thinwire.Wire) -> list[Any]:
    """All that a skipped step must leave as it was, bit by bit."""
    kept = {key: value for key, value in own(wire.state_dict()).items() if key != "buckets"}
    return copy.deepcopy([ddp.module.state_dict(), optimizer.state_dict(), kept, wire.step])


def skipped(rank: int, world_size: int) -> None:
    warned = Records()
    for name, program in PROGRAMS.items():
        for kind, made in OPTIMIZERS.items():
            if kind != "SGD" and name not in ("Int8", "ZeRO"):
                continue
            ddp = DDP(mlp(), bucket_cap_mb=0.002)
            optimizer = made(ddp.parameters())
            wire = thinwire.attach(ddp, program(), optimizer=optimizer)
            for step in range(6):
                optimizer.zero_grad()
                before = states(ddp, optimizer, wire)
                backward(ddp, rank, step, bad={0: math.inf, 3: math.nan}.get(step, 1.0))
                if step == 3:
                    wire.clip_grad_norm_(1.0)  # of NaN: nothing of it may reach the parameters
                optimizer.step()
                same = equal(states(ddp, optimizer, wire), before)
                assert same == (step in (0, 3)), f"{name}, {kind}, step {step}"
            parameters = flat_parameters(ddp.module)
            assert parameters.isfinite().all(), f"{name}, {kind}"
            assert identical(parameters), f"{name}, {kind}"
            assert (wire.step, wire.stats().overflows) == (4, 2), f"{name}, {kind}"
            assert "2 steps skipped after overflows" in str(wire.stats())
    assert not warned.texts, "a skipped step is no news for the log"


def identical(own: torch.Tensor) -> bool:
    all_ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(all_ranks, own)
    return all(torch.equal(own, other) for other in all_ranks)


def test_an_infinite_gradient_skips_the_step_on_all_ranks() -> None:
    run_ranks(skipped, 2)


def found(rank: int, world_size: int) -> None:
    """Optimizers that were not given to attach are found when they step, in their first step too."""
    hooks = len(_global_optimizer_pre_hooks)
    ddp = DDP(mlp())
    parameters = list(ddp.parameters())
    optimizers = [SGD(parameters[:6], lr=0.1, momentum=0.9), AdamW(parameters[6:], lr=0.1)]
    thinwire.attach(ddp, Int8())
    expected = flat_parameters(ddp.module).clone()
    for step, bad in enumerate((math.nan, 1.0, math.inf)):
        ddp.zero_grad()
        backward(ddp, rank, step, bad)
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        counts = [len(one.state) for one in optimizers]
        for one in optimizers:
            one.step()
        assert torch.equal(flat_parameters(ddp.module), expected) == (bad != 1.0)
        assert (counts == [len(one.state) for one in optimizers]) == (bad != 1.0)
        assert flat_gradients(ddp.module).any() == (bad == 1.0), "a skipped step leaves no NaN behind"
        expected = flat_parameters(ddp.module).clone()
    del ddp, parameters
    gc.collect()
    assert len(_global_optimizer_pre_hooks) == hooks, "the model's hooks outlive it"
    assert not any(one._optimizer_step_pre_hooks or one._optimizer_step_post_hooks for one in optimizers)


def test_optimizers_that_attach_does_not_know_skip_too() -> None:
    run_ranks(found, 2)


def accumulating(rank: int, world_size: int) -> None:
    """An overflow in any micro-batch, exchanged at once or later, skips the step."""
    for synced, bad in ((False, 0), (False, 1), (True, 0), (True, 1)):
        ddp = DDP(mlp())
        optimizer = AdamW(ddp.parameters(), lr=0.1)
        thinwire.attach(ddp, Int8(), optimizer=optimizer)
        before = flat_parameters(ddp.module).clone()
        for micro in range(2):
            ddp.require_backward_grad_sync = synced or micro == 1
            backward(ddp, rank, micro, bad=math.inf if micro == bad else 1.0)
        optimizer.step()
        assert torch.equal(flat_parameters(ddp.module), before)
        assert not optimizer.state
        optimizer.zero_grad()
        backward(ddp, rank, 2)
        optimizer.step()
        assert flat_parameters(ddp.module).isfinite().all()
        assert not torch.equal(flat_parameters(ddp.module), before)


class Halves(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = torch.nn.Linear(24, 24), torch.nn.Linear(24, 24)

    def forward(self, x: torch.Tensor, first: bool) -> Any:
        return self.one(x) if first else self.other(self.one(x))


def in_turn(rank: int, world_size: int) -> list[bool]:
    """Two optimizers, each clearing its own gradients only, as of a GAN in one DDP model."""
    ddp = DDP(Halves(), find_unused_parameters=True)
    optimizers = [SGD(part.parameters(), lr=0.1) for part in (ddp.module.one, ddp.module.other)]
    thinwire.attach(ddp, Exact(), optimizer=optimizers)
    stepped = []
    for turn in range(8):
        optimizer, before = optimizers[turn % 2], flat_parameters(ddp.module).clone()
        optimizer.zero_grad()
        bad = math.nan if turn == 2 and rank == 1 else 1.0
        (ddp(batch(rank, turn), first=turn % 2 == 0).square().mean() * bad).backward()
        optimizer.step()
        stepped.append(not torch.equal(flat_parameters(ddp.module), before))
        assert flat_parameters(ddp.module).isfinite().all()
    return stepped


def test_an_overflow_in_any_micro_batch_skips_the_step() -> None:
    run_ranks(accumulating, 2)


def test_one_overflow_skips_one_step_of_two_optimizers_in_turn() -> None:
    expected = [True, True, False, True, True, True, True, True]
    assert run_ranks(in_turn, 2) == [expected] * 2


def fused_and_scaled(rank: int, world_size: int) -> None:
    """GradScalers skip, back off and grow as without thinwire's hooks, with fused optimizers too."""
    runs = []
    for skips in (False, None):
        for kind, made in OPTIMIZERS.items():
            ddp = DDP(mlp())
            optimizer = made(ddp.parameters())
            thinwire.attach(ddp, Int8(), optimizer=optimizer, skip_overflows=skips)
            scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
            scales = []
            for step in range(6):
                optimizer.zero_grad()
                loss = ddp(batch(rank, step)).square().mean() * (math.inf if step == rank == 1 else 1.0)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                scales.append(scaler.get_scale())
            assert scales == [64.0, 32.0, 32.0, 64.0, 64.0, 128.0], kind
            runs.append([flat_parameters(ddp.module), optimizer.state_dict()])
    assert equal(runs[:3], runs[3:])


def test_gradscalers_work_as_without_the_hooks() -> None:
    run_ranks(fused_and_scaled, 2)


def warnings_of(rank: int, world_size: int) -> None:
    """Where a step cannot be skipped, the first overflow is a warning, and only the first."""
    warned = Records()

    def overflow(ddp: Any, step: Callable[[], Any]) -> None:
        for number in range(3):
            ddp.zero_grad()
            backward(ddp, rank, number, bad=math.inf if number < 2 else 1.0)
            step()

    def says(*parts: str) -> None:
        (text,) = warned.texts
        assert all(part in text for part in ("step 0 overflowed", "NaN on all ranks", *parts)), text
        warned.texts.clear()

    ddp = DDP(mlp())
    lbfgs = torch.optim.LBFGS(ddp.parameters(), lr=0.1, max_iter=2)
    thinwire.attach(ddp, Int8())

    def closure() -> torch.Tensor:
        lbfgs.zero_grad()
        loss: torch.Tensor = ddp(batch(rank, 0)).square().mean() * (math.inf if rank == 1 else 1.0)
        loss.backward()
        return loss

    lbfgs.step(closure)
    says("LBFGS takes several backward passes")

    ddp = DDP(mlp())
    optimizer = SGD(ddp.parameters(), lr=0.1)
    thinwire.attach(ddp, ZeRO(interleaved=True), optimizer=optimizer)
    overflow(ddp, optimizer.step)
    says("inside backward", "ZeRO(interleaved=False)")

    ddp = DDP(mlp())
    ddp.register_comm_hook(None, allreduce_hook)
    overflow(ddp, SGD(ddp.parameters(), lr=0.1).step)
    says("torch-named hook", "thinwire.attach")

    ddp = DDP(mlp())
    thinwire.attach(ddp, Int8())

    def by_hand(ddp: DDP = ddp) -> None:
        with torch.no_grad():
            for parameter in ddp.parameters():
                assert parameter.grad is not None
                parameter.sub_(0.1 * parameter.grad)

    overflow(ddp, by_hand)
    says("was not skipped", "parameters are non-finite now")

    ddp = DDP(mlp())
    optimizer = SGD(ddp.parameters(), lr=0.1)
    thinwire.attach(ddp, Int8(), optimizer=optimizer, skip_overflows=False)
    overflow(ddp, optimizer.step)
    assert flat_parameters(ddp.module).isnan().all()

    ddp = DDP(mlp())
    thinwire.attach(ddp, Int8())
    overflow(ddp, lambda: None)  # the loop itself takes no step
    assert not warned.texts


def test_an_overflow_that_cannot_be_skipped_is_one_warning() -> None:
    run_ranks(warnings_of, 2)


def apart(rank: int, world_size: int, with_ddp: bool) -> list[Any]:
    """Each rank trains on its own: only the one with the bad step skips it, and the step counts."""
    model = mlp()
    ddp = DDP(model) if with_ddp else model
    optimizer = AdamW(ddp.parameters(), lr=0.01)
    wire = thinwire.attach(ddp, LocalSGD(4), optimizer=optimizer)
    taken = []
    for step in range(4):
        before = flat_parameters(model).clone()
        counts = [int(one["step"]) for one in optimizer.state.values()]
        optimizer.zero_grad()
        backward(ddp, rank, step, bad=math.nan if step == 1 else 1.0)
        optimizer.step()
        taken.append(not torch.equal(flat_parameters(model), before))
        assert taken[-1] or counts == [int(one["step"]) for one in optimizer.state.values()]
    assert flat_parameters(model).isfinite().all()
    assert identical(flat_parameters(model))
    return [taken, wire.step, wire.stats().overflows]


@pytest.mark.parametrize("with_ddp", [True, False])
def test_a_rank_that_trains_on_its_own_skips_its_own_bad_step(with_ddp: bool) -> None:
    good, bad = run_ranks(apart, 2, with_ddp)
    assert good == [[True, True, True, True], 4, 0]
    assert bad == [[True, False, True, True], 4, 1]


def repeated_exchanges(rank: int, world_size: int) -> None:
    """Micro-batches without no_sync are named, and patterns that only look like them are not."""
    warned = Records()

    def train(micro: int, *, sync: bool = True, zero: bool = False, optimizers: int = 1) -> None:
        ddp = DDP(mlp())
        parameters = list(ddp.parameters())
        made = [SGD(parameters[part::optimizers], lr=0.1) for part in range(optimizers)]
        thinwire.attach(ddp, Exact(), optimizer=made)
        for step in range(5):
            ddp.zero_grad()
            for part in range(micro):
                ddp.require_backward_grad_sync = sync or part == micro - 1
                if zero:
                    ddp.zero_grad()
                backward(ddp, rank, 10 * step + part)
            for one in made:
                one.step()

    train(1)
    train(2, sync=False)
    train(2, zero=True)  # as of sharpness-aware minimisation
    train(2, optimizers=2)
    ddp, generator = DDP(mlp()), mlp(seed=1)
    thinwire.attach(ddp, Exact())
    judging, generating = SGD(ddp.parameters(), lr=0.1), SGD(generator.parameters(), lr=0.1)
    for step in range(5):
        judging.zero_grad(set_to_none=False)
        backward(ddp, rank, step)
        judging.step()
        generating.zero_grad()
        ddp(generator(batch(rank, step))).square().mean().backward()
        generating.step()
    lbfgs = torch.optim.LBFGS(ddp.parameters(), lr=0.01, max_iter=2)

    def closure() -> torch.Tensor:
        lbfgs.zero_grad()
        loss: torch.Tensor = ddp(batch(rank, 0)).square().mean()
        loss.backward()
        return loss

    for _ in range(4):
        lbfgs.step(closure)
    assert not warned.texts
    train(4)
    (text,) = warned.texts
    assert "4 backward passes" in text
    assert "no_sync()" in text


def test_accumulating_without_no_sync_is_one_warning() -> None:
    run_ranks(repeated_exchanges, 2)
