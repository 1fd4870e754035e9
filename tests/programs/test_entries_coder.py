"""The coders of the largest entries for accelerators have the bits of those for CPUs."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.programs.test_matrix_coder import steps
from thinwire import ErrorFeedback, Gathered, LargestEntries, Program, TwoShot
from thinwire.programs import gathered, twoshot
from thinwire.programs.coding import coders_of
from thinwire.programs.division import Division
from thinwire.programs.entries_coder import EntriesCoder, EntriesGatherCoder
from thinwire.programs.memory import RESIDUAL

CODECS = [
    LargestEntries(ratio=0.25, block=16, values="fp32"),
    LargestEntries(ratio=0.1, block=32),
    LargestEntries(ratio=0.2, block=32, values="int2"),
    LargestEntries(ratio=0.25, block=24, values="int8"),
]
FEEDBACK: dict[str, Callable[[Program], Program]] = {
    "none": lambda program: program,
    "tracked": lambda program: program,
    "folded": ErrorFeedback,
    "decayed": lambda program: ErrorFeedback(program, keep=0.5),
}


def as_entries(codec: Any, bucket: Any) -> EntriesCoder:
    coder = coders_of(codec, bucket)[0]
    return EntriesCoder(bucket, codec, coder.block, Division.of(bucket, coder.block))


def compare(program: Program, world: int, dtype: torch.dtype, feedback: str, poisoned: bool) -> None:
    program = FEEDBACK[feedback](program)
    track = feedback == "tracked"
    wanted, before = steps(program, world, set(), dtype, track=track, poisoned=poisoned)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(twoshot, "bucket_coder_of", as_entries)
        patch.setattr(gathered, "gather_coder_of", EntriesGatherCoder)
        found, after = steps(program, world, set(), dtype, track=track, poisoned=poisoned)
    for own, other in zip(chain(*wanted), chain(*found), strict=True):
        assert torch.equal(own.mean.nan_to_num(7, 7, 7), other.mean.nan_to_num(7, 7, 7))
        assert (own.error is None) == (other.error is None)
        if own.error is not None and other.error is not None:
            assert torch.equal(own.error.nan_to_num(7, 7, 7), other.error.nan_to_num(7, 7, 7))
    for own_memory, other_memory in zip(before.memories, after.memories, strict=True):
        kept, again = own_memory.state_dict(), other_memory.state_dict()
        assert kept.keys() == again.keys()
        for name, slots in kept.items():
            assert torch.equal(slots[RESIDUAL], again[name][RESIDUAL])


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@given(
    world=st.integers(2, 9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    feedback=st.sampled_from(list(FEEDBACK)),
    poisoned=st.booleans(),
)
def test_a_two_shot_has_the_bits_of_the_cpu(
    codec: LargestEntries, world: int, dtype: torch.dtype, feedback: str, poisoned: bool
) -> None:
    compare(TwoShot(codec), world, dtype, feedback, poisoned)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@given(world=st.integers(2, 5), feedback=st.sampled_from(list(FEEDBACK)), poisoned=st.booleans())
def test_a_gather_has_the_bits_of_the_cpu(
    codec: LargestEntries, world: int, feedback: str, poisoned: bool
) -> None:
    compare(Gathered(codec), world, torch.float32, feedback, poisoned)
