"""The reduce-scatter that TwoShot, ZeRO and FSDP share, on simulated ranks."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.simulated import normal
from thinwire import AllToAll, Cast, Codec, Exchange, LargestEntries, Quantize, RandomEntries
from thinwire.engine.simulate import simulate
from thinwire.programs.coding import seeded
from thinwire.programs.reduce_scatter import reduce_scatter

CODECS = [Quantize(bits=8), Quantize(bits=4, stochastic=True), Cast(torch.bfloat16), RandomEntries(ratio=0.3)]


def reduced(codec: Codec, lengths: list[int], **options: Any) -> tuple[list[torch.Tensor], Any]:
    world = len(lengths)
    pieces = [list(normal(rank, sum(lengths)).split(lengths)) for rank in range(world)]
    codecs = seeded(codec, world, 7)
    run = simulate([[reduce_scatter(codecs, rank, pieces[rank], **options)] for rank in range(world)])
    return [results[0] for results in run.results], pieces


@pytest.mark.parametrize("codec", [*CODECS, LargestEntries(ratio=0.2, block=64)])
@given(lengths=st.lists(st.integers(0, 300), min_size=1, max_size=4))
def test_owners_add_what_the_others_encoded_in_the_order_of_ranks(codec: Codec, lengths: list[int]) -> None:
    totals, pieces = reduced(codec, lengths)
    codecs = seeded(codec, len(lengths), 7)
    for owner, total in enumerate(totals):
        expected = pieces[owner][owner].clone()
        for sender in range(len(lengths)):
            if sender != owner and lengths[owner]:
                codecs[sender].add(codecs[sender].encode(pieces[sender][owner]), expected)
        assert torch.equal(total, expected)


@pytest.mark.parametrize("codec", CODECS)
def test_tracked_errors_are_what_an_encoding_misses(codec: Codec) -> None:
    lengths = [70, 0, 200]
    before = [normal(rank, sum(lengths)).split(lengths) for rank in range(3)]
    totals, errors = reduced(codec, lengths, track_error=True)
    for owner in range(3):
        sent = sum(before[rank][owner] - errors[rank][owner] for rank in range(3) if rank != owner)
        torch.testing.assert_close(totals[owner], before[owner][owner] + sent)
        assert torch.equal(errors[owner][owner], before[owner][owner])


@pytest.mark.parametrize(("lengths", "kind"), [([64, 64], AllToAll), ([64, 32], Exchange)])
def test_shares_of_one_length_go_in_rows(lengths: list[int], kind: type) -> None:
    pieces = list(torch.ones(sum(lengths)).split(lengths))
    assert isinstance(next(reduce_scatter([Quantize(bits=8)] * 2, 0, pieces)), kind)
