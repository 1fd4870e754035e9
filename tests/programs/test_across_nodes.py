"""Exact within a node, compressed between nodes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.simulated import normal, sent_by
from thinwire import (
    AcrossNodes,
    Bucket,
    Exact,
    Int4,
    Int8,
    Memory,
    OptionError,
    Partition,
    Program,
    Quantize,
    SignBits,
    Size,
    TwoShot,
)
from thinwire.engine.ops import Collective
from thinwire.engine.simulate import deliver
from thinwire.programs.memory import RESIDUAL
from thinwire.testing import SimulatedRanks


@given(st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2), (6, 3), (6, 2), (4, 4)]), st.integers(0, 99))
def test_exact_across_nodes_is_exact(world: tuple[int, int], seed: int) -> None:
    count, node = world
    shapes = {"matrix": (17, 3), "wide": (2, 9), "bias": (5,), "scale": ()}
    gradients = list(normal(seed, count, 75))
    for outcome in SimulatedRanks(AcrossNodes(Exact(), node_size=node), shapes, count).step(gradients):
        torch.testing.assert_close(outcome.mean, torch.stack(gradients).mean(0))


def test_a_node_sends_others_what_one_rank_would() -> None:
    alone, length = sent_by(TwoShot(Quantize()), 2, 1 << 16), 1 << 16
    whole = sent_by(AcrossNodes(TwoShot(Quantize()), node_size=4), 8, length)
    within = 2 * 3 * (4 * length // 4)  # a reduce-scatter and an all-gather of float32 in the node
    assert whole - within == pytest.approx(alone / 4, rel=0.02)


def test_across_nodes_keeps_its_own_slices_of_the_residual() -> None:
    ranks = SimulatedRanks(AcrossNodes(Int4(), node_size=2), {"p": (10, 4)}, 4)
    given_sum, applied = torch.zeros(40), torch.zeros(40)
    for step in range(6):
        gradients = list(normal(step, 4, 40))
        given_sum += torch.stack(gradients).mean(0)
        applied += ranks.step(gradients)[0].mean
    slices = [
        torch.stack(
            [ranks.kept(rank, f"slice {place} of 2: {RESIDUAL}") for rank in (place, place + 2)]
        ).mean(0)
        for place in range(2)
    ]
    torch.testing.assert_close(applied + torch.cat(slices), given_sum, atol=1e-5, rtol=1e-5)


def test_node_size_comes_from_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert AcrossNodes(Exact()).node_size == 8
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    with pytest.raises(
        OptionError, match=r"node_size=None .* LOCAL_WORLD_SIZE, which torchrun sets, is not in"
    ):
        AcrossNodes(Exact())
    with pytest.raises(OptionError, match="node_size=0 must be a whole number of ranks"):
        AcrossNodes(Exact(), node_size=0)
    with pytest.raises(OptionError, match="node_size=2 does not divide the 3 ranks"):
        SimulatedRanks(AcrossNodes(Exact(), node_size=2), {"p": (4,)}, 3).step([torch.ones(4)] * 3)


def test_nodes_within_nodes_have_slots_of_their_own() -> None:
    program = AcrossNodes(AcrossNodes(Int8(), node_size=2), node_size=2)
    ranks = SimulatedRanks(program, {"p": (16,)}, 8)
    gradients = list(normal(0, 8, 16))
    mean = ranks.step(gradients)[0].mean
    torch.testing.assert_close(mean, torch.stack(gradients).mean(0), atol=0.02, rtol=0)
    assert ranks.kept(5, f"slice 1 of 2: slice 0 of 2: {RESIDUAL}").shape == (4,)


def test_rules_within_nodes_are_about_whole_parameters() -> None:
    """A slice of the 120 numbers has 30, and one of the 40 has 10."""
    shapes = {"large": (12, 10), "small": (40,)}
    lossy = TwoShot(SignBits())
    for program in (
        Partition([(Size(at_least=100), lossy)]),
        Partition([(Size(below=100), Exact())], default=lossy),
        Partition([("none", Exact())], default=Partition([(Size(at_least=100), lossy)])),
    ):
        gradients = list(normal(0, 8, 160))
        exact = torch.stack(gradients).mean(0)
        mean = SimulatedRanks(AcrossNodes(program, node_size=4), shapes, 8).step(gradients)[0].mean
        assert not torch.allclose(mean[:120], exact[:120]), program
        torch.testing.assert_close(mean[120:], exact[120:])
    two = AcrossNodes(AcrossNodes(Partition([(Size(at_least=100), lossy)]), node_size=2), node_size=2)
    mean = SimulatedRanks(two, shapes, 8).step(gradients)[0].mean
    assert not torch.allclose(mean[:120], exact[:120])


def ranks_of(program: Program, rank: int, count: int) -> set[tuple[int, ...]]:
    """Return the ranks of each collective that a program yields."""
    bucket = Bucket(0, torch.ones(64), ("w",), (torch.Size((8, 8)),), rank, count, 0)
    run, found, received = program(bucket, Memory()), set(), None
    try:
        while True:
            op = run.send(received)
            assert isinstance(op, Collective)
            found.add(op.ranks or ())
            place, size = op.place(rank, count)
            received = deliver(op, [op.tensor] * size)[place]
    except StopIteration:
        return found - {()}


@pytest.mark.parametrize(
    "program",
    [
        Int8(),
        AcrossNodes(Int8(), node_size=2),
        AcrossNodes(AcrossNodes(Exact(), node_size=2), node_size=2),
        Partition([("w", AcrossNodes(Int4(), node_size=4))], default=AcrossNodes(Int8(), node_size=2)),
    ],
)
def test_subgroups_are_the_ranks_of_the_collectives(program: Program) -> None:
    for rank in range(8):
        assert ranks_of(program, rank, 8) <= set(program.subgroups(rank, 8))
        assert all(rank in group for group in program.subgroups(rank, 8))
    for groups in zip(*(program.subgroups(rank, 8) for rank in range(8)), strict=True):
        together = {group: [rank for rank in range(8) if groups[rank] == group] for group in groups}
        assert all(list(group) == ranks for group, ranks in together.items()), "ranks would wait in a circle"
