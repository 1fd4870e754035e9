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
from thinwire.engine.pack import Layout
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


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec.strided], ids=repr)
@given(seed=st.integers(0, 2**31), exponent=st.integers(-44, 37), zeros=st.booleans())
def test_rows_have_the_bits_of_blocks(codec: BlockCodec, seed: int, exponent: int, zeros: bool) -> None:
    x = torch.randn(3, 4, codec.block, generator=torch.Generator().manual_seed(seed)) * 10.0**exponent
    x[1, 2] = 0.0
    x[:, 1, 3] = -0.0 if zeros else 0.0
    ragged = [(2, 3, 5)]
    x[2, 3, 5:] = 0.0
    wanted = tuple(part.clone() for part in codec.encode_blocks(x.flatten(0, 1)))
    dtypes = codec.part_dtypes or tuple(part.dtype for part in wanted)
    wanted = tuple(part.to(dtype) for part, dtype in zip(wanted, dtypes, strict=True))
    codec.correct_padded(tuple(part[-1] for part in wanted), 5, codec.block)
    # The parts of a row of bytes follow each other, so those of several rows are not contiguous.
    layout = Layout(dtypes, tuple(torch.Size((4, *part.shape[1:])) for part in wanted), x.device)
    parts = layout.read(torch.empty(3, layout.nbytes, dtype=torch.uint8))
    constants = codec.constants(x.device)
    before = x.clone()
    decoded = codec.encode_rows(x, parts, constants, ragged, decoded=True)
    assert torch.equal(x, before)
    for part, new in zip(parts, wanted, strict=True):
        assert torch.equal(part.flatten(0, 1), new)
    read = torch.empty_like(x.flatten(0, 1))
    codec.decode_blocks(wanted, read)
    for found in (decoded, codec.decode_rows(parts, constants, torch.empty_like(x))):
        assert found is not None
        assert torch.equal(found.flatten(0, 1).view(torch.int32), read.view(torch.int32))
    assert codec.encode_rows(x, parts, constants, ragged, decoded=False) is None


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("world", [2, 7])
def test_uninitialised_padding_is_not_taken_for_an_overflow(codec: BlockCodec, world: int) -> None:
    program = ErrorFeedback(TwoShot(codec))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(twoshot, "bucket_coder_of", as_matrix)
        torch.use_deterministic_algorithms(True)  # `torch.empty` is filled with NaN
        try:
            found, ranks = steps(program, world, set(), torch.float32, track=False)
        finally:
            torch.use_deterministic_algorithms(False)
    for outcome in chain(*found):
        assert outcome.mean.isfinite().all()
        assert outcome.finite is None or bool(outcome.finite)
    for memory in ranks.memories:
        for slots in memory.state_dict().values():
            assert slots[RESIDUAL].isfinite().all()
