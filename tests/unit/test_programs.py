import functools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from thinwire import BF16, FP16, AllReduce, Bucket, Exact, Memory, OptionError, Outcome, Program, Steps
from thinwire.programs.program import describe
from thinwire.wire.simulate import simulate

vectors: SearchStrategy[list[list[float]]] = st.integers(1, 9).flatmap(
    lambda length: st.lists(
        st.lists(st.floats(-1e4, 1e4, width=32), min_size=length, max_size=length), min_size=1, max_size=7
    )
)


def average(program: Program, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Every rank's mean of one bucket."""

    def bucket(rank: int, own: torch.Tensor) -> Bucket:
        return Bucket(0, own.clone(), ("p",), (own.shape,), rank, len(gradients), step=0)

    ranks = [[program(bucket(rank, own), Memory())] for rank, own in enumerate(gradients)]
    return [result[0].mean for result in simulate(ranks).results]


@given(vectors)
def test_exact_is_the_mean(rows: list[list[float]]) -> None:
    gradients = [torch.tensor(row) for row in rows]
    expected = torch.stack(gradients).double().mean(0).float()
    for mean in average(Exact(), gradients):
        torch.testing.assert_close(mean, expected, rtol=1e-5, atol=1e-2)


@given(vectors, st.sampled_from([(FP16(), 2**-11), (BF16(), 2**-8)]))
def test_a_cast_mean_is_within_its_rounding(rows: list[list[float]], how: tuple[Program, float]) -> None:
    program, half_ulp = how
    gradients = [torch.tensor(row) for row in rows]
    means = average(program, gradients)
    largest = torch.stack(gradients).abs().max(0).values
    error = (means[0] - torch.stack(gradients).double().mean(0)).abs()
    # One rounding of each term, and one for each addition.
    assert (error <= 2 * len(rows) * half_ulp * largest + 1e-6).all()
    assert all(torch.equal(mean, means[0]) for mean in means)


@given(st.integers(1, 7), st.floats(1, 65504, width=32))
def test_fp16_overflows_no_sooner_than_the_mean(size: int, large: float) -> None:
    """But for one rounding of each rank's part."""
    gradients = [torch.tensor([large * (1 - size * 2**-11)]) for _ in range(size)]
    assert average(FP16(), gradients)[0].isfinite().all()


def test_fp16_averages_what_fits_though_a_rank_alone_does_not() -> None:
    means = average(FP16(), [torch.tensor([70000.0]), torch.tensor([0.0])])
    assert means[0].item() == pytest.approx(35000, rel=2**-10)


@pytest.mark.parametrize("program", [Exact(), FP16(), BF16()])
def test_overflow_on_one_rank_reaches_all(program: Program) -> None:
    for mean in average(program, [torch.tensor([math.inf, 1.0]), torch.tensor([1.0, math.nan])]):
        assert not mean.isfinite().any()


@pytest.mark.parametrize("program", [Exact(), FP16(), BF16()])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]
)
def test_every_gradient_dtype(program: Program, dtype: torch.dtype) -> None:
    gradients = [torch.tensor([1, -2, 0], dtype=dtype), torch.tensor([3, 2, 0], dtype=dtype)]
    for mean in average(program, gradients):
        assert torch.equal(mean, torch.tensor([2, 0, 0], dtype=dtype))


def test_a_bucket_shows_its_parameters() -> None:
    shapes = (torch.Size((2, 2)), torch.Size(()))
    bucket = Bucket(3, torch.arange(5.0), ("w", "b"), shapes, 0, 1, step=0)
    assert bucket.views()["b"].item() == 4
    bucket.views()["w"].zero_()
    assert bucket.buffer.tolist() == [0, 0, 0, 0, 4]
    assert str(bucket) == "bucket 3 (w, b)"


def test_programs_describe_themselves_alike_on_all_ranks() -> None:
    def mine(bucket: Bucket, memory: Memory) -> Steps[Outcome]:
        mean = yield AllReduce(bucket.buffer)
        return Outcome(mean)

    assert describe(FP16()) == "Reduced(codec=Cast(dtype=torch.float16))"
    assert describe(mine).endswith("mine")
    assert describe(functools.partial(mine, memory=None)).endswith("mine, memory=None)")  # type: ignore[arg-type]

    class Opaque:
        def __call__(self, bucket: Bucket, memory: Memory) -> Steps[Outcome]:
            return mine(bucket, memory)

    with pytest.raises(OptionError, match=r"does not show its options, .* frozen dataclass"):
        describe(Opaque())
