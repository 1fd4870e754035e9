"""Programs made of codecs, on simulated ranks: the same everywhere, exact where they can be, nothing lost."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import thinwire
from tests.simulated import CODECS, compressing_alone, normal, sent_by
from thinwire import (
    AcrossNodes,
    Bucket,
    Collectives,
    ErrorFeedback,
    Exact,
    Gathered,
    Int2,
    Int4,
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
    RandomK,
    Reduced,
    Sign,
    SignBits,
    TopK,
    TwoMagnitudes,
    TwoShot,
    Warmup,
)
from thinwire.programs.memory import RESIDUAL
from thinwire.programs.wrapper import as_program
from thinwire.testing import SimulatedRanks, check_program

untyped: Any = thinwire
PRESETS = [
    Int8(),
    Int8(stochastic=True),
    Int8(error_feedback=False),
    Int4(),
    Int2(),
    thinwire.FP8(),
    thinwire.FP8("e5m2"),
    Sign(),
    TopK(0.1),
    TopK(values="bf16", block=256),
    RandomK(0.25),
    ErrorFeedback(TwoShot(LargestEntries(ratio=0.1, block=64))),
    Warmup(Int8(), steps=2),
    Partition([("bias", Exact()), ("w*", Int4())], default=TopK()),
    ErrorFeedback(Partition([("bias", Exact())], default=TwoShot(SignBits()))),
    AcrossNodes(Int8(), node_size=2),
    AcrossNodes(PowerSGD(rank=2, min_compression=1, warmup=0), node_size=2),
]


@pytest.mark.parametrize("program", PRESETS, ids=str)
def test_every_program_passes_the_battery(program: Program) -> None:
    check_program(program, tolerance=0.7 if program == Sign() else 0.3, steps=100)


@given(
    st.sampled_from(CODECS),
    st.sampled_from([TwoShot, Gathered]),
    st.integers(1, 7),
    st.integers(0, 90),
    st.integers(0, 99),
)
def test_any_number_of_ranks_agrees_and_accounts_for_everything(
    codec: Any, exchange: Callable[[Any], Program], count: int, length: int, seed: int
) -> None:
    ranks = SimulatedRanks(exchange(codec), {"p": (length,)}, count)
    gradients = list(normal(seed, count, length))
    outcomes = ranks.step(gradients, track_error=True)
    errors = torch.stack([outcome.error for outcome in outcomes if outcome.error is not None])
    assert errors.shape == (count, length)
    for outcome in outcomes:
        assert torch.equal(outcome.mean, outcomes[0].mean)
    accounted = outcomes[0].mean + errors.mean(0)
    torch.testing.assert_close(accounted, torch.stack(gradients).mean(0), atol=1e-5, rtol=1e-5)
    untracked = ranks.step(gradients) if not hasattr(codec, "seed") else outcomes
    assert torch.equal(untracked[0].mean, outcomes[0].mean), "whether errors are tracked must not matter"


@given(st.integers(1, 7), st.integers(1, 200), st.sampled_from([4, 8]), st.integers(0, 99))
def test_the_mean_is_exact_for_what_the_codec_can_represent(
    count: int, length: int, bits: int, seed: int
) -> None:
    """Whole numbers in a block that also holds the largest code: its scale is 1."""
    most = 2 ** (bits - 1) - 1
    x = torch.randint(-most, most + 1, (length,), generator=torch.Generator().manual_seed(seed)).float()
    x[::8] = most
    program = TwoShot(Quantize(bits=bits, block=8))
    for outcome in SimulatedRanks(program, {"p": (length,)}, count).step([x.clone() for _ in range(count)]):
        assert torch.equal(outcome.mean, x)


def test_sparse_entries_of_different_ranks_add_up_where_they_meet() -> None:
    mine, yours = torch.zeros(100), torch.zeros(100)
    mine[3], mine[50], yours[3], yours[70] = 4.0, 2.0, 6.0, -8.0
    program = Gathered(LargestEntries(ratio=0.02, block=100))
    mean = SimulatedRanks(program, {"p": (100,)}, 2).step([mine, yours])[0].mean
    assert {int(place): float(mean[place]) for place in mean.nonzero()} == {3: 5.0, 50: 1.0, 70: -4.0}


@given(
    st.sampled_from([Int8(), Int4(), Int2(), Sign(keep=1.0), TopK(0.1), RandomK(0.2), thinwire.FP8()]),
    st.integers(2, 5),
    st.integers(0, 99),
)
def test_feedback_delays_but_never_loses(program: Program, count: int, seed: int) -> None:
    ranks = SimulatedRanks(program, {"a": (7, 5), "b": (13,)}, count)
    given_sum, applied = torch.zeros(48), torch.zeros(48)
    for step in range(12):
        gradients = list(normal(1000 * seed + step, count, 48))
        given_sum += torch.stack(gradients).mean(0)
        applied += ranks.step(gradients)[0].mean
    residual = torch.stack([ranks.kept(rank, RESIDUAL) for rank in range(count)]).mean(0)
    torch.testing.assert_close(applied + residual, given_sum, atol=1e-4, rtol=1e-4)


def test_half_precision_gradients_have_a_float32_residual() -> None:
    ranks = SimulatedRanks(Int4(), {"p": (64,)}, 2)
    outcome = ranks.step([normal(0, 64).bfloat16(), normal(1, 64).bfloat16()])[0]
    assert outcome.mean.dtype == torch.bfloat16
    assert ranks.kept(0, RESIDUAL).dtype == torch.float32


def test_the_residual_outlives_a_change_of_program() -> None:
    ranks = SimulatedRanks(Int4(), {"p": (64,)}, 2)
    ranks.step(list(normal(0, 2, 64)))
    kept = torch.stack([ranks.kept(rank, RESIDUAL) for rank in range(2)])
    ranks.program = Int8()
    mean = ranks.step([torch.zeros(64), torch.zeros(64)])[0].mean
    torch.testing.assert_close(mean, kept.mean(0), atol=0.01, rtol=0.02)


@pytest.mark.parametrize(("world", "most"), [(4, 0.55), (8, 0.3)])
@pytest.mark.parametrize("program", [Int8(), TwoShot(Quantize(affine=True)), thinwire.FP8()], ids=str)
def test_bytes_do_not_grow_with_the_ranks_as_those_of_torchs_hooks_do(
    program: Program, world: int, most: float
) -> None:
    length = 100_000
    torchs = (length + 8) * (world - 1)  # an all-gather of bytes, and of a scale and a zero point
    assert sent_by(program, world, length) <= most * torchs
    assert sent_by(program, 16, length) <= 2.1 * length


def test_bytes_are_what_the_codec_promises() -> None:
    length = 1 << 16
    for program, codec in [
        (Int8(), Quantize()),
        (Int4(), Quantize(bits=4, block=64)),
        (Int2(), TwoMagnitudes()),
        (Sign(), SignBits(block=128)),
    ]:
        assert sent_by(program, 4, length) == pytest.approx(1.5 * length * codec.wire_bits / 8, rel=0.001)
    sparse = LargestEntries(ratio=1 / 16, block=4096, values="int2")
    for ranks, encodings in (
        (2, 1.0),
        (4, 1.5),
        (8, 1.75),
    ):  # by Gathered, and from three ranks on by TwoShot
        sent = encodings * length * sparse.wire_bits / 8
        assert sent_by(TopK(), ranks, length) == pytest.approx(sent, rel=0.01)
        assert sent_by(Gathered(sparse), ranks, length) == pytest.approx(sent * max(1, ranks / 2), rel=0.01)
    assert sent_by(RandomK(0.1), 4, length) == pytest.approx(1.5 * length * 3.2 / 8, rel=0.01)


class Silent:
    def __call__(self, bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
        yield from ()
        return Outcome(bucket.buffer)

    def __repr__(self) -> str:
        return "Silent()"


def test_feedback_refuses_programs_that_do_not_say_what_they_missed() -> None:
    with pytest.raises(ProgramError, match=r"Silent\(\) returned no error to feed back"):
        SimulatedRanks(ErrorFeedback(as_program(Silent())), {"p": (4,)}, 1).step([torch.ones(4)])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: untyped.TopK(ratio=2), "ratio=2 must be above 0"),
        (lambda: untyped.Int8(block=-1), "block=-1"),
        (lambda: untyped.FP8("e2m1"), "variant='e2m1'"),
        (lambda: untyped.Sign(keep=0), "keep=0 must be above 0"),
        (lambda: untyped.Int2(block=6), "block=6 .* a multiple of 4"),
        (lambda: untyped.Reduced(Quantize()), r"codec=Quantize\(.* cannot be summed: use TwoShot"),
        (
            lambda: untyped.TwoShot(Int8()),
            r"codec=Int8\(\) is not a codec: .* Int8\(\) and other presets are complete",
        ),
        (lambda: untyped.Gathered("int8"), "codec='int8' is not a codec"),
        (lambda: untyped.Reduced(Quantize), "is not a codec: pass an instance"),
        (
            lambda: untyped.ErrorFeedback(Quantize()),
            r"program=Quantize\(.* is not a program: .* TwoShot\(codec\)",
        ),
        (lambda: untyped.ErrorFeedback(Int8()), "feeds back its own error already"),
        (lambda: untyped.ErrorFeedback(PowerSGD()), "feeds back its own error already"),
        (lambda: untyped.ErrorFeedback(AcrossNodes(Exact(), node_size=1)), r"AcrossNodes\(ErrorFeedback"),
        (lambda: untyped.ErrorFeedback(Exact(), keep="0.5"), "keep='0.5' must be"),
        (lambda: untyped.Warmup(Exact, steps=1), "is not a program: pass an instance"),
        (lambda: untyped.AcrossNodes(None, node_size=1), "program=None is not a program"),
        (lambda: untyped.Partition([("*", Exact)]), r"the program for '\*'=<class .* is not a program"),
        (lambda: untyped.Partition([], default="x"), "default='x' is not a program"),
        (lambda: untyped.Partition(None), "rules=None must be pairs"),
        (lambda: untyped.Int8(error_feedback="no"), "error_feedback='no' must be True or False"),
        (lambda: untyped.Int8(stochastic="no"), "stochastic='no' must be True or False"),
    ],
)
def test_wrong_options_are_refused(make: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        make()


def test_ranks_round_stochastically_each_in_its_own_way() -> None:
    """Otherwise the errors of equal gradients would not average out."""
    program = compressing_alone(Gathered(Quantize(bits=4, stochastic=True)))
    x = normal(0, 4000)
    shared = SimulatedRanks(program, {"p": (4000,)}, 1).step([x])[0].mean
    averaged = SimulatedRanks(program, {"p": (4000,)}, 4).step([x] * 4)[0].mean
    assert (averaged - x).norm() < 0.6 * (shared - x).norm()


@pytest.mark.parametrize("program", [RandomK(0.25, error_feedback=False), TwoShot(RandomEntries(ratio=0.25))])
def test_random_places_differ_from_step_to_step_and_from_bucket_to_bucket(program: Program) -> None:
    def places(ranks: SimulatedRanks) -> list[int]:
        found: list[int] = ranks.step([torch.ones(64)] * 2)[0].mean.nonzero().flatten().tolist()
        return found

    ranks, other = (SimulatedRanks(program, {name: (64,)}, 2) for name in "ab")
    first, second = places(ranks), places(ranks)
    assert first != second
    assert first != places(other)


def test_only_the_kept_share_of_the_residual_is_fed_back() -> None:
    program = compressing_alone(ErrorFeedback(Gathered(SignBits(block=8)), keep=0.25))
    ranks = SimulatedRanks(program, {"p": (8,)}, 1)
    x = torch.tensor([1.0, 1, 1, 1, 1, 1, 1, 9])
    ranks.step([x])
    torch.testing.assert_close(ranks.kept(0, RESIDUAL), x - 2)
    mean = ranks.step([torch.zeros(8)])[0].mean
    torch.testing.assert_close(mean.abs(), torch.full((8,), (7 * 1 + 7) / 8 * 0.25))


@pytest.mark.parametrize("program", [Sign(keep=1.0), ErrorFeedback(Gathered(SignBits(block=128)))])
@pytest.mark.parametrize("length", [10, 257])
def test_the_numbers_at_the_end_of_a_bucket_arrive_as_the_others_do(program: Program, length: int) -> None:
    ranks = SimulatedRanks(program, {"p": (length,)}, 4)
    for outcome in ranks.step([torch.ones(length)] * 4):
        torch.testing.assert_close(outcome.mean, torch.ones(length))


def test_sums_of_half_precision_gradients_are_taken_in_float32() -> None:
    x = torch.full((64,), 30000.0, dtype=torch.float16)
    for exchange in (TwoShot, Gathered):
        mean = SimulatedRanks(exchange(LargestEntries(ratio=1.0)), {"p": (64,)}, 4).step([x] * 4)[0].mean
        torch.testing.assert_close(mean, x, rtol=0.01, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_rounding_and_range_of_the_gradients_dtype_cost_is_fed_back(dtype: torch.dtype) -> None:
    ranks = SimulatedRanks(TopK(0.05), {"p": (64,)}, 2)
    gradient = torch.full((64,), 40000.0, dtype=dtype)
    given_sum, applied = torch.zeros(64), torch.zeros(64)
    for _ in range(20):
        mean = ranks.step([gradient, gradient])[0].mean
        assert mean.isfinite().all()
        given_sum += gradient.float()
        applied += mean.float()
    residual = (ranks.kept(0, RESIDUAL) + ranks.kept(1, RESIDUAL)) / 2
    torch.testing.assert_close(applied + residual, given_sum, rtol=1e-5, atol=1)


def test_stochastic_codes_do_not_wrap() -> None:
    """The largest of a block plus a random number below one must not round up past the last code."""
    x = torch.full((1 << 16,), 1.0)
    for bits in (4, 8):
        program = compressing_alone(TwoShot(Quantize(bits=bits, stochastic=True)))
        back = SimulatedRanks(program, {"p": x.shape}, 1).step([x])[0].mean
        assert (back > 0.5).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "around",
    [
        lambda inner: inner,
        lambda inner: AcrossNodes(inner, node_size=1),
        lambda inner: Partition([("p", inner)]),
    ],
    ids=["alone", "AcrossNodes", "Partition"],
)
def test_infinity_in_half_precision_is_not_clamped_to_a_number(
    around: Callable[[Program], Program], dtype: torch.dtype
) -> None:
    """A program around another one sees its mean alone, whose range is that of the gradients."""
    program = around(ErrorFeedback(Gathered(LargestEntries(ratio=0.1, block=64, values="fp32"))))
    ranks = SimulatedRanks(program, {"p": (64,), "q": (8,)}, 2)
    gradients = [normal(rank, 72).to(dtype) for rank in range(2)]
    gradients[1][3] = torch.inf
    assert not any(map(ranks.holds, ranks.step(gradients)))
    assert all(memory.state_dict() == {} for memory in ranks.memories)


@pytest.mark.parametrize("exchange", [Reduced, Gathered, TwoShot])
def test_a_nan_in_a_padded_block_is_noticed_whichever_position_is_drawn(exchange: Any) -> None:
    """Of a short block the drawn position may be padding, which no rank decodes."""
    for seed in range(8):
        ranks = SimulatedRanks(ErrorFeedback(exchange(RandomEntries(ratio=0.1, seed=seed))), {"p": (11,)}, 2)
        gradients = list(normal(seed, 2, 11))
        gradients[0][10] = torch.nan
        assert not any(map(ranks.holds, ranks.step(gradients)))
