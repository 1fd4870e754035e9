"""What a program must do to average gradients."""

import math

import torch

from thinwire.programs.overflow import all_finite
from thinwire.programs.program import Program
from thinwire.testing.ranks import SimulatedRanks

_SHAPES = {"weight": (24, 17), "bias": (24,), "scale": ()}
_LENGTH = sum(math.prod(shape) for shape in _SHAPES.values())


def check_program(
    program: Program,
    *,
    ranks: int = 4,
    steps: int = 200,
    tolerance: float | None = 0.3,
    loses: float = 0.005,
) -> None:
    """Run a program on simulated ranks; AssertionError says which rule it breaks.

    Every rank receives the same mean, bit by bit, whatever the gradients' magnitude; of gradients that stay
    the same, what arrives is the exact mean on average; where it tracks its error, the mean of what was given
    is the mean that is received plus the mean of the errors; an infinite or NaN number on one rank reaches
    all, and what is remembered stays as it was.

    Args:
        program: What is checked.
        ranks: How many.
        steps: How many, for the average.
        tolerance: How far the average may be from the exact mean, relative to it. None: however far, for
            programs that need an error feedback they have not.
        loses: What may be missing from mean and errors together, relative to what was given: sums in 16 bits
            are rounded where no rank can see it.

    Example::

        thinwire.testing.check_program(thinwire.Int8())
    """
    _agree(program, ranks)
    if tolerance is not None:
        _average(program, ranks, steps, tolerance)
    _lose_nothing(program, ranks, loses)
    for bad in (math.inf, -math.inf, math.nan):
        _overflow(program, ranks, bad)


def _gradients(ranks: int, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(_LENGTH, generator=generator) for _ in range(ranks)]


def _agree(program: Program, count: int) -> None:
    ranks = SimulatedRanks(program, _SHAPES, count)
    for step, scale in enumerate((1.0, 1.0, 1e-6, 1e3, 1.0)):
        gradients = [scale * gradient for gradient in _gradients(count, step)]
        means = [outcome.mean for outcome in ranks.step(gradients)]
        for rank, mean in enumerate(means):
            assert torch.equal(mean, means[0]), f"{program}: ranks 0 and {rank} receive different means"
            assert all_finite(mean), f"{program}: the mean of finite gradients is not finite"


def _average(program: Program, count: int, steps: int, tolerance: float) -> None:
    """Over its latter half, so that a program may begin otherwise."""
    ranks, gradients = SimulatedRanks(program, _SHAPES, count), _gradients(count, 0)
    exact, arrived = torch.stack(gradients).mean(0), torch.zeros(_LENGTH)
    for step in range(steps):
        mean = ranks.step(gradients)[0].mean
        arrived += mean if 2 * step >= steps else 0
    found = arrived / (steps - steps // 2)
    for what, part in (("all", slice(None)), ("the last", slice(-5, None))):
        off = (found - exact)[part].norm() / exact[part].norm()
        assert off <= tolerance, (
            f"{program}: of {what} gradients that stay the same, what arrives in {steps} steps is off by"
            f" {off:.0%} of their mean"
        )


def _lose_nothing(program: Program, count: int, loses: float) -> None:
    gradients = _gradients(count, 0)
    outcomes = SimulatedRanks(program, _SHAPES, count).step(gradients, track_error=True)
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    if errors:
        assert len(errors) == count, f"{program}: only some ranks track their errors"
        given = torch.stack(gradients).double().mean(0)
        accounted = outcomes[0].mean.double() + torch.stack(errors).double().mean(0)
        off = (given - accounted).norm() / given.norm()
        assert off <= loses, f"{program}: mean and errors together miss {off:.2%} of what ranks gave"


def _overflow(program: Program, count: int, bad: float) -> None:
    ranks = SimulatedRanks(program, _SHAPES, count)
    for step in range(4):
        ranks.step(_gradients(count, step))
    before = [memory.state_dict() for memory in ranks.memories]
    gradients = _gradients(count, 4)
    gradients[-1][_LENGTH // 3] = bad
    for rank, outcome in enumerate(ranks.step(gradients)):
        assert not all_finite(outcome.mean), f"{program}: rank {rank} does not learn of the last rank's {bad}"
    for rank, memory in enumerate(ranks.memories):
        for name, slots in memory.state_dict().items():
            for key, tensor in slots.items():
                kept = before[rank].get(name, {}).get(key, torch.zeros_like(tensor))
                assert torch.equal(tensor, kept), f"{program}: {bad} changes {key!r} on rank {rank}"
