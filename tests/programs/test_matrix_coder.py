"""A bucket encoded as one matrix has the bits of one that is encoded owner by owner."""

from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.simulated import normal
from thinwire import (
    BlockCodec,
    ErrorFeedback,
    Float8,
    LargestEntries,
    Outcome,
    Program,
    Quantize,
    SignBits,
    TwoMagnitudes,
    TwoShot,
)
from thinwire.programs import twoshot
from thinwire.programs.coding import coders_of
from thinwire.programs.division import Division
from thinwire.programs.matrix_coder import MatrixCoder
from thinwire.programs.memory import RESIDUAL
from thinwire.testing import SimulatedRanks

CODECS: list[BlockCodec] = [
    Quantize(bits=8, block=16),
    Quantize(bits=4, block=16),
    Quantize(affine=True, block=16),
    Float8(block=16),
    Float8(variant="e5m2", block=16),
    SignBits(block=16),
    TwoMagnitudes(block=16),
    LargestEntries(ratio=0.25, block=16, values="fp32"),
    LargestEntries(ratio=0.25, block=32, values="int4"),
]
SHAPES = {"a": (5, 9), "b": (16, 4), "c": (7,), "d": (3,), "e": (32, 32)}


def as_matrix(codec: Any, bucket: Any) -> MatrixCoder:
    coder = coders_of(codec, bucket)[0]
    return MatrixCoder(bucket, codec, coder.block, Division.of(bucket, coder.block))


def steps(
    program: Program, world: int, exact: set[str], dtype: torch.dtype, *, track: bool, poisoned: bool = False
) -> tuple[list[list[Outcome]], SimulatedRanks]:
    ranks = SimulatedRanks(program, SHAPES, world, exact)
    length = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    found = []
    for step in range(2):
        gradients = [one.to(dtype) for one in normal(step, world, length)]
        if poisoned and step:
            gradients[-1][17] = torch.inf
        found.append(ranks.step(gradients, track_error=track))
    return found, ranks


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@given(
    world=st.integers(1, 9),
    exact=st.sets(st.sampled_from(list(SHAPES))),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    feedback=st.sampled_from(["none", "tracked", "folded", "decayed"]),
    poisoned=st.booleans(),
)
def test_both_ways_give_the_same_bits(
    codec: BlockCodec, world: int, exact: set[str], dtype: torch.dtype, feedback: str, poisoned: bool
) -> None:
    program: Program = TwoShot(codec)
    if feedback in ("folded", "decayed"):
        program = ErrorFeedback(program, keep=1.0 if feedback == "folded" else 0.5)
    arguments = (program, world, exact, dtype)
    wanted, by_owner = steps(*arguments, track=feedback == "tracked", poisoned=poisoned)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(twoshot, "bucket_coder_of", as_matrix)
        found, at_once = steps(*arguments, track=feedback == "tracked", poisoned=poisoned)
    for before, after in zip(chain(*wanted), chain(*found), strict=True):
        assert torch.equal(before.mean.nan_to_num(7, 7, 7), after.mean.nan_to_num(7, 7, 7))
        if before.error is not None:
            assert after.error is not None
            assert torch.equal(before.error.nan_to_num(7, 7, 7), after.error.nan_to_num(7, 7, 7))
        if before.finite is not None:
            assert after.finite is not None
            assert bool(before.finite) == bool(after.finite)
    for own, other in zip(by_owner.memories, at_once.memories, strict=True):
        kept, again = own.state_dict(), other.state_dict()
        assert kept.keys() == again.keys()
        for name, slots in kept.items():
            assert torch.equal(slots[RESIDUAL], again[name][RESIDUAL])
