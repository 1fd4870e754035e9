"""Tests of the properties that a program needs to average gradients."""

import math

import torch

from thinwire.programs.finite import all_finite
from thinwire.programs.program import Program, ProgramFunction
from thinwire.programs.wrapper import as_program
from thinwire.testing.ranks import SimulatedRanks

_SHAPES = {"weight": (24, 17), "bias": (24,), "scale": ()}
_LENGTH = sum(math.prod(shape) for shape in _SHAPES.values())


def check_program(
    program: ProgramFunction,
    *,
    ranks: int = 4,
    steps: int = 200,
    tolerance: float | None = 0.3,
    loses: float = 0.005,
) -> None:
    """Check a program on simulated ranks.

    - All ranks receive bit-identical means, at any magnitude of the gradients.
    - If gradients stay the same, the average of the means over steps is the exact mean.
    - If the program tracks errors, the received mean plus the mean of the errors is the exact mean.
    - If the program carries exact parameters (`carries_exact`), their means are exact.
    - A non-finite number on one rank gives a non-finite mean on all ranks, and memories stay unchanged.

    Args:
        program: The program to check.
        ranks: The number of ranks.
        steps: The number of steps to average over.
        tolerance: The largest distance of that average from the exact mean, relative to it. None to skip
            this check, for programs that need error feedback and do not have it.
        loses: The largest difference between the exact mean and the sum of mean and errors, relative to the
            exact mean. Sums in 16 bits are rounded during the collective, where no rank can observe it.

    Raises:
        AssertionError: The program breaks a rule. The message says which one.

    Example::

        thinwire.testing.check_program(thinwire.Int8())
    """
    program = as_program(program)
    _agree(program, ranks)
    if tolerance is not None:
        _average(program, ranks, steps, tolerance)
    _lose_nothing(program, ranks, loses)
    if program.carries_exact:
        _carry(program, ranks)
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
            assert all_finite(mean), f"{program}: the mean of finite gradients is non-finite"


def _average(program: Program, count: int, steps: int, tolerance: float) -> None:
    """Check the average over the second half of the steps, after a possible warm-up."""
    ranks, gradients = SimulatedRanks(program, _SHAPES, count), _gradients(count, 0)
    exact, arrived = torch.stack(gradients).mean(0), torch.zeros(_LENGTH)
    for step in range(steps):
        mean = ranks.step(gradients)[0].mean
        arrived += mean if 2 * step >= steps else 0
    found = arrived / (steps - steps // 2)
    for what, part in (("all", slice(None)), ("the last", slice(-5, None))):
        off = (found - exact)[part].norm() / exact[part].norm()
        assert off <= tolerance, (
            f"{program}: the average over {steps} steps of {what} gradients that stay the same is off by"
            f" {off:.0%} of their mean"
        )


def _lose_nothing(program: Program, count: int, loses: float) -> None:
    gradients = _gradients(count, 0)
    outcomes = SimulatedRanks(program, _SHAPES, count).step(gradients, track_error=True)
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    if errors:
        assert len(errors) == count, f"{program}: only some ranks return their errors"
        given = torch.stack(gradients).double().mean(0)
        accounted = outcomes[0].mean.double() + torch.stack(errors).double().mean(0)
        off = (given - accounted).norm() / given.norm()
        assert off <= loses, f"{program}: mean and errors together differ by {off:.2%} from the exact mean"


def _carry(program: Program, count: int) -> None:
    """Check that the mean of the vectors is exact, and that of the matrix compressed."""
    ranks = SimulatedRanks(program, _SHAPES, count, exact=("bias", "scale"))
    start = math.prod(_SHAPES["weight"])
    for step in range(3):
        gradients = _gradients(count, step)
        exact = torch.stack(gradients).double().mean(0)[start:]
        for outcome in ranks.step(gradients):
            off = (outcome.mean[start:].double() - exact).abs().max()
            assert off <= 1e-5, f"{program}: the mean of parameters in bucket.exact is off by {off:.2g}"


def _overflow(program: Program, count: int, bad: float) -> None:
    ranks = SimulatedRanks(program, _SHAPES, count)
    for step in range(4):
        ranks.step(_gradients(count, step))
    before = [memory.state_dict() for memory in ranks.memories]
    gradients = _gradients(count, 4)
    gradients[-1][_LENGTH // 3] = bad
    for rank, outcome in enumerate(ranks.step(gradients)):
        assert not all_finite(outcome.mean), (
            f"{program}: the last rank's {bad} does not reach the mean of rank {rank}"
        )
    for rank, memory in enumerate(ranks.memories):
        for name, slots in memory.state_dict().items():
            for key, tensor in slots.items():
                kept = before[rank].get(name, {}).get(key, torch.zeros_like(tensor))
                assert torch.equal(tensor, kept), f"{program}: {bad} changes {key!r} on rank {rank}"
