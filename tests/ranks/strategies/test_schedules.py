"""Schedules: one run that is exact, compressed and local by turns, and its checkpoints."""

import copy
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.harness import run_ranks
from tests.models import batch, flat_parameters, mlp, own

STEPS = 10
SCHEDULE = thinwire.Schedule(
    {
        0: thinwire.Exact(),
        2: thinwire.Int4(),
        4: thinwire.LocalSGD(period=2),
        7: thinwire.DiLoCo(period=2, program=thinwire.Int8()),
        9: thinwire.PowerSGD(rank=2, warmup=0),
    }
)


class Job:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.ddp = DDP(mlp(layers=3), bucket_cap_mb=0.002)
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=0.01)
        self.wire = thinwire.attach(self.ddp, SCHEDULE, optimizer=self.optimizer)

    @property
    def held(self) -> tuple[Any, ...]:
        return self.ddp.module, self.optimizer, self.wire

    def train(self, first: int, last: int) -> list[str]:
        ran = []
        for step in range(first, last):
            self.optimizer.zero_grad()
            loss = self.ddp(batch(self.rank, step)).square().mean()
            ran.append(type(self.wire.program).__name__)
            loss.backward()
            self.optimizer.step()
        return ran


def stages(rank: int, world_size: int) -> tuple[list[str], torch.Tensor, list[list[bool]]]:
    whole, ran, states = Job(rank), [], []
    for step in range(STEPS):
        ran += whole.train(step, step + 1)
        states.append(copy.deepcopy([one.state_dict() for one in whole.held]))
    expected = flat_parameters(whole.ddp.module).clone()
    verdicts = []
    for step, state in enumerate(states[:-1], 1):
        job = Job(rank)
        for one, saved in zip(job.held, state, strict=True):
            one.load_state_dict(saved)
        resumed_with = type(job.wire.program).__name__
        then = job.train(step, STEPS)
        same = torch.equal(flat_parameters(job.ddp.module), expected)
        verdicts.append([same, then == ran[step:], resumed_with == ran[step - 1]])
    return ran, expected, verdicts


def test_one_run_and_every_checkpoint_of_it() -> None:
    ran = ["Exact"] * 2 + ["ErrorFeedback"] * 2 + ["LocalSGD"] * 3 + ["DiLoCo"] * 2 + ["PowerSGD"]
    found = run_ranks(stages, 2)
    for names, parameters, verdicts in found:
        assert names == ran
        assert torch.equal(parameters, found[0][1])
        assert verdicts == [[True] * 3] * (STEPS - 1)


def by_hand(rank: int, world_size: int) -> None:
    """A schedule does what swaps do."""
    scheduled, swapped = Job(rank), Job(rank)
    scheduled.train(0, STEPS)
    swapped.wire.swap(SCHEDULE.at(0))
    for step in range(STEPS):
        if step in SCHEDULE.stages and step:
            swapped.wire.swap(SCHEDULE.at(step))
        swapped.train(step, step + 1)
    assert torch.equal(flat_parameters(scheduled.ddp.module), flat_parameters(swapped.ddp.module))
    assert own(swapped.wire.state_dict())["program"] == own(scheduled.wire.state_dict())["program"]
    for job in (scheduled, swapped):  # averages after steps 6 and 9; before step 7 models are made one
        records = [record for record in job.wire.stats().records if record.purpose == "models"]
        assert sorted({record.step for record in records}) == [6, 7, 9]
        assert [record.step for record in records] == sorted(record.step for record in records)


def test_a_schedule_swaps_as_a_user_would_and_steps_of_models_are_training_steps() -> None:
    run_ranks(by_hand, 3)


def ended(rank: int, world_size: int) -> None:
    job = Job(rank)
    job.train(0, 1)
    job.wire.swap(thinwire.BF16())
    assert set(job.train(1, 5)) == {"Reduced"}


def test_a_swap_ends_a_schedule() -> None:
    run_ranks(ended, 2)


def forwards_only(rank: int, world_size: int) -> None:
    """Evaluating at a boundary, or not at all on some ranks, does not part them."""
    job = Job(rank)
    job.train(0, 2)
    with torch.no_grad():
        for _ in range(rank):
            job.ddp.module(batch(rank, 0))
            job.ddp(batch(rank, 0))
    assert type(job.wire.program).__name__ == "Exact"
    assert job.train(2, 3) == ["ErrorFeedback"]


def test_evaluation_swaps_nothing() -> None:
    run_ranks(forwards_only, 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({1: thinwire.Exact()}, "0 among them"),
        ({0: thinwire.Exact(), -1: thinwire.Int8()}, "whole steps as keys"),
        ({"0": thinwire.Exact()}, "whole steps as keys"),
        ([thinwire.Exact()], "whole steps as keys"),
        ({0: thinwire.ZeRO()}, "cannot be a stage"),
    ],
)
def test_what_is_no_schedule_is_refused(given: Any, message: str) -> None:
    with pytest.raises(thinwire.OptionError, match=message):
        thinwire.Schedule(given)


def joined(rank: int, world_size: int) -> None:
    """Ranks with uneven inputs are told in the first forward; in the last stage they may go on."""
    job = Job(rank)
    said = "next stage begins at step 2 cannot run inside Join"
    with pytest.raises(thinwire.UnavailableError, match=said), Join([job.ddp]):
        job.train(0, 3 + rank)
    job = Job(rank)
    job.train(0, STEPS)
    with Join([job.ddp]):
        job.train(STEPS, STEPS + 1 + rank)
    assert job.wire.step == STEPS + 2


def test_a_schedule_inside_join_is_refused_at_once() -> None:
    run_ranks(joined, 2, group_timeout=60)


def refused(rank: int, world_size: int) -> None:
    ddp = DDP(mlp())
    with pytest.raises(thinwire.OptionError, match="averages models after the optimizer's steps: pass it"):
        thinwire.attach(ddp, SCHEDULE)
    with pytest.raises(thinwire.OptionError, match=r"stages.*not a program|is not a program"):
        thinwire.attach(ddp, thinwire.Schedule({0: "exact"}))  # type: ignore[dict-item]


def test_stages_that_do_not_fit_are_refused_at_once() -> None:
    run_ranks(refused, 1)
