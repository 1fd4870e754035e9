"""PowerSGD on degenerate gradients, overflows and invalid options, on simulated ranks."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.powersgd import PASSES, SHAPES, Ranks, low_rank, passing
from thinwire import OptionError, PowerSGD


@pytest.fixture(scope="module", autouse=True, params=PASSES)
def passes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run all tests as on a CPU, and as on an accelerator."""
    with passing(request.param):
        yield


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("rank", [1, 3, 100])
def test_degenerate_matrices_never_give_a_nan(dtype: torch.dtype, flatten: bool, rank: int) -> None:
    shapes: dict[str, tuple[int, ...]] = {
        "zero": (8, 6),
        "columns": (8, 6),
        "row": (1, 9),
        "column": (9, 1),
        "one": (1, 1),
        "tiny": (5, 5),
    }
    program = PowerSGD(rank=rank, min_compression=0.01, flatten=flatten, warmup=0)
    ranks = Ranks(program, 3, shapes, dtype)
    for seed in range(3):
        gradients = ranks.gradients(seed)
        for own in gradients:
            own["zero"].zero_()
            own["columns"][:, 1:] = 0
            own["tiny"] *= 1e-7
        mean = ranks.average(gradients)
        assert all(part.isfinite().all() for part in mean.values())
        assert all(ranks.residual(name).isfinite().all() for name in shapes)


def test_a_gradient_that_was_zero_is_followed_again() -> None:
    ranks = Ranks(
        PowerSGD(rank=2, min_compression=1, error_feedback=False, warmup=0), 2, {"w": (12, 9)}, torch.float64
    )
    for _ in range(3):
        ranks.average([{"w": torch.zeros(12, 9, dtype=torch.float64)}] * 2)
    matrix = low_rank(12, 9, 2, 0)
    for _ in range(3):
        mean = ranks.average([{"w": matrix.clone()}] * 2)
    torch.testing.assert_close(mean["w"], matrix)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", ["w", "bias"])
@pytest.mark.parametrize(
    "options",
    [{}, {"factor_dtype": "bf16"}, {"factor_dtype": "int8"}, {"flatten": True}, {"residual": "sent"}],
    ids=str,
)
def test_an_overflow_reaches_ddp_and_leaves_no_trace(bad: float, place: str, options: dict[str, Any]) -> None:
    clean, hurt = (Ranks(PowerSGD(rank=2, min_compression=1, warmup=0, **options), 3) for _ in range(2))
    for seed in range(2):
        clean.average(clean.gradients(seed))
        hurt.average(hurt.gradients(seed))
    before = [memory.state_dict() for memory in hurt.memories]
    gradients = hurt.gradients(99)
    gradients[1][place].view(-1)[2] = bad
    mean = hurt.average(gradients)
    assert not torch.cat([part.flatten() for part in mean.values()]).isfinite().all()
    for old, memory in zip(before, hurt.memories, strict=True):
        for name, slots in memory.state_dict().items():
            assert all(torch.equal(tensor, old[name][key]) for key, tensor in slots.items())
    hurt.step = clean.step
    expected, got = clean.average(clean.gradients(5)), hurt.average(hurt.gradients(5))
    assert all(torch.equal(expected[name], got[name]) for name in SHAPES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank=0 must be at least 1"),
        ({"rank": 1.5}, "rank=1.5"),
        ({"min_compression": 0}, "min_compression=0 must be positive"),
        ({"residual": "none"}, "residual='none' must be"),
        ({"factor_dtype": "int4"}, "factor_dtype='int4' must be"),
        ({"warmup": -1}, "warmup=-1 must be a whole number"),
    ],
)
def test_bad_options_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        PowerSGD(**options)
