"""A run that averages models, saved anywhere and resumed, is bit for bit the run that was never stopped."""

import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.harness import run_ranks
from tests.models import batch, changed, flat_parameters, own
from thinwire import DiLoCo, ErrorFeedback, Hierarchical, Int4, LocalSGD, Quantize, TwoShot
from thinwire.strategies.averaging.policy import Averaging

FEEDBACK = ErrorFeedback(TwoShot(Quantize(bits=4, block=64)))
STREAMING = DiLoCo(4, program=FEEDBACK, fragments=2, overlap=3, warmup_steps=2)
STEPS = 12


class Job:
    """A model with BatchNorm, AdamW and a wire."""

    def __init__(self, policy: Averaging, bucket_mb: float = 25) -> None:
        torch.manual_seed(0)
        self.ddp = DDP(
            nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4)),
            bucket_cap_mb=bucket_mb,
        )
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.wire = thinwire.attach(self.ddp, policy, optimizer=self.optimizer)

    def train(self, rank: int, begin: int, end: int) -> None:
        for step in range(begin, end):
            self.optimizer.zero_grad()
            self.ddp(batch(rank, step, width=8)).square().mean().backward()
            self.optimizer.step()
            self.scheduler.step()

    def save(self) -> bytes:
        file = io.BytesIO()
        parts = (self.ddp.module, self.optimizer, self.scheduler, self.wire)
        torch.save([part.state_dict() for part in parts], file)
        return file.getvalue()

    def load(self, saved: bytes) -> None:
        model, optimizer, scheduler, wire = torch.load(io.BytesIO(saved), weights_only=True)
        self.ddp.module.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.scheduler.load_state_dict(scheduler)
        self.wire.load_state_dict(wire)

    def result(self) -> torch.Tensor:
        """All that training leads to: this rank's model, and what all agree on."""
        held = [*self.ddp.module.parameters(), *self.ddp.module.buffers()]
        before = torch.cat([tensor.detach().flatten().double() for tensor in held])
        self.wire.finalize()
        return torch.cat([before, flat_parameters(self.ddp.module).double()])


def resumes(rank: int, world_size: int, policy: Averaging) -> None:
    job, saves = Job(policy), []
    for step in range(STEPS):
        saves.append(job.save())
        job.train(rank, step, step + 1)
    expected = job.result()
    for step, saved in enumerate(saves):
        again = Job(policy, bucket_mb=0.0001)
        again.load(saved)
        again.train(rank, step, STEPS)
        assert torch.equal(again.result(), expected), f"saved after step {step}"


@pytest.mark.parametrize(
    "policy",
    [
        STREAMING,
        LocalSGD(5, warmup_steps=3),
        Hierarchical({2: 2, 4: None}),
        DiLoCo(5, optimizer_state="mean"),
    ],
)
def test_a_resumed_run_is_the_run_that_was_never_stopped(policy: Averaging) -> None:
    assert run_ranks(resumes, 2, policy) == [None, None]


def save(rank: int, world_size: int, policy: Averaging, steps: int) -> tuple[bytes, Any, torch.Tensor]:
    job = Job(policy)
    job.train(rank, 0, steps)
    return job.save(), job.wire.state_dict(), flat_parameters(job.ddp.module)


def load_elsewhere(
    rank: int, world_size: int, policy: Averaging, saves: list[bytes], steps: int
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    job = Job(policy)
    states = [torch.load(io.BytesIO(saved), weights_only=True) for saved in saves]
    job.ddp.module.load_state_dict(states[0][0])
    job.optimizer.load_state_dict(states[rank % len(states)][1])
    with pytest.raises(thinwire.StateError, match="pass the states of all ranks that saved"):
        job.wire.load_state_dict(states[0][3])
    with pytest.raises(thinwire.StateError, match="If the number of ranks has changed"):
        job.wire.load_state_dict([state[3] for state in states[1:]])
    job.wire.load_state_dict([state[3] for state in states])
    state, at_first = job.wire.state_dict(), flat_parameters(job.ddp.module)
    job.train(rank, steps, steps + 6)
    job.wire.finalize()
    return state, at_first, flat_parameters(job.ddp.module)


@pytest.mark.parametrize(
    ("policy", "steps", "worlds"),
    [
        (STREAMING, 9, (3, 2)),
        pytest.param(STREAMING, 9, (2, 3), marks=pytest.mark.slow),
        (LocalSGD(4), 6, (3, 2)),
    ],
)
def test_at_another_world_size_nothing_is_lost(
    policy: Averaging, steps: int, worlds: tuple[int, int]
) -> None:
    saved = run_ranks(save, worlds[0], policy, steps)
    resumed = run_ranks(load_elsewhere, worlds[1], policy, [one[0] for one in saved], steps)
    states = [own(one[1])["averaging"] for one in saved]
    mean = torch.stack([one[2] for one in saved]).mean(0)
    for state, at_first, at_last in resumed:
        torch.testing.assert_close(at_first, mean)
        mine = own(state)["averaging"]
        assert mine["step"] == steps
        key = "models: residual"
        for name, slots in own(saved[0][1])["memory"].items():
            owed = sum(own(one[1])["memory"][name][key] for one in saved) / len(saved)
            assert slots[key].abs().max() > 0
            torch.testing.assert_close(own(state)["memory"][name][key], owed)
        if states[0]["outer"] is not None:
            for name, anchor in states[0]["outer"]["anchors"].items():
                assert torch.equal(mine["outer"]["anchors"][name], anchor)
            assert [one["due"] for one in mine["in_flight"]] == [one["due"] for one in states[0]["in_flight"]]
        assert torch.equal(at_last, resumed[0][2]), "ranks differ"


def unfit(rank: int, world_size: int) -> None:
    job = Job(DiLoCo(4, fragments=2, overlap=1, program=Int4()))
    job.train(rank, 0, 2)
    good = job.wire.state_dict()
    averaging = own(good)["averaging"]
    assert averaging["in_flight"], "something must be under way for this test to mean anything"
    flight = averaging["in_flight"][0]
    before = flat_parameters(job.ddp.module)
    for broken, said in [
        (None, "no valid entry 'averaging'"),
        ({**averaging, "step": -1}, "averaging step=-1 must be a whole number"),
        ({**averaging, "window": -1}, "averaging window=-1 must be a whole number"),
        ({**averaging, "outer": None}, "the state has no anchors, but 2 steps since the warm-up"),
        ({**averaging, "in_flight": [{**flight, "due": 9}]}, "not due within 1 steps of step 2"),
        ({**averaging, "parameters": {"x": torch.ones(1)}}, "the state's parameters are not this model's"),
        (
            {**averaging, "parameters": {**averaging["parameters"], "0.bias": torch.ones(1)}},
            r"the saved parameter 0.bias has shape \(1,\), the model's \(16,\)",
        ),
        ({**averaging, "buffers": {"x": torch.ones(1)}}, "the state's buffers are not this model's"),
        ({**averaging, "outer": {}}, "anchors or outer optimizer do not fit"),
        (
            {**averaging, "outer": {**averaging["outer"], "outer": []}},
            "anchors or outer optimizer do not fit",
        ),
        ({**averaging, "outer": {**averaging["outer"], "anchors": {}}}, "the state's anchors are not"),
        ({**averaging, "in_flight": {}}, "must be a list of averages in flight"),
        ({**averaging, "in_flight": [{}]}, "must have fragment, due and means"),
        ({**averaging, "in_flight": [{**flight, "fragment": 7}]}, "fragment 7"),
        ({**averaging, "in_flight": [{**flight, "means": {}}]}, "the state's means are not this model's"),
    ]:
        with pytest.raises(thinwire.StateError, match=said):
            job.wire.load_state_dict(changed(good, averaging=broken))
    assert torch.equal(flat_parameters(job.ddp.module), before)
    assert own(job.wire.state_dict())["averaging"]["step"] == 2
    job.wire.load_state_dict(good)
    with pytest.raises(thinwire.StateError, match="the state belongs to LocalSGD"):
        job.wire.load_state_dict(changed(good, program="LocalSGD(period=3)"))


def test_states_that_do_not_fit_change_nothing() -> None:
    assert run_ranks(unfit, 1) == [None]
