"""The same bits on processors that divide by a reciprocal and fuse multiply-adds, as GPUs do."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.programs.test_no_host_reads import CASES, Half
from tests.simulated import normal, stepping_in
from thinwire import ErrorFeedback, Gathered, Program, Quantize, TwoShot
from thinwire.codecs.draws import random_floats, random_integers, random_words
from thinwire.codecs.rounding import add_scaled, divide, divide_in_place
from thinwire.kernels import library
from thinwire.testing import SimulatedRanks

aten = torch.ops.aten
SHAPES = {"weight": (24, 16), "conv": (8, 4, 3, 3), "bias": (16,)}
RANKS = 3  # the reciprocals of 2 and 4 are exact
MAKES: dict[str, Callable[[], Program]] = {
    **CASES,
    "a share of the residual, blocks": lambda: ErrorFeedback(TwoShot(Quantize()), keep=0.9),
    "a share of the residual, any codec": lambda: ErrorFeedback(TwoShot(Half()), keep=0.9),
    "a share of the residual, gathered": lambda: ErrorFeedback(Gathered(Half()), keep=0.9),
}
OTHERWISE = ("AcrossNodes", "ZeRO", "PowerSGD", "powerSGD_hook")
"""Other numbers of ranks, and M Q, whose bits may differ (tests/programs/test_reproducible.py)."""
NAMES = [name for name in MAKES if not any(kind in name for kind in OTHERWISE)]


class Gpu(TorchDispatchMode):
    """Divides by a number as CUDA's and XPU's kernels do, and rounds `alpha * x + y` once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (aten.div.Tensor, aten.div_.Tensor) and not isinstance(args[1], torch.Tensor):
            inverse = torch.ones((), dtype=torch.promote_types(args[0].dtype, torch.float32)) / args[1]
            return (aten.mul_ if func is aten.div_.Tensor else aten.mul)(args[0], inverse)
        if func is aten.add_.Tensor and args[0].is_floating_point() and "alpha" in kwargs:
            return args[0].copy_(args[0].double() + kwargs["alpha"] * args[1].double())
        return func(*args, **kwargs)


@contextmanager
def on_a_gpu() -> Iterator[None]:
    """Compute as a GPU does: without native code, and with its roundings."""
    with library.switched_off(), Gpu():
        yield


def steps_of(program: Program, *, on_gpu: bool) -> list[torch.Tensor]:
    """Return what ranks average and keep in three steps."""
    own = stepping_in(on_a_gpu, program, range(RANKS)) if on_gpu else program
    ranks = SimulatedRanks(own, SHAPES, RANKS)
    length = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    found = []
    for step in range(3):
        found += [outcome.mean for outcome in ranks.step(list(normal(step, RANKS, length)))]
    kept = [memory.state_dict() for memory in ranks.memories]
    return [*found, *(tensor for state in kept for slots in state.values() for tensor in slots.values())]


@pytest.mark.parametrize("name", NAMES)
def test_a_program_has_the_same_bits_on_a_gpu(name: str) -> None:
    here, there = (steps_of(MAKES[name](), on_gpu=on_gpu) for on_gpu in (False, True))
    assert len(here) == len(there) > 0
    for own, other in zip(here, there, strict=True):
        assert torch.equal(own.view(torch.uint8), other.view(torch.uint8))


def test_the_gpu_rounds_otherwise() -> None:
    """Without it the tests above would show nothing."""
    x, y = normal(0, 1000), normal(1, 1000)
    with on_a_gpu():
        assert not torch.equal(x / 127, x.div(torch.tensor(127.0)))
        assert not torch.equal(x.clone().div_(3), x / torch.tensor(3.0))
        assert not torch.equal(x.clone().add_(y, alpha=0.9), x + y * 0.9)


def test_a_quotient_and_a_sum_are_rounded_as_on_the_cpu() -> None:
    x, y = normal(0, 1000), normal(1, 1000)
    expected = [x / 127, x / 3, x + y * 0.9, x - y]
    with on_a_gpu():
        found = [
            divide(x, 127),
            divide_in_place(x.clone(), 3),
            add_scaled(x.clone(), y, 0.9),
            add_scaled(x.clone(), y, -1),
        ]
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


def test_random_numbers_are_spread_evenly_and_differ_by_seed() -> None:
    device, count = torch.device("cpu"), 100_000
    for seed in (0, 1, -1, 1 << 70):
        places = torch.bincount(random_integers(count, 100, device, seed), minlength=100)
        assert len(places) == 100
        assert 800 < places.min() <= places.max() < 1200
        numbers = random_floats(count, device, seed)
        assert 0 <= numbers.min() <= numbers.max() < 1
        assert abs(numbers.mean() - 0.5) < 0.01
        assert abs((numbers[1:] - 0.5).dot(numbers[:-1] - 0.5)) / count < 0.01
        assert random_words(count, device, seed).unique().numel() == count
    assert not torch.equal(random_words(9, device, 1), random_words(9, device, 2))
