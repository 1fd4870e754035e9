"""Runs that change their ways: by a schedule, after an audit, with a GradScaler or without, and resumed."""

import copy
import math
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.harness import run_ranks
from tests.models import batch, flat_parameters, mlp

AUDITS: dict[str, Any] = {"audit_every": 2, "max_error": 1e-9, "on_excess": thinwire.Exact()}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "equal stages": (
        thinwire.Schedule(
            {0: thinwire.LocalSGD(period=4), 5: thinwire.Int4(), 7: thinwire.LocalSGD(period=4)}
        ),
        {},
    ),
    "a fallback that is a stage": (thinwire.Schedule({0: thinwire.Exact(), 2: thinwire.Int4()}), AUDITS),
    "a fallback of gradients": (
        thinwire.DiLoCo(period=2, warmup_steps=4, gradients=thinwire.Int4(), program=thinwire.Int8()),
        AUDITS,
    ),
    "a fallback of models": (
        thinwire.Schedule({0: thinwire.Exact(), 2: thinwire.DiLoCo(period=1, program=thinwire.Int4())}),
        AUDITS,
    ),
}


class Job:
    def __init__(self, rank: int, program: Any, scaled: bool = False, **options: Any) -> None:
        self.rank = rank
        self.ddp = DDP(mlp())
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scaled)
        self.wire = thinwire.attach(
            self.ddp, program, optimizer=self.optimizer, scaler=self.scaler, **options
        )

    def train(self, first: int, last: int, bad: int = -1) -> None:
        for step in range(first, last):
            self.optimizer.zero_grad()
            loss = self.ddp(batch(self.rank, step)).square().mean()
            factor = math.nan if step == bad and self.rank == 1 else 1.0
            self.scaler.scale(loss * factor).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def state(self) -> list[Any]:
        return copy.deepcopy([one.state_dict() for one in (self.ddp.module, self.optimizer, self.wire)])

    def load(self, states: list[Any]) -> None:
        for one, state in zip((self.ddp.module, self.optimizer, self.wire), states, strict=True):
            one.load_state_dict(state)

    def result(self) -> torch.Tensor:
        self.wire.finalize()
        return flat_parameters(self.ddp.module).clone()


def resumed_anywhere(rank: int, world_size: int, case: str) -> list[tuple[int, str]]:
    """From every step on, a resumed run does what the one without a break does; what audits did."""
    program, options = CASES[case]
    whole, states = Job(rank, program, **options), []
    for step in range(9):
        states.append(whole.state())
        whole.train(step, step + 1)
    expected = whole.result()
    for step, state in enumerate(states):
        other = Job(rank, program, **options)
        other.load(state)
        other.train(step, 9)
        assert torch.equal(other.result(), expected), f"resumed before step {step}"
        assert repr(other.wire.program) == repr(whole.wire.program)
    return [(audit.step, audit.purpose) for audit in whole.wire.audits() if audit.action]


@pytest.mark.parametrize(
    ("case", "acted"),
    [
        ("equal stages", []),
        ("a fallback that is a stage", [(3, "gradients")]),
        ("a fallback of gradients", [(1, "gradients"), (8, "models")]),
        ("a fallback of models", [(4, "models")]),
    ],
)
def test_a_run_is_resumed_from_any_step(case: str, acted: list[tuple[int, str]]) -> None:
    assert run_ranks(resumed_anywhere, 2, case) == [acted, acted]


def scalers_apart(rank: int, world_size: int) -> list[float]:
    """While ranks train apart, one of them overflows; then gradients are averaged again."""
    schedule = thinwire.Schedule({0: thinwire.LocalSGD(period=2), 4: thinwire.Int8()})
    job = Job(rank, schedule, scaled=True, check_every=1)
    job.train(0, 4, bad=1)
    before = job.scaler.get_scale()
    job.train(4, 8)
    return [before, job.scaler.get_scale()]


def test_scalers_that_were_apart_come_together() -> None:
    assert run_ranks(scalers_apart, 2) == [[256.0, 128.0], [128.0, 128.0]]


def without_a_scaler(rank: int, world_size: int) -> None:
    """A run that scaled its loss is resumed by one that does not: residuals are in its units."""
    ends = []
    for scaled in (True, False):
        first, second = Job(rank, thinwire.Int4(), scaled), Job(rank, thinwire.Int4())
        first.train(0, 3)
        second.load(first.state())
        second.train(3, 6)
        ends.append(second.result())
    assert torch.equal(*ends)


def test_residuals_of_a_scaled_run_fit_one_without_a_scaler() -> None:
    run_ranks(without_a_scaler, 2)


def closures(rank: int, world_size: int) -> None:
    """The backward that overflows is inside the optimizer's step."""
    ends = []
    for bad in (False, True):
        ddp = DDP(mlp())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        wire = thinwire.attach(ddp, thinwire.Int4(), optimizer=optimizer, skip_overflows=True)

        def step(number: int, factor: float, ddp: DDP = ddp, optimizer: Any = optimizer) -> None:
            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss: torch.Tensor = ddp(batch(rank, number)).square().mean() * factor
                loss.backward()
                return loss

            optimizer.step(closure)

        for number in range(4):
            if bad and number == 2:
                step(number, math.inf if rank == 1 else 1.0)
            step(number, 1.0)
        assert wire.stats().overflows == bad
        ends.append(flat_parameters(ddp.module))
    assert torch.equal(*ends)
    lbfgs = torch.optim.LBFGS(ddp.parameters())
    with pytest.raises(thinwire.OptionError, match="LBFGS"):
        thinwire.attach(DDP(ddp.module), thinwire.Int4(), optimizer=lbfgs, skip_overflows=True)


def test_overflows_inside_closures_are_skipped() -> None:
    run_ranks(closures, 2)
