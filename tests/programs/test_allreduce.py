"""Programs of one all-reduce: casts around parameters that are averaged elsewhere."""

import pytest
import torch

from thinwire import BF16, FP16, Bucket, Memory, Program
from thinwire.engine.simulate import simulate

SHAPES = {"a": (3,), "w": (4, 5), "b": (5,), "v": (2, 3), "u": (7,), "n": (1,)}


def bucket(rank: int, left_out: str, dtype: torch.dtype = torch.float32) -> Bucket:
    shapes = tuple(map(torch.Size, SHAPES.values()))
    count = sum(shape.numel() for shape in shapes)
    numbers = torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype)
    return Bucket(0, numbers, tuple(SHAPES), shapes, rank, 3, 0, left_out=frozenset(left_out))


@pytest.mark.parametrize("left_out", ["", "b", "an", "abun", "w", "awbvun"])
@pytest.mark.parametrize("program", [BF16(), FP16()])
def test_left_out_parameters_keep_their_numbers_and_the_others_their_means(
    program: Program, left_out: str
) -> None:
    whole = [bucket(rank, "") for rank in range(3)]
    means = simulate([[program(each, Memory())] for each in whole]).results[0][0].mean
    given = [bucket(rank, left_out) for rank in range(3)]
    found = simulate([[program(each, Memory())] for each in given]).results
    for rank, (outcome,) in enumerate(found):
        assert outcome.mean.data_ptr() == given[rank].buffer.data_ptr(), "in place"
        own, wanted = bucket(rank, left_out).views(), given[rank].views()
        averaged = dict(
            zip(SHAPES, means.split([torch.Size(s).numel() for s in SHAPES.values()]), strict=True)
        )
        for name, view in wanted.items():
            expected = own[name] if name in left_out else averaged[name].view(view.shape)
            assert torch.equal(view, expected), name


def test_segments_join_neighbours() -> None:
    lengths = [len(segment) for segment in bucket(0, "bn").segments()]
    assert lengths == [23, 13]
    assert [len(segment) for segment in bucket(0, "").segments()] == [42]


def test_complex_numbers_are_pairs() -> None:
    shapes = (torch.Size((2,)), torch.Size((1,)), torch.Size((3,)))
    numbers = torch.ones(6, dtype=torch.complex64)
    given = Bucket(0, numbers, ("a", "b", "c"), shapes, 0, 2, 0, left_out=frozenset("b"))
    assert [len(segment) for segment in given.segments()] == [4, 6]
