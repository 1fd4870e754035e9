"""The store of torch.distributed on rank 0, as without torchrun: what becomes of the others without it."""

import os
import signal
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.harness import run_ranks
from tests.models import batch, mlp
from thinwire import Bucket, Collectives, Memory, Outcome
from thinwire.engine.comm.group_communicator import GroupCommunicator

LIMIT = 4.0


@dataclass(frozen=True)
class HostFails:
    """Exact; in step 2 rank 0, which hosts the store, stops or dies."""

    how: signal.Signals

    def __call__(self, bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
        if bucket.step == 2 and bucket.rank == 0:
            os.kill(os.getpid(), self.how)
        return (yield from thinwire.Exact()(bucket, memory))


def in_training(rank: int, how: signal.Signals) -> None:
    ddp = DDP(mlp(), bucket_cap_mb=0.002)
    thinwire.attach(ddp, HostFails(how), timeout=LIMIT)
    for step in range(10):
        ddp(batch(rank, step)).square().mean().backward()


def fail_on(rank: int, how: signal.Signals) -> None:
    """Rank 0 stops or dies now; the other one notices nothing yet."""
    dist.barrier()
    if rank == 0:
        os.kill(os.getpid(), how)
    time.sleep(0.2)


def in_attach(rank: int, how: signal.Signals) -> None:
    ddp = DDP(mlp())
    fail_on(rank, how)
    thinwire.attach(ddp, thinwire.Exact(), timeout=LIMIT)


def in_declining(rank: int, how: signal.Signals) -> None:
    """An option that this rank refuses is reported to the others within its own time limit."""
    ddp = DDP(mlp())
    fail_on(rank, how)
    thinwire.attach(ddp, thinwire.Exact(), timeout=LIMIT, check_every=-1)


def in_zeros_step(rank: int, how: signal.Signals) -> None:
    ddp = DDP(mlp(width=8, layers=2))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    thinwire.attach(ddp, thinwire.ZeRO(), optimizer=optimizer, timeout=LIMIT)
    for step in range(10):
        optimizer.zero_grad()
        ddp(batch(rank, step, width=8)).square().mean().backward()
        if step == 3:
            fail_on(rank, how)
        optimizer.step()


def in_connecting(rank: int, how: signal.Signals) -> None:
    """After the ranks have met, in the making of the process group."""
    world = dist.group.WORLD
    assert world is not None
    communicator = GroupCommunicator(world, timedelta(seconds=LIMIT))
    count = communicator.rendezvous.count("group")
    fail_on(rank, how)
    communicator.rendezvous.count = lambda topic: count  # type: ignore[method-assign]
    communicator.open()


def without_the_host(rank: int, world_size: int, where: Any, how: signal.Signals) -> tuple[str, str]:
    try:
        where(rank, how)
    except thinwire.ThinwireError as error:
        return type(error).__name__, str(error)
    raise AssertionError("no error came")


@pytest.mark.parametrize(
    ("where", "how"),
    [
        (in_training, signal.SIGSTOP),
        (in_training, signal.SIGKILL),
        (in_attach, signal.SIGSTOP),
        (in_attach, signal.SIGKILL),
        (in_declining, signal.SIGSTOP),
        (in_zeros_step, signal.SIGSTOP),
        (in_zeros_step, signal.SIGKILL),
        (in_connecting, signal.SIGSTOP),
        (in_connecting, signal.SIGKILL),
    ],
)
def test_without_the_stores_host_the_other_ranks_raise(where: Any, how: signal.Signals) -> None:
    _, (kind, text) = run_ranks(without_the_host, 2, where, how, dies={0}, rank_0_hosts=True)
    assert kind == "WireError"
    assert "store" in text
    assert "often rank 0" in text
