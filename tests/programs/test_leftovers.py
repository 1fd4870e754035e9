"""Residuals whose program no longer runs. The next exchange applies them, so a change loses nothing."""

import logging
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import thinwire
from tests.simulated import normal
from thinwire import (
    BF16,
    AcrossNodes,
    ErrorFeedback,
    Exact,
    Int2,
    Int4,
    Int8,
    Memory,
    Partition,
    PowerSGD,
    Program,
    RandomK,
    Sign,
    TopK,
    TwoShot,
    Warmup,
)
from thinwire.programs.allreduce import Alone
from thinwire.programs.leftovers import WithLeftovers, carrying, set_aside
from thinwire.programs.wrapper import as_program
from thinwire.testing import SimulatedRanks

SHAPES = {"w": (18, 6), "small": (3, 5), "b": (7,), "one": ()}
LENGTH = 18 * 6 + 15 + 7 + 1
LOW_RANK = PowerSGD(rank=1, min_compression=1.5, warmup=0)
CONSERVING: dict[str, Program] = {
    "exact": Exact(),
    "int8": Int8(),
    "int2": Int2(),
    "topk": TopK(1 / 16),
    "randomk": RandomK(0.25),
    "sign": Sign(keep=1.0),
    "low rank": LOW_RANK,
    "low rank, 8 bits": PowerSGD(rank=1, min_compression=1.5, factor_dtype="int8", warmup=0),
    "flat low rank": PowerSGD(rank=1, min_compression=1.5, flatten=True, warmup=0),
    "nodes": AcrossNodes(Int4(), node_size=2),
    "nodes of low rank": AcrossNodes(LOW_RANK, node_size=2),
    "nodes of nodes": AcrossNodes(AcrossNodes(Int4(), node_size=1), node_size=2),
    "exact nodes": AcrossNodes(Exact(), node_size=2),
    "parts": Partition([("w", Int2()), ("b", Exact())], default=TopK(1 / 4)),
    "warm-up": Warmup(Int4(), steps=10),
}
LOSSY: dict[str, Program] = {"bf16": BF16(), "int8 without feedback": Int8(error_feedback=False)}
"""Programs that lose a little in every step, with or without leftovers."""


def in_gradients(memories: list[Memory]) -> torch.Tensor:
    """The sum of all that the ranks' memories would add to the mean, computed by hand."""
    total = {name: torch.zeros(torch.Size(shape).numel()) for name, shape in SHAPES.items()}
    for memory in memories:
        for name, slots in memory.state_dict().items():
            for key, tensor in slots.items():
                *scopes, slot = key.removeprefix("leftover: ").split(": ")
                if slot != "residual":
                    continue
                start, weight = 0, 1
                for scope in scopes:
                    _, place, _, count = scope.split()
                    weight *= int(count)
                    start += int(place) * tensor.numel()
                own = weight * tensor.flatten()[: total[name].numel() - start]
                total[name][start : start + own.numel()] += own
    return torch.cat(list(total.values())) / len(memories)


def has_leftovers(ranks: SimulatedRanks) -> bool:
    return any(memory.has_leftovers for memory in ranks.memories)


class Run:
    """Simulated ranks whose program changes, and the sums of exact and of applied means."""

    def __init__(self, program: Program, count: int, seed: int) -> None:
        self.ranks = SimulatedRanks(program, SHAPES, count)
        self.seed = 1000 * seed
        self.exact, self.applied = torch.zeros(LENGTH), torch.zeros(LENGTH)

    def train(self, program: Program, steps: int) -> None:
        for _ in range(steps):
            gradients = list(normal(self.seed, len(self.ranks.memories), LENGTH))
            self.seed += 1
            self.ranks.program = carrying(self.ranks.memories[0], program, {})[0]
            outcomes = self.ranks.step(gradients)
            self.exact += torch.stack(gradients).mean(0)
            self.applied += torch.stack([one.mean for one in outcomes]).mean(0)

    def change(self) -> None:
        for memory in self.ranks.memories:
            set_aside(memory)

    def lost(self) -> float:
        accounted = self.applied + in_gradients(self.ranks.memories)
        return float((self.exact - accounted).norm() / self.exact.norm())


@pytest.mark.parametrize("after", [*CONSERVING, *LOSSY, "local"])
@pytest.mark.parametrize("before", CONSERVING)
def test_a_change_of_programs_loses_nothing(before: str, after: str) -> None:
    """The sum of applied means plus the mean residual is the sum of exact means, through the change."""
    run = Run(CONSERVING[before], count=4, seed=1)
    run.train(CONSERVING[before], 4)
    run.change()
    assert run.lost() < 1e-5
    program = {**CONSERVING, **LOSSY, "local": Alone()}[after]
    for _ in range(3):
        run.train(program, 1)
        assert not has_leftovers(run.ranks)
        assert run.lost() < (0.02 if after in LOSSY else 1e-5)


@given(
    st.lists(st.sampled_from(list(CONSERVING.values())), min_size=2, max_size=5),
    st.sampled_from([2, 4, 6]),
    st.integers(0, 99),
)
def test_many_changes_lose_nothing(programs: list[Program], count: int, seed: int) -> None:
    run = Run(programs[0], count, seed)
    for program in programs:
        run.train(program, 2)
        run.change()
        run.change()  # twice without a step between them
    assert run.lost() < 1e-5
    run.train(Exact(), 1)
    torch.testing.assert_close(run.applied, run.exact, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("before", "after", "most"), [(TopK(1 / 64), Exact(), 1e-5), (Int2(), BF16(), 4e-3)])
def test_the_first_exchange_after_a_change_applies_the_residual(
    before: Program, after: Program, most: float
) -> None:
    """Without it, 40 steps of TopK(1/64) lost a third of the summed mean, and those of Int2 2 %."""
    run = Run(before, count=2, seed=0)
    run.train(before, 40)
    residual = in_gradients(run.ranks.memories).norm() / run.exact.norm()
    assert residual > 4 * most
    run.change()
    run.train(after, 1)
    assert not in_gradients(run.ranks.memories).any() or isinstance(after, ErrorFeedback)
    assert (run.applied - run.exact).norm() / run.exact.norm() < most


def test_a_step_that_is_rolled_back_keeps_the_leftover() -> None:
    run = Run(Int2(), count=2, seed=3)
    run.train(Int2(), 3)
    run.change()
    before = [memory.state_dict() for memory in run.ranks.memories]
    run.ranks.program = WithLeftovers(Int8())
    run.ranks.step([torch.full((LENGTH,), torch.inf)] * 2)
    for memory, kept in zip(run.ranks.memories, before, strict=True):
        assert memory.has_leftovers
        assert memory.state_dict().keys() == kept.keys()
        for name, slots in memory.state_dict().items():
            assert slots.keys() == kept[name].keys()
            assert all(torch.equal(one, kept[name][key]) for key, one in slots.items())
    run.train(Exact(), 1)
    assert run.lost() < 1e-5


def test_the_leftover_of_a_parameter_that_no_rank_used_waits() -> None:
    memory = Memory()
    for name in ("used", "unused"):
        memory.put(name, "residual", torch.ones(2))
    set_aside(memory)
    staged = memory.staged()
    for name in ("used", "unused"):
        staged.drop(name, "leftover: residual")
    staged.commit(but_of={"unused"})
    assert memory.has_leftovers
    assert not memory.leftovers_of("used")
    assert torch.equal(memory.leftovers_of("unused")["residual"], torch.ones(2))


def test_a_program_with_feedback_gets_the_residual_unrounded() -> None:
    """A residual that is rounded to the dtype of the gradients would lose most of itself here."""
    ranks = SimulatedRanks(Int8(), {"p": (64,)}, 2)
    gradients = [normal(rank, 64).bfloat16() for rank in range(2)]
    for _ in range(3):
        ranks.step(gradients)
    kept = ranks.kept(0, "residual").clone()
    expected = SimulatedRanks(Int4(), {"p": (64,)}, 2)
    for memory, other in zip(expected.memories, ranks.memories, strict=True):
        memory.take_over(other)
        set_aside(other)
    assert torch.equal(ranks.kept(0, "leftover: residual"), kept)
    ranks.program = WithLeftovers(Int4())
    means = [expected.step(gradients)[0].mean, ranks.step(gradients)[0].mean]
    assert not torch.equal(*means) or torch.equal(expected.kept(0, "residual"), ranks.kept(0, "residual"))


def test_leftovers_follow_the_loss_scale_and_are_saved() -> None:
    memory, loaded = Memory(), Memory()
    memory.rescale(torch.tensor(4.0))
    memory.put("p", "residual", torch.ones(2))
    set_aside(memory)
    memory.rescale(torch.tensor(8.0))
    assert torch.equal(memory.leftovers_of("p")["residual"], torch.full((2,), 2.0))
    state = Memory()
    state.load_state_dict(memory.state_dict(), {"p": torch.Size((2,))})
    loaded.take_over(state)
    assert loaded.has_leftovers
    assert torch.equal(loaded.leftovers_of("p")["residual"], torch.full((2,), 2.0))


def test_residuals_of_models_and_of_gradients_are_set_aside_apart() -> None:
    memory = Memory()
    models = memory.scoped("models")
    memory.put("p", "residual", torch.ones(2))
    models.put("p", "residual", torch.full((2,), 2.0))
    set_aside(memory)
    assert memory.has_leftovers
    assert not models.has_leftovers
    set_aside(models)
    assert torch.equal(models.leftovers_of("p")["residual"], torch.full((2,), 2.0))
    assert torch.equal(memory.leftovers_of("p")["residual"], torch.ones(2))


def test_a_residual_that_cannot_be_carried_is_kept_with_a_warning(caplog: Any) -> None:
    memory = Memory()
    memory.scoped("mine").put("p", "residual", torch.ones(2))
    with caplog.at_level(logging.WARNING, "thinwire"):
        set_aside(memory)
    assert "'mine: residual'" in caplog.text
    assert memory.scoped("mine").get("p", "residual") is not None


EVERYTHING: list[Program] = [
    *CONSERVING.values(),
    *LOSSY.values(),
    PowerSGD(rank=1, min_compression=1.5),
    TwoShot(thinwire.Quantize(bits=4)),
    ErrorFeedback(Warmup(TwoShot(thinwire.Quantize(bits=4)), steps=1)),
    ErrorFeedback(Partition([("w", TwoShot(thinwire.Quantize(bits=4)))], default=Exact())),
    Int2(keep=0.5),
]


@pytest.mark.parametrize("program", EVERYTHING, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_rank_gets_its_own_gradients_bit_by_bit(program: Program, dtype: torch.dtype) -> None:
    """Nothing is sent there, so nothing is compressed and no residual is kept."""
    if isinstance(program, AcrossNodes):
        program = AcrossNodes(program.program, node_size=1)
    ranks = SimulatedRanks(program, SHAPES, 1)
    for step in range(3):
        gradient = normal(step, LENGTH).to(dtype)
        assert torch.equal(ranks.step([gradient])[0].mean, gradient)
    assert not any(slots for slots in ranks.memories[0].state_dict().values())
    (outcome,) = SimulatedRanks(program, SHAPES, 1).step([gradient], track_error=True)
    assert outcome.error is None or not outcome.error.any()


@pytest.mark.parametrize("program", [Int4(), TopK(1 / 16), LOW_RANK, BF16()], ids=str)
def test_one_node_gets_its_exact_mean(program: Program) -> None:
    """As under torchrun on one machine, where `AcrossNodes` has no other node to send to."""
    ranks = SimulatedRanks(AcrossNodes(program, node_size=4), SHAPES, 4)
    gradients = list(normal(0, 4, LENGTH))
    exact = SimulatedRanks(AcrossNodes(Exact(), node_size=4), SHAPES, 4).step(gradients)[0].mean
    assert torch.equal(ranks.step(gradients)[0].mean, exact)
    assert not any(slots for memory in ranks.memories for slots in memory.state_dict().values())


@pytest.mark.parametrize("program", [Int4(), Int2(keep=0.5), LOW_RANK, PowerSGD(rank=1)], ids=str)
def test_one_rank_applies_the_residual_that_more_ranks_saved(program: Program) -> None:
    ranks = SimulatedRanks(program, SHAPES, 1)
    residual = normal(1, 18, 6)
    ranks.memories[0].put("w", "residual", residual)
    mean = ranks.step([torch.zeros(LENGTH)])[0].mean
    assert torch.equal(mean[: 18 * 6], residual.flatten())
    assert ranks.memories[0].get("w", "residual") is None
    assert not ranks.step([torch.zeros(LENGTH)])[0].mean.any()


def test_a_users_own_program_runs_on_one_rank_as_written() -> None:
    def doubled(bucket: thinwire.Bucket, memory: Memory) -> thinwire.Collectives[thinwire.Outcome]:
        total = yield thinwire.AllReduce(bucket.buffer * 2)
        return thinwire.Outcome(total, -bucket.buffer if bucket.track_error else None)

    ranks = SimulatedRanks(doubled, {"p": (4,)}, 1)
    assert torch.equal(ranks.step([torch.ones(4)])[0].mean, torch.full((4,), 2.0))
    fed_back = SimulatedRanks(ErrorFeedback(as_program(doubled)), {"p": (4,)}, 1)
    fed_back.step([torch.ones(4)])
    assert torch.equal(fed_back.kept(0, "residual"), torch.full((4,), -1.0))
