"""PowerSGD on stacks of matrices, as on an accelerator, compared with matrix by matrix."""

from typing import Any

import pytest
import torch

from tests.powersgd import PASSES, passing
from tests.simulated import normal
from thinwire import PowerSGD
from thinwire.engine.foreach import stack_of
from thinwire.testing import SimulatedRanks

SHAPES = {"a": (40, 33), "bias": (5,), "b": (40, 33), "c": (40, 33), "wide": (12, 70), "norm": (7,)}
"""Three equal matrices at unequal distances, another one, and vectors."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {"rank": 1},
        {"rank": 3},
        {"rank": 6},
        {"rank": 3, "residual": "sent"},
        {"rank": 3, "factor_dtype": "bf16"},
        {"rank": 3, "factor_dtype": "int8", "residual": "sent"},
        {"rank": 3, "flatten": True},
        {"rank": 3, "warm_start": False},
        {"rank": 3, "error_feedback": False},
        {"rank": 3, "warmup": 2},
    ],
    ids=str,
)
def test_stacks_compute_what_single_matrices_do(options: dict[str, Any], dtype: torch.dtype) -> None:
    program = PowerSGD(**{"warmup": 0, "min_compression": 0.5, **options})
    both = {name: SimulatedRanks(program, SHAPES, 2) for name in PASSES}
    length = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    rounding = 1e-4 if dtype == torch.float32 and "factor_dtype" not in options else 0.05
    for step in range(3):
        gradients = list(normal(step, 2, length).to(dtype))
        found = {}
        for name, ranks in both.items():
            with passing(name):
                means = [outcome.mean for outcome in ranks.step(gradients)]
            assert torch.equal(means[0], means[1])
            residuals = torch.cat([kept.flatten() for kept in ranks.memories[1].residuals()] or [means[0]])
            found[name] = means[0].float(), residuals.float()
        single, stacked = found.values()
        for one, other in zip(single, stacked, strict=True):
            assert (one - other).norm() <= rounding * one.norm()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [3, 40 * 33 + 2, 40 * 33 + 5 + 100])
def test_a_number_that_is_not_finite_reaches_all_ranks(value: float, place: int) -> None:
    ranks = SimulatedRanks(PowerSGD(rank=3, warmup=0), SHAPES, 2)
    gradients = list(normal(0, 2, sum(torch.Size(shape).numel() for shape in SHAPES.values())))
    gradients[1][place] = value
    with passing("as on an accelerator"):
        for outcome in ranks.step(gradients):
            assert not outcome.mean.isfinite().all()


def test_a_stack_is_a_view_only_where_distances_in_memory_are_equal() -> None:
    numbers = torch.arange(40)
    rows = [numbers[start : start + 6].view(2, 3) for start in (0, 7, 14, 30)]
    for chosen, viewed in [(rows[:3], True), (rows, False), (rows[:1], True), (rows[2::-1], False)]:
        stack = stack_of(chosen)
        assert torch.equal(stack, torch.stack(chosen))
        assert (stack.untyped_storage().data_ptr() == numbers.data_ptr()) == viewed
    mixed = [rows[0], rows[1].clone()], [rows[0], rows[1].T.contiguous().T]
    for tensors in mixed:
        assert torch.equal(stack_of(tensors), torch.stack(tensors))
