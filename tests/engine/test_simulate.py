"""`simulate`: every collective's result, the static order, and ranks whose collectives differ."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.models import Staged
from thinwire import (
    AllGather,
    AllReduce,
    AllToAll,
    Await,
    Broadcast,
    Bucket,
    Collectives,
    Memory,
    ProgramError,
    Reduce,
    ReduceScatter,
)
from thinwire.engine.order import order
from thinwire.engine.simulate import exchange, simulate

sizes = st.integers(1, 7)


def inputs(size: int) -> list[torch.Tensor]:
    return [torch.randn(size, 3, dtype=torch.float64) for _ in range(size)]


@given(sizes)
def test_sums(size: int) -> None:
    tensors = inputs(size)
    total = torch.stack(tensors).sum(0)
    for result in exchange([AllReduce(tensor.clone()) for tensor in tensors]):
        torch.testing.assert_close(result, total)
    for rank, row in enumerate(exchange([ReduceScatter(tensor) for tensor in tensors])):
        torch.testing.assert_close(row, total[rank])
    for root in range(size):
        results = exchange([Reduce(tensor.clone(), dst=root) for tensor in tensors])
        torch.testing.assert_close(results[root], total)


@given(sizes)
def test_moves(size: int) -> None:
    tensors = inputs(size)
    for gathered in exchange([AllGather(tensor) for tensor in tensors]):
        assert torch.equal(gathered, torch.stack(tensors))
    for rank, received in enumerate(exchange([AllToAll(tensor) for tensor in tensors])):
        assert torch.equal(received, torch.stack([tensor[rank] for tensor in tensors]))
    for root in range(size):
        for result in exchange([Broadcast(tensor.clone(), src=root) for tensor in tensors]):
            assert torch.equal(result, tensors[root])


def test_a_future_is_each_ranks_own() -> None:
    futures = [torch.futures.Future[int]() for _ in range(2)]
    for rank, future in enumerate(futures):
        future.set_result(rank)
    assert exchange([Await(future) for future in futures]) == [0, 1]


@given(sizes, st.integers(0, 12))
def test_programs_of_unequal_length_run_in_the_static_order(size: int, buckets: int) -> None:
    gradients = torch.randn(buckets, size, 5)

    def bucket(rank: int, index: int) -> Bucket:
        own = gradients[index, rank].clone()
        return Bucket(index, own, (f"p{index}",), (own.shape,), rank, size, step=0)

    program = Staged()
    outcome = simulate([[program(bucket(r, b), Memory()) for b in range(buckets)] for r in range(size)])
    assert outcome.order == order([1 + b % 4 for b in range(buckets)])
    for rank in range(size):
        for index in range(buckets):
            torch.testing.assert_close(outcome.results[rank][index].mean, gradients[index].mean(0))


def test_ranks_that_part_ways_are_caught() -> None:
    def rank_dependent(rank: int) -> Collectives[torch.Tensor]:
        yield AllReduce(torch.zeros(2 + rank))
        return torch.zeros(1)

    with pytest.raises(
        ProgramError, match="rank 0 issues AllReduce of 2 float32, rank 1 issues AllReduce of 3"
    ):
        simulate([[rank_dependent(0)], [rank_dependent(1)]])

    def early(rank: int) -> Collectives[torch.Tensor]:
        if rank:
            yield AllReduce(torch.zeros(2))
        return torch.zeros(1)

    with pytest.raises(ProgramError, match="some ranks end before stage 0"):
        simulate([[early(0)], [early(1)]])


def test_collectives_among_some_ranks() -> None:
    x = [torch.tensor([float(rank)]) for rank in range(5)]
    groups = {0: (0, 2), 2: (0, 2), 1: (1, 3, 4), 3: (1, 3, 4), 4: (1, 3, 4)}
    received = exchange([AllReduce(x[rank].clone(), ranks=groups[rank]) for rank in range(5)])
    assert [float(one) for one in received] == [2, 8, 2, 8, 8]
    sent = exchange([Broadcast(x[rank].clone(), 1, ranks=groups[rank]) for rank in range(5)])
    assert [float(one) for one in sent] == [2, 3, 2, 3, 3], "src counts within the ranks"


@pytest.mark.parametrize(
    ("ops", "said"),
    [
        (
            [(0, 1), (0, 1), (1, 2)],
            "rank 1 issues AllReduce .* among ranks 0, 1, rank 2 issues .* among ranks 1, 2",
        ),
        ([(0, 1), (0, 1), (0, 1)], "rank 2 issues .* including this rank"),
        ([(1, 0), (1, 0), None], "ascending numbers from 0 to 2"),
        ([(0, 9), None, None], "ascending numbers from 0 to 2"),
    ],
)
def test_ranks_that_do_not_fit_together_are_refused(ops: list[tuple[int, ...] | None], said: str) -> None:
    with pytest.raises(ProgramError, match=said):
        exchange([AllReduce(torch.ones(1), ranks=ranks) for ranks in ops])


def test_waiting_where_others_communicate_is_refused() -> None:
    future: torch.futures.Future[int] = torch.futures.Future()
    future.set_result(3)
    with pytest.raises(ProgramError, match="rank 0 waits for a future where rank 1 issues AllReduce"):
        exchange([Await(future), AllReduce(torch.ones(1))])
