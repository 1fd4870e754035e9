"""TwoShot by parameter: exact parameters beside compressed ones, blocks of their own, folded residuals."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.simulated import CODECS, bytes_of, compressing_alone, normal, stepping_in
from thinwire import (
    AcrossNodes,
    Bucket,
    Codec,
    Collectives,
    ErrorFeedback,
    Exact,
    Float8,
    Int8,
    Memory,
    Outcome,
    Partition,
    Program,
    Quantize,
    SignBits,
    TwoShot,
    Warmup,
)
from thinwire.codecs.rounding import sum_pairs
from thinwire.kernels.library import switched_off
from thinwire.programs.division import Division
from thinwire.programs.memory import RESIDUAL
from thinwire.testing import SimulatedRanks

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
shapes = st.lists(
    st.sampled_from([(), (1,), (7,), (8,), (0,), (3, 5), (16,), (4, 9)]), min_size=1, max_size=6
)


@dataclass(frozen=True)
class Plain(Program):
    """A program that only reports its error, as third-party ones do."""

    program: Program

    def __call__(self, bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
        return (yield from self.program(bucket, memory))


def named(forms: list[tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {f"p{number}": form for number, form in enumerate(forms)}


def mean_in_order(gradients: list[torch.Tensor]) -> torch.Tensor:
    wide = torch.promote_types(gradients[0].dtype, torch.float32)
    return sum_pairs(torch.stack(gradients).to(wide) * (1 / len(gradients))).to(gradients[0].dtype)


@given(st.sampled_from(CODECS), shapes, st.integers(1, 5), st.sampled_from(DTYPES), st.data())
def test_exact_parameters_travel_as_they_are_and_nothing_is_lost(
    codec: Codec, forms: list[tuple[int, ...]], count: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    named_shapes = named(forms)
    exact = data.draw(st.sets(st.sampled_from(list(named_shapes))))
    ranks = SimulatedRanks(TwoShot(codec), named_shapes, count, exact)
    length = sum(torch.Size(form).numel() for form in forms)
    gradients = [one.to(dtype) for one in normal(data.draw(st.integers(0, 99)), count, length)]
    outcomes = ranks.step(gradients, track_error=True)
    lengths = [torch.Size(form).numel() for form in forms]
    wanted = dict(zip(named_shapes, mean_in_order(gradients).split(lengths), strict=True))
    for outcome in outcomes:
        assert torch.equal(outcome.mean, outcomes[0].mean)
        assert outcome.error is not None
        for name, mean, error in zip(
            named_shapes, outcome.mean.split(lengths), outcome.error.split(lengths), strict=True
        ):
            if name in exact:
                assert torch.equal(mean, wanted[name])
                assert not error.any()
    errors = torch.stack([outcome.error for outcome in outcomes if outcome.error is not None])
    accounted = outcomes[0].mean.double() + errors.double().mean(0)
    close = 1e-5 if dtype.itemsize >= 4 else 0.1
    torch.testing.assert_close(
        accounted, torch.stack(gradients).double().mean(0), atol=close, rtol=close, check_dtype=False
    )


@given(st.sampled_from(CODECS), shapes, st.integers(2, 5), st.sampled_from([1.0, 0.5]), st.integers(0, 99))
def test_folded_residuals_are_those_that_a_program_reports(
    codec: Codec, forms: list[tuple[int, ...]], count: int, keep: float, seed: int
) -> None:
    length = sum(torch.Size(form).numel() for form in forms)
    folded = SimulatedRanks(ErrorFeedback(TwoShot(codec), keep=keep), named(forms), count)
    plain = SimulatedRanks(ErrorFeedback(Plain(TwoShot(codec)), keep=keep), named(forms), count)
    for step in range(3):
        gradients = list(normal(1000 * seed + step, count, length))
        one, other = folded.step(gradients), plain.step(gradients)
        assert torch.equal(one[0].mean, other[0].mean)
    for rank in range(count):
        torch.testing.assert_close(folded.kept(rank, RESIDUAL), plain.kept(rank, RESIDUAL), rtol=0, atol=1e-6)


@given(
    st.sampled_from([Quantize(), Quantize(bits=4, block=10), SignBits(block=24), Float8(block=9)]),
    st.lists(st.sampled_from([(), (7,), (0,), (3, 5), (24,), (40, 9), (301,)]), min_size=1, max_size=6),
    st.integers(1, 5),
    st.sampled_from([1.0, 0.7]),
    st.data(),
)
def test_ranks_with_and_without_native_code_get_the_same_bits(
    codec: Codec, forms: list[tuple[int, ...]], count: int, keep: float, data: st.DataObject
) -> None:
    named_shapes, program = named(forms), ErrorFeedback(TwoShot(codec), keep=keep)
    exact = data.draw(st.sets(st.sampled_from(list(named_shapes))))
    off = data.draw(st.sets(st.integers(0, count - 1)))
    length, seed = sum(torch.Size(form).numel() for form in forms), data.draw(st.integers(0, 99))
    native = SimulatedRanks(program, named_shapes, count, exact)
    mixed = SimulatedRanks(stepping_in(switched_off, program, off), named_shapes, count, exact)
    for step in range(3):
        gradients = list(10.0**step * normal(100 * seed + step, count, length))
        for one, other in zip(native.step(gradients), mixed.step(gradients), strict=True):
            assert torch.equal(one.mean, other.mean)
    for rank in range(count):
        kept = mixed.memories[rank].state_dict()
        for name, slots in native.memories[rank].state_dict().items():
            assert torch.equal(slots[RESIDUAL], kept[name][RESIDUAL])


@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_parameters_have_no_residual(dtype: torch.dtype) -> None:
    ranks = SimulatedRanks(Int8(), {"w": (6, 7), "b": (5,)}, 3, exact={"b"})
    for step in range(3):
        gradients = [one.to(dtype) for one in normal(step, 3, 47)]
        for outcome in ranks.step(gradients):
            assert torch.equal(outcome.mean[42:], mean_in_order(gradients)[42:])
    assert set(ranks.memories[0].state_dict()) == {"w"}
    assert ranks.kept(0, RESIDUAL).dtype == torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "program",
    [
        Int8(),
        ErrorFeedback(TwoShot(SignBits()), keep=0.5),
        Warmup(Int8(), steps=1),
        ErrorFeedback(Warmup(TwoShot(Quantize()), steps=1)),
        ErrorFeedback(Partition([("b", Exact())], default=TwoShot(Quantize()))),
        AcrossNodes(Int8(), node_size=2),
    ],
    ids=str,
)
def test_exact_parameters_are_sent_in_the_gradients_dtype(program: Any, dtype: torch.dtype) -> None:
    forms, exact = {"w": (64, 64), "b": (9000,)}, {"b"} if getattr(program, "carries_exact", False) else set()
    plain = bytes_of(Exact(), 4, forms, dtype=dtype)
    assert bytes_of(program, 4, forms, exact, dtype) <= 1.01 * plain
    ranks = SimulatedRanks(program, forms, 4, exact)
    for step in range(3):
        gradients = [one.to(dtype) for one in normal(step, 4, 4096 + 9000)]
        means = [outcome.mean for outcome in ranks.step(gradients)]
        assert all(torch.equal(mean, means[0]) for mean in means)
        expected = torch.stack(gradients).double().mean(0).to(dtype)[4096:]
        torch.testing.assert_close(means[0][4096:], expected, rtol=2**-7, atol=0.02)


@pytest.mark.parametrize(
    "codec", [Quantize(block=16), Quantize(bits=4, block=16), SignBits(block=16)], ids=str
)
def test_the_encoding_of_a_parameter_does_not_depend_on_its_neighbours(codec: Codec) -> None:
    gradient, program = normal(0, 100), compressing_alone(TwoShot(codec))
    alone = SimulatedRanks(program, {"w": (100,)}, 1).step([gradient])[0].mean
    beside = torch.cat([1e6 * normal(1, 13), gradient, 1e6 * normal(2, 40)])
    among = SimulatedRanks(program, {"a": (13,), "w": (100,), "z": (40,)}, 1).step([beside])[0].mean
    assert torch.equal(among[13:113], alone)


@pytest.mark.parametrize(
    "program", [Int8(), Warmup(Int8(), steps=1), AcrossNodes(Int8(), node_size=2)], ids=str
)
def test_wrappers_pass_exact_parameters_on(program: Any) -> None:
    assert program.carries_exact
    ranks = SimulatedRanks(program, {"w": (40, 7), "b": (33,)}, 4, exact={"b"})
    for step in range(3):
        gradients = list(normal(step, 4, 313))
        outcomes = ranks.step(gradients)
        for outcome in outcomes:
            assert torch.equal(outcome.mean, outcomes[0].mean)
        torch.testing.assert_close(outcomes[0].mean[280:], torch.stack(gradients).mean(0)[280:])


def test_a_wrapper_of_a_program_that_cannot_carry_them_does_not_claim_to() -> None:
    program: Any = ErrorFeedback(Plain(TwoShot(Quantize())))
    assert not program.carries_exact


@pytest.mark.parametrize(
    "program", [TwoShot(Quantize()), Int8(), ErrorFeedback(TwoShot(SignBits()))], ids=str
)
def test_a_bucket_without_numbers_needs_no_exchange(program: Any) -> None:
    ranks = SimulatedRanks(program, {"w": (0, 4)}, 3)
    for _ in range(2):
        assert [outcome.mean.shape for outcome in ranks.step([torch.zeros(0)] * 3)] == [torch.Size((0,))] * 3


@pytest.mark.parametrize("place", [0, 200, 299, 300, 309])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("codec", [Quantize(), Quantize(bits=4), Quantize(affine=True), SignBits()], ids=str)
def test_the_outcome_tells_whether_it_is_finite(codec: Codec, bad: float, place: int) -> None:
    ranks = SimulatedRanks(TwoShot(codec), {"w": (300,), "b": (10,)}, 3, exact={"b"})
    gradients = list(normal(0, 3, 310))
    for outcome in ranks.step(gradients):
        assert ranks.holds(outcome)
    gradients[1][place] = bad
    for outcome in ranks.step(gradients):
        assert not ranks.holds(outcome)
        assert not outcome.mean.isfinite().all()


def test_the_largest_finite_mean_is_told_by_what_is_decoded() -> None:
    """A scale can be finite where the number that it stands for is not."""
    most = torch.finfo(torch.float32).max
    for codec in (Quantize(), Quantize(bits=4), SignBits()):
        for factor in (1.0, 1 - 1e-7, 0.6, 0.4):
            ranks = SimulatedRanks(compressing_alone(TwoShot(codec)), {"w": (8,)}, 1)
            (outcome,) = ranks.step([torch.full((8,), most * factor)])
            assert outcome.finite is not None
            assert bool(outcome.finite) == bool(outcome.mean.isfinite().all())


def test_exact_parameters_cost_their_own_bytes_and_padding_little() -> None:
    forms = {"w": (500, 500), "b": (500,), "v": (300, 333), "n": (300,)}
    world, coded, spared = 4, 500 * 500 + 300 * 333, 800
    sent = bytes_of(Int8(), world, forms, exact={"b", "n"})
    expected = 2 * (world - 1) / world * (coded * Quantize().wire_bits / 8 + 4 * spared)
    assert expected <= sent <= 1.01 * expected


@given(shapes, st.integers(1, 6), st.integers(1, 9), st.data())
def test_a_division_covers_every_number_once(
    forms: list[tuple[int, ...]], world: int, block: int, data: st.DataObject
) -> None:
    sizes = [torch.Size(form) for form in forms]
    exact = frozenset(data.draw(st.sets(st.sampled_from(list(named(forms))))))
    flat = torch.zeros(sum(size.numel() for size in sizes))
    bucket = Bucket(0, flat, tuple(named(forms)), tuple(sizes), 0, world, 0, exact=exact)
    division = Division.of(bucket, block)
    seen = [torch.zeros(size.numel()) for size in sizes]
    for shares, spared in ((division.coded, False), (division.exact, True)):
        assert len(shares) == world
        for piece in (piece for share in shares for piece in share):
            assert (bucket.names[piece.parameter] in exact) is spared
            assert spared or piece.start % block == 0
            seen[piece.parameter][piece.start : piece.stop] += 1
    assert all((one == 1).all() for one in seen)
    counts = [sum(-(-piece.length // block) for piece in share) for share in division.coded]
    assert max(counts) == -(-sum(counts) // world), "the largest share decides how many bytes are sent"
