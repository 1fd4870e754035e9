"""Process groups that torch.distributed does not know, without a store, whose size changes between steps."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import thinwire
from tests.harness import run_ranks
from thinwire.engine.comm.borrowed_group import BorrowedGroup, run_blocking
from thinwire.engine.engine import Engine
from thinwire.engine.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collectives,
    Exchange,
    Reduce,
    ReduceScatter,
)
from thinwire.errors import ProgramError, WireError
from thinwire.programs.memory import Memory
from thinwire.programs.program import Bucket, mean_of


class Replicas:
    """A group as torchft has it: it is made again when replicas come or go, and is in no registry."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._made = 0
        self._group: Any = None

    def configure(self, rank: int, size: int) -> None:
        self._made += 1
        prefix = dist.PrefixStore(f"replicas {self._made}", self._store)
        self._group = dist.ProcessGroupGloo(prefix, rank, size, timedelta(seconds=10))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


def collectives(rank: int, size: int) -> Collectives[list[torch.Tensor]]:
    """Yield one collective of each kind."""
    x = torch.arange(2.0) + rank
    rows = torch.arange(2.0 * size).view(size, 2) + 10 * rank
    sends = tuple(1 + place for place in range(size))
    return [
        (yield AllReduce(x.clone())),
        (yield AllGather(torch.tensor([rank], dtype=torch.float8_e4m3fn))).float(),
        (yield AllToAll(rows)),
        (yield ReduceScatter(rows)),
        (yield Exchange(torch.full((sum(sends),), float(rank)), sends, (rank + 1,) * size)),
        (yield Broadcast(torch.tensor([1j * rank]), size - 1)),
        (yield Reduce(x.clone(), 0)) if rank == 0 else (yield Reduce(x.clone(), 0)) * 0,
    ]


def shrinks(rank: int, world_size: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    replicas = Replicas(store)
    for size in (3, 2):
        if rank >= size:
            return
        replicas.configure(rank, size)
        expected = thinwire.testing.simulate([[collectives(one, size)] for one in range(size)]).results[rank][
            0
        ]
        for got, wanted in zip(run_blocking(collectives(rank, size), replicas), expected, strict=True):
            assert torch.equal(got, wanted)
        engine = Engine(BorrowedGroup(replicas))
        numbers = torch.full((300,), float(rank))
        mine = Bucket(0, numbers, ("weight",), (torch.Size((20, 15)),), rank, size, 0)
        future = engine.submit(
            mean_of(thinwire.Int8(), mine, Memory()), step=0, label="x", last=True, instead=mine.buffer
        )
        engine.settle()
        torch.testing.assert_close(future.value(), torch.full((300,), (size - 1) / 2), atol=0.02, rtol=0)
        with pytest.raises(ProgramError, match="makes no subgroups"):
            BorrowedGroup(replicas).issue(AllReduce(torch.ones(1), ranks=(0, 1)))
        engine.close()


def loses_one(rank: int, world_size: int) -> None:
    replicas = Replicas(dist.distributed_c10d._get_default_store())
    replicas.configure(rank, world_size)
    if rank == 1:
        return
    engine = Engine(BorrowedGroup(replicas))
    x = torch.ones(3)

    def program() -> Collectives[torch.Tensor]:
        yield AllReduce(x)
        return x

    engine.submit(program(), step=0, label="x", last=True, instead=x)
    engine.guard()
    with pytest.raises(WireError, match="check the logs of the other ranks"):
        engine.settle()
    engine.close()


def test_programs_run_on_a_group_that_torch_does_not_know_and_that_shrinks() -> None:
    run_ranks(shrinks, 3)


def test_a_lost_rank_is_an_error_without_a_store() -> None:
    run_ranks(loses_one, 2)
