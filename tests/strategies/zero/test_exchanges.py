"""Owners of parameters, and what travels to and from them, on simulated ranks."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import thinwire
from tests.simulated import normal
from thinwire import (
    BF16,
    Bucket,
    Exact,
    Exchange,
    Int4,
    Int8,
    Memory,
    PowerSGD,
    Program,
    ProgramError,
    RandomK,
    TopK,
)
from thinwire.engine.simulate import simulate
from thinwire.strategies.zero.assignment import owners
from thinwire.strategies.zero.exchanges import Pieces, reduce_to_owners
from thinwire.strategies.zero.owner_step import step_some

SHAPES = {"a": (4, 3), "b": (7,), "c": (), "d": (0,), "e": (5, 2)}
LENGTH = 12 + 7 + 1 + 0 + 10


@given(st.dictionaries(st.text(), st.integers(0, 100), min_size=1), st.integers(1, 7))
def test_every_parameter_has_an_owner_and_loads_are_even(sizes: dict[str, int], count: int) -> None:
    for spread in (True, False):
        found = owners(sizes, count, spread=spread)
        assert list(found) == list(sizes)
        assert set(found.values()) <= set(range(count))
    even = owners(sizes, count, spread=True)
    loads = [sum(sizes[name] for name in sizes if even[name] == own) for own in range(count)]
    assert max(loads) - min(loads) <= max(sizes.values())


def bucket_of(rank: int, world: int, gradient: torch.Tensor, step: int = 0) -> Bucket:
    shapes = tuple(torch.Size(shape) for shape in SHAPES.values())
    return Bucket(0, gradient.clone(), tuple(SHAPES), shapes, rank, world, step)


def owned(world: int) -> dict[str, int]:
    return {name: (3 * place) % world for place, name in enumerate(SHAPES)}


def reductions(
    program: Program, gradients: torch.Tensor, memories: list[Memory], step: int
) -> tuple[list[torch.Tensor], list[Pieces]]:
    world = len(gradients)
    buckets = [bucket_of(rank, world, own, step) for rank, own in enumerate(gradients)]
    pieces = [Pieces.of(bucket, owned(world)) for bucket in buckets]
    programs = [
        [reduce_to_owners(program, bucket, cut, memory)]
        for bucket, cut, memory in zip(buckets, pieces, memories, strict=True)
    ]
    with torch.no_grad():
        return [result[0] for result in simulate(programs).results], pieces


@pytest.mark.parametrize("world", [1, 2, 3, 5, 7])
@pytest.mark.parametrize(
    ("program", "error"),
    [(Exact(), 1e-6), (BF16(), 0.02), (Int8(), 0.03), (PowerSGD(rank=4, warmup=0), 1e-5)],
)
def test_owners_receive_the_mean(world: int, program: Program, error: float) -> None:
    gradients = normal(world, world, LENGTH)
    results, pieces = reductions(program, gradients, [Memory() for _ in range(world)], 0)
    whole = pieces[0].cut(bucket_of(0, world, gradients.mean(0)).views(), gradients)
    for rank, result in enumerate(results):
        torch.testing.assert_close(result, whole[rank], rtol=error, atol=error)


@pytest.mark.parametrize("program", [Int4(), TopK(ratio=0.1), RandomK(ratio=0.25)])
@given(world=st.integers(1, 5), seed=st.integers(0, 100))
def test_with_error_feedback_nothing_is_lost(program: Program, world: int, seed: int) -> None:
    """What owners received plus the mean of all residuals is the sum of all mean gradients."""
    memories = [Memory() for _ in range(world)]
    given_all, received = torch.zeros(LENGTH), torch.zeros(LENGTH)
    for step in range(6):
        gradients = normal(seed + step, world, LENGTH)
        results, pieces = reductions(program, gradients, memories, step)
        given_all += gradients.mean(0)
        views = bucket_of(0, world, received).views()
        for rank, result in enumerate(results):
            offset = 0
            for name in pieces[rank].names[rank]:
                size = views[name].numel()
                received_piece = result[offset : offset + size].view(views[name].shape)
                views[name] += received_piece
                offset += size
        received = torch.cat([views[name].flatten() for name in SHAPES])
    residuals = [
        torch.cat(
            [memory.slot(name, "residual", partial(torch.zeros, SHAPES[name])).flatten() for name in SHAPES]
        )
        for memory in memories
    ]
    torch.testing.assert_close(received + torch.stack(residuals).mean(0), given_all, rtol=1e-4, atol=1e-4)


def test_an_overflow_leaves_no_inf_in_a_residual() -> None:
    """Also where steps are taken inside backward, so that nothing can be taken back."""
    memories = [Memory(), Memory()]
    gradients = normal(0, 2, LENGTH)
    gradients[1, 3] = torch.inf
    reductions(Int4(), gradients, memories, 0)
    for memory in memories:
        for name in SHAPES:
            assert memory.slot(name, "residual", lambda: torch.zeros(1)).isfinite().all()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_parameters_come_from_their_owners(world: int) -> None:
    values = normal(3, world, LENGTH)
    pieces = Pieces.of(bucket_of(0, world, values[0]), owned(world))
    cut = [pieces.cut(bucket_of(rank, world, own).views(), own) for rank, own in enumerate(values)]
    results = simulate([[pieces.share(cut[rank][rank], rank)] for rank in range(world)]).results
    for rank in range(world):
        for name, tensor in results[rank][0].items():
            owner = owned(world)[name]
            assert torch.equal(tensor, bucket_of(owner, world, values[owner]).views()[name])


def test_pieces_that_do_not_fit_are_refused() -> None:
    def send(tensor: torch.Tensor, sends: tuple[int, ...], receives: tuple[int, ...]) -> Any:
        return (yield Exchange(tensor, sends=sends, receives=receives))

    with pytest.raises(ProgramError, match="pass one number per rank, 2 here"):
        simulate([[send(torch.ones(2), (1,), (1,))], [send(torch.ones(2), (1,), (1,))]])
    with pytest.raises(ProgramError, match=r"rank 0 is sent \(1, 1\) numbers, but expects \(1, 2\)"):
        simulate([[send(torch.ones(2), (1, 1), (1, 2))], [send(torch.ones(2), (1, 1), (1, 1))]])


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam"])
@pytest.mark.parametrize("foreach", [True, False])
def test_some_by_some_is_all_at_once(kind: str, foreach: bool) -> None:
    """Parameters that are stepped one after another come to what one step of all of them does."""

    def made() -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
        parameters = [nn.Parameter(normal(place, 3, 2)) for place in range(4)]
        groups = [{"params": parameters[:3], "lr": 0.1}, {"params": parameters[3:], "lr": 0.01}]
        more = {"momentum": 0.9} if kind == "SGD" else {}
        return parameters, getattr(torch.optim, kind)(groups, foreach=foreach, **more)

    (one, whole), (other, parts) = made(), made()
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 2) for optimizer in (whole, parts)]
    for step in range(5):
        gradients = normal(step, 4, 3, 2)
        for parameter, gradient in zip(one, gradients, strict=True):
            parameter.grad = gradient.clone()
        whole.step()
        parts.step()  # nothing has a gradient
        for chosen in ([2, 0], [1], [3]):
            step_some(parts, [(other[place], gradients[place].clone()) for place in chosen])
        for scheduler in schedulers:
            scheduler.step()
        assert all(parameter.grad is None for parameter in other)
    for expected, got in zip(one, other, strict=True):
        assert torch.equal(expected, got)


def test_wrong_options() -> None:
    with pytest.raises(thinwire.OptionError, match=r"parameters=torch.int8 must be None or torch.bfloat16"):
        thinwire.ZeRO(parameters=torch.int8)
    with pytest.raises(thinwire.OptionError, match="interleaved='yes' must be True or False"):
        thinwire.ZeRO(interleaved="yes")  # type: ignore[arg-type]
    with pytest.raises(thinwire.OptionError, match="is not a program"):
        thinwire.ZeRO("int8")  # type: ignore[arg-type]
