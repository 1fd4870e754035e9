"""Programs within programs: validation agrees with every phase, and wrappers forward traits."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tests.simulated import normal
from thinwire import (
    BF16,
    FP16,
    AcrossNodes,
    Bucket,
    Cast,
    Collectives,
    ErrorFeedback,
    Exact,
    Gathered,
    Int8,
    LargestEntries,
    Memory,
    OptionError,
    Outcome,
    Partition,
    PowerSGD,
    Program,
    ProgramError,
    Quantize,
    RandomEntries,
    Reduced,
    SparseMean,
    TwoShot,
    Warmup,
)
from thinwire.programs.allreduce import Alone
from thinwire.programs.memory import RESIDUAL, NoMemory
from thinwire.programs.wrapper import Wrapper
from thinwire.testing import SimulatedRanks, check_program

SHAPES = {"w": (16, 12), "v": (4, 30), "b": (9,)}
LENGTH = 16 * 12 + 4 * 30 + 9
WRAPPERS: dict[str, Callable[[Program], Program]] = {
    "ErrorFeedback": ErrorFeedback,
    "half ErrorFeedback": lambda program: ErrorFeedback(program, keep=0.5),
    "Warmup": lambda program: Warmup(program, steps=2),
    "Partition by default": lambda program: Partition([("b", Exact())], default=program),
    "Partition by rule": lambda program: Partition([("w", program)], default=TwoShot(Quantize())),
    "AcrossNodes": lambda program: AcrossNodes(program, node_size=2),
}
PROGRAMS: dict[str, Program] = {
    "Exact": Exact(),
    "BF16": BF16(),
    "Int8": Int8(),
    "TwoShot": TwoShot(Quantize(bits=4, block=16)),
    "TwoShot of bf16": TwoShot(Cast(torch.bfloat16)),
    "Gathered": Gathered(LargestEntries(ratio=0.2, block=10)),
    "SparseMean": SparseMean(LargestEntries(ratio=0.2, block=10)),
    "Reduced": Reduced(RandomEntries(ratio=0.25)),
    "PowerSGD": PowerSGD(rank=2, min_compression=1, warmup=3),
    "Warmup": Warmup(TwoShot(Quantize()), steps=3),
}


def composed(outer: str, inner: str, world: int) -> Iterator[tuple[str, Program]]:
    """Yield the compositions that validation accepts on so many ranks. The others raise cause and way out."""
    errors = {
        "program=": "wrap the program that has the codec",
        "node_size=": "all nodes must have the same number of ranks",
        "the rule for": "it fits no parameter of this model, which has w",
    }
    for name, innermost in PROGRAMS.items():
        try:
            program = WRAPPERS[outer](WRAPPERS[inner](innermost))
            program.check({key: torch.Size(shape) for key, shape in SHAPES.items()}, world)
        except OptionError as error:
            text = str(error)
        else:
            yield name, program
            continue
        assert any(re.match(f"{cause}.*: {way_out}", text) for cause, way_out in errors.items()), name


def exact_at(program: Program, step: int) -> bool:
    """Return whether a composition averages all parameters exactly in a step."""
    warm = isinstance(program, Warmup) and step < program.steps
    inner = program.inner
    return warm or isinstance(program, Exact) or (bool(inner) and all(exact_at(p, step) for p in inner))


@pytest.mark.parametrize("inner", WRAPPERS)
@pytest.mark.parametrize("outer", WRAPPERS)
@pytest.mark.parametrize("world", [2, 4])
def test_a_composition_is_rejected_at_once_or_runs_in_every_phase(outer: str, inner: str, world: int) -> None:
    for name, program in composed(outer, inner, world):
        ranks = SimulatedRanks(program, SHAPES, world, {"b"} if program.carries_exact else ())
        for step in range(5):  # the first steps of the warm-ups of 2 and 3 steps, and beyond them
            gradients = normal(step, world, LENGTH).bfloat16()
            means = [outcome.mean for outcome in ranks.step(list(gradients))]
            assert all(mean.dtype == torch.bfloat16 and mean.isfinite().all() for mean in means), (name, step)
            assert all(torch.equal(mean, means[0]) for mean in means), (name, step)
            exact, off = gradients.float().mean(0), 2**-6
            if exact_at(program, step):
                torch.testing.assert_close(
                    means[0].float(), exact, rtol=off, atol=off, msg=f"{name} at {step}"
                )


@pytest.mark.parametrize("inner", WRAPPERS)
@pytest.mark.parametrize("outer", WRAPPERS)
def test_every_trait_of_a_composition_holds_in_every_phase(outer: str, inner: str) -> None:
    for name, program in composed(outer, inner, 4):
        ranks = SimulatedRanks(program, SHAPES, 4, {"b"} if program.carries_exact else ())
        shuffled = SimulatedRanks(program, SHAPES, 4)
        for step in range(5):
            gradients = normal(step, 4, LENGTH)
            exact = gradients.mean(0)
            outcomes = ranks.step(list(gradients), track_error=program.tracks_error)
            if program.carries_exact:
                torch.testing.assert_close(outcomes[0].mean[-9:], exact[-9:], msg=name)
            if program.tracks_error:
                errors = [outcome.error for outcome in outcomes if outcome.error is not None]
                assert len(errors) == 4, name
                total = outcomes[0].mean + torch.stack(errors).mean(0)
                torch.testing.assert_close(total, exact, rtol=1e-4, atol=1e-5, msg=name)
            if program.ignores_order:
                mean = shuffled.step(list(gradients.flip(1)))[0].mean
                torch.testing.assert_close(mean.flip(0), outcomes[0].mean, msg=name)
        if program.stateless:
            assert not any(memory.state_dict() for memory in ranks.memories), name
    for name, program in composed(outer, inner, 1):
        if program.exact_alone:
            gradient = normal(0, LENGTH)
            for mean in (outcome.mean for outcome in SimulatedRanks(program, SHAPES, 1).step([gradient])):
                torch.testing.assert_close(mean, gradient, msg=name)


@dataclass(frozen=True)
class Around(Wrapper):
    """A wrapper that declares no trait."""

    def __call__(self, bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
        return self.program(bucket, memory)


OWN = ("inner", "leaves_out")  # a wrapper that changes a whole bucket would change what is left out
TRAITS = [name for name, value in vars(Program).items() if isinstance(value, property) and name not in OWN]


@pytest.mark.parametrize("trait", TRAITS)
def test_a_wrapper_forwards_every_trait(trait: str) -> None:
    for value in (3, 5) if trait == "preferred_bytes" else (False, True):
        leaf = type("Leaf", (Alone,), {trait: value})()
        assert getattr(Around(Around(leaf)), trait) == value
        assert getattr(Partition([("w", Around(leaf))], default=leaf), trait) in (value, False)


def test_a_wrapper_declares_for_itself_that_it_leaves_parameters_out() -> None:
    assert BF16().leaves_out
    assert not Around(BF16()).leaves_out


def test_a_wrapper_forwards_what_depends_on_shapes_and_ranks() -> None:
    rows = AcrossNodes(Int8(), node_size=3)
    assert Around(Int8()).feeds_back(torch.Size((4, 4)))
    assert not Around(rows).feeds_back(torch.Size((4, 4)))
    with pytest.raises(OptionError, match="node_size=3 does not divide the 4 ranks"):
        Warmup(Around(rows), steps=3).check({}, 4)
    with pytest.raises(OptionError, match="node_size=3 does not divide the 2 ranks"):
        AcrossNodes(rows, node_size=3).check({}, 6)


@pytest.mark.parametrize("inner", ["none", "Warmup", "Partition by default", "Partition by rule"])
def test_error_feedback_loses_nothing_of_what_it_accepts(inner: str) -> None:
    for name, innermost in PROGRAMS.items():
        program = innermost if inner == "none" else WRAPPERS[inner](innermost)
        if not program.tracks_error:
            with pytest.raises(OptionError, match="does not report all of it"):
                ErrorFeedback(program)
            continue
        ranks = SimulatedRanks(ErrorFeedback(program), SHAPES, 4)
        exact, applied = torch.zeros(LENGTH), torch.zeros(LENGTH)
        for step in range(12):
            gradients = list(normal(step, 4, LENGTH))
            exact += torch.stack(gradients).mean(0)
            applied += ranks.step(gradients)[0].mean
        waiting = torch.stack([ranks.kept(rank, RESIDUAL) for rank in range(4)]).mean(0)
        assert (exact - applied - waiting).norm() <= 1e-5 * exact.norm(), name


@pytest.mark.parametrize(
    "program",
    [
        BF16(),
        FP16(),
        Warmup(BF16(), steps=3),
        Warmup(PowerSGD(), steps=3),
        Partition([("w", Int8())]),
        Partition([], default=PowerSGD()),
    ],
    ids=str,
)
def test_error_feedback_refuses_what_cannot_report_its_error(program: Program) -> None:
    with pytest.raises(OptionError, match=r"Warmup\(ErrorFeedback.*TwoShot\(Cast\(dtype\)\)"):
        ErrorFeedback(program)


def test_error_feedback_of_a_bf16_exchange_loses_nothing_for_as_many_bytes() -> None:
    check_program(ErrorFeedback(TwoShot(Cast(torch.bfloat16))), loses=1e-6)


@dataclass(frozen=True, repr=False)
class Own(TwoShot):
    """A subclass that neither adds residuals itself nor sends exact parameters, and keeps a count."""

    def __call__(self, bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
        for name in bucket.names:
            memory.slot(name, "count", lambda: torch.zeros(1)).add_(1)
        return (yield from super().__call__(replace(bucket, exact=frozenset(), residuals=None), memory))


def test_a_subclass_inherits_no_promise_that_its_methods_may_break() -> None:
    program = Own(Quantize(bits=4))
    assert not program.carries_exact
    check_program(ErrorFeedback(program), steps=50)


class Counts:
    """A mixin that is no program, with code that runs before a program's."""

    def __call__(self, bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
        for name in bucket.names:
            memory.slot(name, "count", lambda: torch.zeros(1)).add_(1)
        program: Any = super()
        outcome: Outcome = yield from program.__call__(
            replace(bucket, exact=frozenset(), residuals=None), memory
        )
        return outcome


@dataclass(frozen=True, repr=False)
class Mixed(Counts, TwoShot):
    """A subclass without code of its own, whose mixin has some."""


@dataclass(frozen=True, repr=False)
class Free(Program):
    """A program without promises."""

    def __call__(self, bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
        return (yield from Exact()(bucket, memory))


@dataclass(frozen=True, repr=False)
class Both(Free, Exact):
    """A program whose first base makes no promise, and whose second one does."""


def test_a_mixin_or_another_base_before_a_program_keeps_none_of_its_promises() -> None:
    mixed = Mixed(Quantize(bits=4))
    assert (mixed.stateless, mixed.carries_exact, mixed.folds_residuals) == (False, False, False)
    assert not mixed.feeds_back(torch.Size((2, 3)))
    check_program(ErrorFeedback(mixed), steps=50)
    both = Both()
    assert (both.stateless, both.ignores_order, both.takes_sparse) == (False, False, False)


@dataclass(frozen=True, repr=False)
class Larger(TwoShot):
    """A subclass that changes an option, and no method."""

    preferred_bytes = 1 << 22


def test_a_subclass_that_overrides_no_method_keeps_the_promises() -> None:
    program = Larger(Quantize(bits=4))
    assert (program.stateless, program.carries_exact, program.folds_residuals) == (True, True, True)


def test_a_program_that_says_it_is_stateless_and_keeps_a_slot_raises() -> None:
    memory = NoMemory()
    for view in (memory, memory.scoped("slice 0 of 2")):
        with pytest.raises(ProgramError, match="keeps 'count' of w, but its class sets stateless = True"):
            view.put("w", "count", torch.ones(1))
    assert memory.state_dict() == {}
