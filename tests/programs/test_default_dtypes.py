"""The user's default dtype and device are the user's: no result of thinwire's depends on them."""

import ast
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire
from thinwire.checkpoint.gather import collect
from thinwire.engine.simulate import simulate
from thinwire.kernels import library
from thinwire.model_averaging.utils import average_used
from thinwire.monitors.audit import Audited, Findings
from thinwire.monitors.replicas import fingerprints
from thinwire.programs.block_coder import layout_of_blocks
from thinwire.programs.coding import layout_of
from thinwire.strategies.averaging.shared_state import mean_of_states, one_state, share_buffers
from thinwire.strategies.zero.owner_step import norm_of
from thinwire.testing import SimulatedRanks

SHAPES = {"w": (40, 24), "v": (12, 9), "bias": (7,)}
LENGTH = 40 * 24 + 12 * 9 + 7
CPU = torch.device("cpu")
PROGRAMS = {
    "Int8": thinwire.Int8(),
    "Int8 at random": thinwire.Int8(stochastic=True),
    "affine": thinwire.TwoShot(thinwire.Quantize(affine=True)),
    "Int4": thinwire.Int4(),
    "Int2": thinwire.Int2(),
    "e4m3": thinwire.FP8(),
    "e5m2": thinwire.FP8("e5m2"),
    "Sign": thinwire.Sign(),
    "TopK": thinwire.TopK(0.1),
    "RandomK": thinwire.RandomK(0.1),
    "FP16": thinwire.FP16(),
    "PowerSGD": thinwire.PowerSGD(rank=2, min_compression=1, warmup=0),
    "PowerSGD anew": thinwire.PowerSGD(
        rank=2, min_compression=1, warm_start=False, factor_dtype="bf16", warmup=0
    ),
    "parts": thinwire.Partition([("w", thinwire.Int8()), ("bias", thinwire.Exact())], thinwire.Int4()),
    "nodes": thinwire.AcrossNodes(thinwire.Int8(), node_size=1),
    "audited": Audited(thinwire.Int8(), Findings()),
}
DEFAULTS: list[torch.dtype | str] = [torch.float64, torch.bfloat16, torch.float16, "meta"]
FACTORIES = {"empty", "zeros", "ones", "full", "tensor", "as_tensor", "arange", "eye", "linspace"} | {
    "rand",
    "randn",
    "randint",
    "randperm",
}


@contextmanager
def default(kind: torch.dtype | str | None) -> Iterator[None]:
    if isinstance(kind, str):
        with torch.device(kind):
            yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(kind or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def under(kind: torch.dtype | str | None, work: Any, *given: Any) -> Any:
    """What comes of it with this default, with nothing cached from before: caches belong to threads."""

    def run() -> Any:
        layout_of.cache_clear()
        layout_of_blocks.cache_clear()
        with default(kind):
            return work(*given)

    with ThreadPoolExecutor(1) as fresh:
        return fresh.submit(run).result()


def steps(program: Any, gradients: list[list[torch.Tensor]]) -> list[Any]:
    ranks = SimulatedRanks(program, SHAPES, 2)
    means = [[outcome.mean for outcome in ranks.step(own)] for own in gradients]
    return [means, [memory.state_dict() for memory in ranks.memories]]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("native", [nullcontext, library.switched_off], ids=["native", "torch"])
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_programs_do_not_follow_the_defaults(program: Any, native: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [[torch.randn(LENGTH, generator=generator) for _ in range(2)] for _ in range(3)]
    with native():
        expected = under(None, steps, program, gradients)
        for kind in DEFAULTS:
            assert same(expected, under(kind, steps, program, gradients)), kind


def beside(values: list[list[torch.Tensor]]) -> list[Any]:
    """What is done beside gradients: averaged models, optimizers' state, norms, fingerprints."""
    models = [[one.clone().requires_grad_() for one in own] for own in values]
    optimizers = [torch.optim.SGD(own, lr=0.1, momentum=0.9) for own in models]
    for own, optimizer in zip(models, optimizers, strict=True):
        for one in own:
            one.grad = one.detach().clone()
        optimizer.step()
    pairs = list(zip(models, optimizers, strict=True))
    with torch.no_grad():
        simulate([[average_used(own, 2)] for own in models])
        simulate([[one_state(own, [optimizer], 2)] for own, optimizer in pairs])
        simulate([[mean_of_states(own, [optimizer], 2)] for own, optimizer in pairs])
        simulate([[share_buffers([one.detach() for one in own], "mean", 2)] for own in models])
        states = [optimizer.state_dict()["state"] for optimizer in optimizers]
        collected = simulate([[collect(state, rank, 2, 0, CPU)] for rank, state in enumerate(states)]).results
        norms = [norm_of(models[0], 2.0), norm_of([], 2.0)]
        return [[[one.detach() for one in own] for own in models], collected, norms, fingerprints(models[0])]


def test_what_is_done_beside_gradients_does_not_follow_the_defaults() -> None:
    generator = torch.Generator().manual_seed(0)
    values = [[torch.randn(shape, generator=generator) for shape in SHAPES.values()] for _ in range(2)]
    expected = under(None, beside, values)
    for kind in DEFAULTS:
        assert same(expected, under(kind, beside, values)), kind
        under(kind, thinwire.DiLoCo, 8)  # tries its optimizer on a parameter


def calls() -> list[tuple[str, str, ast.Call]]:
    """Function, place and syntax of each call of torch's; commands and batteries of tests apart.

    What runs beside training has all defaults to itself.
    """
    package = Path(thinwire.__file__).parent
    files = [file for file in package.rglob("*.py") if file.parent.name not in ("bench", "testing")]
    found = [
        (ast.unparse(node.func), f"{file.relative_to(package)}:{node.lineno}: {ast.unparse(node)}", node)
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
    ]
    return [(name[6:], text, node) for name, text, node in found if name.startswith("torch.")]


def test_every_new_tensor_says_its_dtype_and_device() -> None:
    makes = [(text, node) for name, text, node in calls() if name in FACTORIES]
    silent = [text for text, node in makes if not {"dtype", "device"} <= {one.arg for one in node.keywords}]
    assert makes
    assert not silent, "\n".join(silent)


def test_no_two_numbers_are_chosen_from() -> None:
    """The result of `torch.where(condition, 0.0, 1.0)` has the default dtype."""
    choices = [(text, node) for name, text, node in calls() if name == "where"]
    numbers = [text for text, node in choices if not any(map(_may_be_a_tensor, node.args[1:]))]
    assert choices
    assert not numbers, "\n".join(numbers)


def _may_be_a_tensor(node: ast.expr) -> bool:
    return not isinstance(node, ast.Constant) and ast.unparse(node) not in ("torch.inf", "torch.nan")
