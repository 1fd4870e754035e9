"""Collectives as descriptions: the bytes that each sends, and invalid tensors."""

import pytest
import torch

from thinwire import AllGather, AllReduce, AllToAll, Broadcast, Exchange, ProgramError, Reduce, ReduceScatter
from thinwire.engine.ops import Collective


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_bytes_add_up_over_the_ranks(size: int) -> None:
    """What all ranks together must move, from the collective's definition."""
    tensor = torch.zeros(size, 10)
    nbytes = tensor.numel() * 4

    def total(op: Collective) -> int:
        return sum(op.bytes_sent(rank, size) for rank in range(size))

    assert total(AllReduce(tensor)) == 2 * (size - 1) * nbytes
    assert total(AllGather(tensor)) == size * (size - 1) * nbytes
    assert total(AllToAll(tensor)) == (size - 1) * nbytes
    assert total(ReduceScatter(tensor)) == (size - 1) * nbytes
    pieces = tuple(range(size))
    own = Exchange(torch.zeros(sum(pieces)), sends=pieces, receives=(0,) * size)
    assert total(own) == (size - 1) * sum(pieces) * 4
    for root in range(size):
        assert total(Broadcast(tensor, src=root)) == (size - 1) * nbytes
        assert total(Reduce(tensor, dst=root)) == (size - 1) * nbytes + nbytes * (size - 1) // size


def test_what_no_backend_carries_is_refused() -> None:
    with pytest.raises(ProgramError, match=r"AllReduce of 3x2 float32 has strides .* contiguous"):
        AllReduce(torch.zeros(2, 3).t()).check(2)
    with pytest.raises(ProgramError, match="one row per rank, 3 here"):
        AllToAll(torch.zeros(4, 2)).check(3)
    with pytest.raises(ProgramError, match="one row per rank"):
        ReduceScatter(torch.zeros(())).check(1)
    with pytest.raises(ProgramError, match="dst=2 is not a rank of this group: it has 0 to 1"):
        Reduce(torch.zeros(2), dst=2).check(2)
    with pytest.raises(ProgramError, match="src=-1"):
        Broadcast(torch.zeros(2), src=-1).check(2)
