"""Damaged states: a load either leaves a wire that trains on, or says StateError and changes nothing."""

import io
import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.models import batch, changed, equal, own
from tests.simulated import compressing_alone
from thinwire import DiLoCo, Int4, Int8, LocalSGD, PowerSGD, ZeRO
from thinwire.checkpoint.trees import copied
from thinwire.checkpoint.wire_state import merge_wire_states, own_states
from thinwire.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from thinwire.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from thinwire.engine.comm.agreement import Described

PROGRAMS = {
    "int8": compressing_alone(Int8()),
    "powersgd": compressing_alone(PowerSGD(rank=2, min_compression=1, warmup=0)),
    "local": LocalSGD(2),
    "diloco": compressing_alone(DiLoCo(2, program=Int4(), overlap=1)),
    "zero": compressing_alone(ZeRO(Int8(), parameters=torch.bfloat16)),
}
STEPS = 3


class Job:
    def __init__(self, program: Any) -> None:
        torch.manual_seed(0)
        self.ddp = DDP(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)))
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.01)
        given = self.optimizer if isinstance(program, LocalSGD | DiLoCo | ZeRO) else None
        self.wire = thinwire.attach(self.ddp, program, optimizer=given)

    def train(self, steps: int = 1) -> None:
        for step in range(steps):
            self.optimizer.zero_grad()
            self.ddp(batch(0, step, width=8)).square().mean().backward()
            self.optimizer.step()

    def everything(self) -> Any:
        return copied([self.ddp.module.state_dict(), self.wire.state_dict()])


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to all that is inside."""
    listed = isinstance(tree, list | tuple)
    inside = tree.items() if isinstance(tree, dict) else enumerate(tree) if listed else ()
    return [path, *(place for key, value in inside for place in places(value, (*path, key)))]


def at(tree: Any, path: tuple[Any, ...], change: Any) -> Any:
    """A copy with something else at a path."""
    if not path:
        return change(tree)
    if isinstance(tree, dict):
        return {key: at(value, path[1:], change) if key == path[0] else value for key, value in tree.items()}
    return type(tree)(at(each, path[1:], change) if n == path[0] else each for n, each in enumerate(tree))


def without_one(value: Any) -> Any:
    if isinstance(value, dict):
        return dict(list(value.items())[1:])
    return value[1:] if isinstance(value, list | tuple | str) else None


def with_one_more(value: Any) -> Any:
    if isinstance(value, dict):
        return {**value, "more": torch.ones(2)}
    return type(value)([*value, *value[:1]]) if isinstance(value, list | tuple) else [value]


def poisoned(number: float) -> Any:
    def poison(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel():
            value = value.clone()
            value.view(-1)[-1] = number
            return value
        return number

    return poison


def of_tensors(change: Any) -> Any:
    return lambda value: change(value) if isinstance(value, torch.Tensor) else torch.zeros(3)


NESTED = {"a": {"b": [1]}}
JUNK = st.sampled_from(
    [None, True, -1, 10**30, 2.5, math.nan, "", "rank 0 of 1", b"x", [], {}, (), [{}], NESTED, object()]
)
CHANGES = st.one_of(
    JUNK.map(lambda junk: lambda _: junk),
    st.sampled_from([without_one, with_one_more, *map(poisoned, (math.nan, math.inf, -math.inf))]),
    st.sampled_from(
        [
            of_tensors(lambda tensor: tensor.flatten()[:-1]),
            of_tensors(lambda tensor: tensor.unsqueeze(0)),
            of_tensors(lambda tensor: tensor.new_zeros(0)),
            of_tensors(torch.Tensor.double),
            of_tensors(torch.Tensor.half),
            of_tensors(torch.Tensor.int),
            of_tensors(torch.Tensor.bool),
            of_tensors(lambda tensor: tensor.to(torch.complex64)),
            of_tensors(lambda tensor: tensor.to_sparse()),
            of_tensors(lambda tensor: tensor.to("meta")),
            of_tensors(lambda tensor: tensor.float().requires_grad_()),
        ]
    ),
)


@pytest.mark.usefixtures("alone")
def test_states_load_without_running_code() -> None:
    """Under torch.load(weights_only=True), which runs nothing that a file names."""
    job = Job(PROGRAMS["int8"])
    job.train()
    named = [PowerSGDState(None, matrix_approximation_rank=2), PostLocalSGDState(None, None, 3)]
    for state in (job.wire.state_dict(), *named):
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        assert type(torch.load(file, weights_only=True)) is type(state)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_damaged_state_changes_nothing_or_trains_on(name: str) -> None:
    job = Job(PROGRAMS[name])
    job.train(STEPS)
    good = job.wire.state_dict()
    inner = own(good)
    two = {f"rank {rank} of 2": ({**inner, "rank": rank, "world_size": 2},) for rank in range(2)}
    targets = [(state, path) for state in (good, two) for path in places(state)]
    refused = []
    jobs = [job]  # emptied in the end: hypothesis keeps the function, and with it the model's thread
    del job

    @settings(max_examples=120, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(targets), CHANGES)
    def damage(target: tuple[Any, Any], change: Any) -> None:
        (job,) = jobs
        before = job.everything()
        try:
            job.wire.load_state_dict(at(*target, change))
        except (thinwire.StateError, thinwire.MismatchError):
            refused.append(target[1])
            assert equal(job.everything(), before)
        else:
            job.train()
            assert all(p.isfinite().all() for p in job.ddp.parameters())
            job.ddp.module.load_state_dict(before[0])
            job.wire.load_state_dict(good)

    damage()
    jobs.clear()
    assert refused, "no damage was found"


@pytest.mark.usefixtures("alone")
def test_what_is_wrong_is_said() -> None:
    job = Job(PROGRAMS["powersgd"])
    job.train(STEPS)
    good = job.wire.state_dict()
    memory = own(good)["memory"]
    weight = memory["0.weight"]
    for slots, said in (
        (
            {**weight, "residual": weight["residual"].log()},
            "'residual' of 0.weight contains inf or NaN: load",
        ),
        ({**weight, "residual": weight["residual"].int()}, "'residual' of 0.weight is torch.int32"),
        ({**weight, "q 2x8": torch.ones(2, 7)}, r"'q 2x8' of 0.weight has shape \(2, 7\) and torch.float32"),
    ):
        with pytest.raises(thinwire.StateError, match=said):
            job.wire.load_state_dict(changed(good, memory={**memory, "0.weight": slots}))
    with pytest.raises(thinwire.StateError, match=f"step={10**30} must be a whole number from 0 to below"):
        job.wire.load_state_dict(changed(good, step=10**30))
    assert equal(job.wire.state_dict(), good)


@pytest.mark.usefixtures("alone")
def test_a_truncated_file_is_torchs_to_refuse_wherever_it_ends() -> None:
    job = Job(PROGRAMS["int8"])
    job.train()
    file = io.BytesIO()
    torch.save(job.wire.state_dict(), file)
    whole = file.getvalue()
    for length in range(0, len(whole), len(whole) // 50):
        with pytest.raises((RuntimeError, EOFError)):
            torch.load(io.BytesIO(whole[:length]), weights_only=True)
    assert equal(torch.load(io.BytesIO(whole), weights_only=True), job.wire.state_dict())


WIRE = {"format": 1, "program": "P", "written": "P", "schedule_ended": False, "step": 3, "buckets": []}


def test_states_of_scalers_that_went_apart_are_brought_to_one_scale() -> None:
    """What is owed is the same, in whichever units it was saved; models have none."""

    def saved(rank: int, scale: float | None, owed: float) -> dict[str, Any]:
        slots = {"residual": torch.full((2,), owed), "models: residual": torch.ones(2)}
        inner = {**WIRE, "rank": rank, "world_size": 3}
        return {f"rank {rank} of 3": ({**inner, "scale": scale, "memory": {"w": slots}},)}

    every = [saved(0, 256.0, 512.0), saved(1, 128.0, 512.0), saved(2, 128.0, 0.0)]
    resized, states = own_states(every, [Described("P", "P")], 0, 2)
    assert resized
    state = merge_wire_states(states, lambda entries: {})
    assert state["scale"] == 128.0
    assert state["memory"]["w"]["residual"].tolist() == [256.0, 256.0]  # (512 / 2 + 512 + 0) / 3
    assert state["memory"]["w"]["models: residual"].tolist() == [1.0, 1.0]


def test_factors_of_powersgd_need_not_be_equal_to_load_on_another_number_of_ranks() -> None:
    """In the warm-up each rank computes its own, and unlike hosts differ in the last bits."""

    def saved(rank: int, q: float) -> dict[str, Any]:
        slots = {"q 1x2": torch.full((1, 2), q), "models: q 1x2": torch.full((1, 2), q)}
        inner = {**WIRE, "rank": rank, "world_size": 2}
        return {f"rank {rank} of 2": ({**inner, "scale": None, "memory": {"w": slots}},)}

    _, states = own_states([saved(0, 1.0), saved(1, 1.0000001)], [Described("P", "P")], 0, 3)
    for factor in merge_wire_states(states, lambda entries: {})["memory"]["w"].values():
        assert factor.tolist() == [[1.0, 1.0]]
