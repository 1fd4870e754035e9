"""What a program must do to average gradients."""

import math

import torch

from thinwire.programs.overflow import all_finite
from thinwire.programs.program import Program
from thinwire.testing.ranks import SimulatedRanks

_SHAPES = {"weight": (24, 17), "bias": (24,), "scale": ()}
_LENGTH = sum(math.prod(shape) for shape in _SHAPES.values())


def check_program(program: Program, *, ranks: int = 4, steps: int = 6, loses: float = 1e-5) -> None:
    """Run a program on simulated ranks; AssertionError says which rule it breaks.

    Every rank receives the same mean, bit by bit; where it tracks its error, the mean of what ranks gave is
    the mean they receive plus the mean of their errors; an infinite number on one rank reaches all, and what
    is remembered stays as it was.

    Args:
        program: What is checked.
        ranks: How many.
        steps: How many.
        loses: What may be missing from mean and errors together, relative to what was given: sums in 16 bits
            are rounded where no rank can see it.

    Example::

        thinwire.testing.check_program(thinwire.Int8())
    """
    _agree(program, ranks, steps)
    _lose_nothing(program, ranks, loses)
    _overflow(program, ranks)


def _gradients(ranks: int, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(_LENGTH, generator=generator) for _ in range(ranks)]


def _agree(program: Program, count: int, steps: int) -> None:
    ranks = SimulatedRanks(program, _SHAPES, count)
    for step in range(steps):
        means = [outcome.mean for outcome in ranks.step(_gradients(count, step))]
        for rank, mean in enumerate(means):
            assert torch.equal(mean, means[0]), f"{program}: ranks 0 and {rank} receive different means"
            assert all_finite(mean), f"{program}: the mean of finite gradients is not finite"


def _lose_nothing(program: Program, count: int, loses: float) -> None:
    ranks = SimulatedRanks(program, _SHAPES, count)
    gradients = _gradients(count, 0)
    outcomes = ranks.step(gradients, track_error=True)
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    if errors:
        assert len(errors) == count, f"{program}: only some ranks track their errors"
        given = torch.stack(gradients).double().mean(0)
        accounted = outcomes[0].mean.double() + torch.stack(errors).double().mean(0)
        off = (given - accounted).norm() / given.norm()
        assert off <= loses, f"{program}: mean and errors together miss {off:.2%} of what ranks gave"


def _overflow(program: Program, count: int) -> None:
    ranks = SimulatedRanks(program, _SHAPES, count)
    ranks.step(_gradients(count, 0))
    before = [memory.state_dict() for memory in ranks.memories]
    gradients = _gradients(count, 1)
    gradients[-1][_LENGTH // 3] = math.inf
    for rank, outcome in enumerate(ranks.step(gradients)):
        assert not all_finite(outcome.mean), (
            f"{program}: rank {rank} does not learn of the last rank's overflow"
        )
    for rank, memory in enumerate(ranks.memories):
        for name, slots in memory.state_dict().items():
            for key, tensor in slots.items():
                kept = before[rank].get(name, {}).get(key)
                assert kept is not None, (
                    f"{program}: rank {rank} remembers {key!r} of a step with an overflow"
                )
                assert torch.equal(tensor, kept), f"{program}: an overflow changes {key!r} on rank {rank}"
