"""Exchanges as messages between ranks: matched, kept alive, cut off, and never mixed up with others."""

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.harness import run_ranks
from tests.models import batch, mlp
from thinwire import AllGather, AllReduce, AllToAll, Bucket, Collectives, Memory, Outcome, ReduceScatter
from thinwire.engine.comm.borrowed_group import run_blocking
from thinwire.engine.comm.group_communicator import GroupCommunicator
from thinwire.engine.engine import Engine
from thinwire.engine.ops import Collective, Exchange

LIMIT = 6.0
IN_TIME = 60.0
"""A wide margin over LIMIT for a busy machine; the group's own timeout is three times as long."""
LARGE = 1 << 22
"""Numbers in a message that is long in flight."""
KINDS: dict[str, Any] = {kind.__name__: kind for kind in (AllGather, AllToAll, ReduceScatter, Exchange)}


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def opened(limit: float = 2 * IN_TIME) -> GroupCommunicator:
    communicator = GroupCommunicator(world(), timedelta(seconds=limit))
    communicator.open()
    return communicator


def of_kind(kind: str, rank: int, size: int, width: int) -> Collective:
    """Rank r's numbers are all r."""
    if kind == "Exchange":
        pieces = tuple(width for _ in range(size))
        return Exchange(torch.full((size * width,), float(rank)), sends=pieces, receives=pieces)
    op: Collective = KINDS[kind](torch.full((size, width), float(rank)))
    return op


@dataclass(frozen=True)
class Exchanging:
    """Exact, after an exchange of one kind, in which something happens to one rank at step 3."""

    kind: str
    what: str
    victim: int

    def __call__(self, bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
        rank, size, kind, width = bucket.rank, bucket.world_size, self.kind, 10
        if bucket.step == 3 and bucket.index == 2:
            # After a bug the others end at once only if none has half of a long message.
            width = 11 if self.what == "bug" else LARGE // size
            if rank == self.victim:
                if self.what in ("SIGKILL", "SIGSTOP"):
                    threading.Timer(0.01, os.kill, (os.getpid(), signal.Signals[self.what])).start()
                if self.what == "bug":
                    raise ZeroDivisionError("a bug on one rank")
                if self.what == "size":
                    width += 1
                if self.what == "kind":
                    kind = "AllGather" if kind == "AllToAll" else "AllToAll"
        yield of_kind(kind, rank, size, width)
        if width != 10 and self.what in ("SIGKILL", "SIGSTOP"):
            yield of_kind(kind, rank, size, width)  # should the first have arrived before the signal
            time.sleep(0.1)
            yield of_kind(kind, rank, size, width)
        mean = yield AllReduce(bucket.buffer.mul_(1 / size))
        return Outcome(mean)


def train(rank: int, world_size: int, kind: str, what: str, victim: int) -> Any:
    ddp = DDP(mlp(), bucket_cap_mb=0.002)
    thinwire.attach(ddp, Exchanging(kind, what, victim), timeout=2 * IN_TIME if what == "bug" else LIMIT)
    started = time.monotonic()
    try:
        for step in range(5):
            started = time.monotonic()
            ddp(batch(rank, step)).square().mean().backward()
    except thinwire.ThinwireError as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return None


@pytest.mark.parametrize(
    ("what", "kind", "size"),
    [
        ("SIGKILL", "AllGather", 2),
        ("SIGKILL", "AllToAll", 3),
        ("SIGKILL", "ReduceScatter", 4),
        ("SIGKILL", "Exchange", 2),
        ("SIGSTOP", "AllGather", 3),
        ("SIGSTOP", "Exchange", 2),
    ],
)
def test_a_rank_that_dies_or_stalls_in_an_exchange_is_named(kind: str, what: str, size: int) -> None:
    victim = size - 1
    results = run_ranks(train, size, kind, what, victim, dies={victim})
    for name, text, seconds in results[:victim]:
        assert name == "WireError"
        # Gloo wakes no wait for a message that is half received, so a survivor may be silent as well.
        silent = re.search(r"Ranks? ([\d, ]+) did not respond", text)
        assert silent is not None, text
        assert str(victim) in silent[1].split(", "), text
        assert "step 3" in text
        assert seconds < IN_TIME


@pytest.mark.parametrize(("kind", "size"), [*zip(KINDS, (4, 2, 3, 2), strict=True)])
def test_a_bug_on_one_rank_ends_the_exchanges_of_the_others_at_once(kind: str, size: int) -> None:
    results = run_ranks(train, size, kind, "bug", 1)
    assert results[1][0] == "ProgramError"
    for rank in {*range(size)} - {1}:
        name, text, seconds = results[rank]
        assert name == "WireError"
        assert "Rank 1 failed: the program failed on" in text
        assert seconds < IN_TIME


@pytest.mark.parametrize(
    ("what", "kind", "size"),
    [
        ("size", "AllGather", 2),
        ("size", "AllToAll", 3),
        ("size", "ReduceScatter", 2),
        ("size", "Exchange", 4),
        ("kind", "AllToAll", 3),
        ("kind", "ReduceScatter", 2),
    ],
)
def test_exchanges_that_differ_are_an_error_in_time_and_no_abort(kind: str, what: str, size: int) -> None:
    """Gloo's own collectives abort the process where sizes differ."""
    for name, text, seconds in run_ranks(train, size, kind, what, 0):
        assert name == "WireError"
        assert "Rank" in text
        assert "waited for" in text
        assert "step 3" in text
        assert seconds < IN_TIME


def alone(rank: int, size: int) -> Any:
    return [train(rank, size, kind, "", 0) for kind in KINDS]


def test_one_rank_exchanges_with_itself() -> None:
    assert run_ranks(alone, 1) == [[None] * 4]


def many_in_flight(rank: int, size: int) -> None:
    """Of the whole group and of its halves, waited for in another order than issued."""
    communicator = opened()
    half = tuple(range(size))[rank // 2 * 2 :][:2]
    issued = []
    for number in range(30):
        ranks = half if number % 3 == 0 else None
        kind = (AllGather, AllToAll)[number % 2]
        count = len(ranks or range(size))
        op = kind(torch.full((count, 100 + number % 5), float(100 * number + rank)), ranks=ranks)
        issued.append((number, ranks or tuple(range(size)), communicator.issue(op)))
        del op
    for number, ranks, pending in reversed(issued):
        received = pending.wait().view(len(ranks), -1)
        for place, sender in enumerate(ranks):
            assert (received[place] == 100 * number + sender).all()
        assert pending.done()
        assert torch.equal(pending.wait().view(len(ranks), -1), received)
    communicator.close()


def test_many_exchanges_in_flight_are_not_mixed_up() -> None:
    run_ranks(many_in_flight, 4)


def unreferenced(rank: int, size: int) -> None:
    """A rank drops what it sends; the other takes its time to receive it."""
    communicator = opened()
    dist.barrier()
    if rank == 1:
        time.sleep(0.5)
    pending = communicator.issue(AllGather(torch.full((LARGE,), float(rank))))
    gc.collect()
    waste = [torch.full((LARGE,), -1.0) for _ in range(8)]
    received = pending.wait()
    assert len(waste) == 8
    assert (received[0] == 0).all()
    assert (received[1] == 1).all()
    communicator.close()


def test_what_is_sent_stays_alive_until_it_is_sent() -> None:
    run_ranks(unreferenced, 2)


def users_messages(rank: int, size: int) -> None:
    """The user has a receive pending, of any tag, on the group that a blocking program borrows."""
    peer, own = 1 - rank, torch.full((4,), 7.0 + rank)
    inboxes = [torch.zeros(4) for _ in range(4)]
    receives = [dist.irecv(box, peer, tag=tag) for tag, box in enumerate(inboxes)]

    def gather() -> Collectives[torch.Tensor]:
        gathered = yield AllGather(torch.full((4,), float(rank)))
        scattered = yield ReduceScatter(gathered)
        exchanged = yield Exchange(gathered[0], sends=(2, 2), receives=(2, 2))
        return torch.cat([gathered.flatten(), scattered, exchanged])

    received = run_blocking(gather(), world())
    assert received.tolist() == [0.0] * 4 + [1.0] * 4 + [2.0 * rank] * 4 + [0.0] * 4
    for tag in range(4):
        dist.send(own, peer, tag=tag)
    for work in receives:
        assert work is not None
        work.wait()
    assert all((box == 7.0 + peer).all() for box in inboxes)


def test_a_users_own_messages_are_left_alone() -> None:
    run_ranks(users_messages, 2)


def waiting(rank: int, size: int, how: str) -> float:
    """Two ranks wait for different exchanges; one closes its wire. How long each waited."""
    communicator = opened()
    engine = Engine(communicator)

    def gathering() -> Collectives[Any]:
        return (yield AllGather(torch.zeros(10 + rank)))

    dist.barrier()
    started = time.monotonic()
    engine.submit(gathering(), step=0, label="a", last=True, instead=torch.zeros(1))
    if rank == 0:
        time.sleep(0.5)
    if rank == 1 or how == "abort":
        if rank == 0:
            communicator.abort()
        with pytest.raises(thinwire.WireError, match=rf"rank {rank} waited .* for AllGather of 1{rank}"):
            engine.settle()
    engine.close()
    return time.monotonic() - started


@pytest.mark.parametrize("how", ["close", "abort"])
def test_closing_ends_a_wait_on_another_thread_here_and_elsewhere(how: str) -> None:
    """Before the time limit of 120 s; the harness looks whether a wire thread is left."""
    here, there = run_ranks(waiting, 2, how)
    assert max(here, there) < IN_TIME


SCRIPT = """
import sys, time, torch, torch.distributed as dist
from thinwire import AllGather
from thinwire.engine.comm.group_communicator import GroupCommunicator
from thinwire.engine.engine import Engine
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
communicator = GroupCommunicator(dist.group.WORLD)
communicator.open()
engine = Engine(communicator)
def gathering():
    return (yield AllGather(torch.zeros(1 << 22)))
if rank == 0:
    engine.submit(gathering(), step=0, label="a", last=True, instead=torch.zeros(1))
    time.sleep(0.5)
    sys.exit(5)
time.sleep(1)
"""


@pytest.mark.slow
def test_a_process_ends_with_its_own_code_while_a_receive_is_pending(tmp_path: Path) -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SCRIPT, str(rank), str(tmp_path / "meet")],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank, code in zip(ranks, (5, 0), strict=True):
        _, errors = rank.communicate(timeout=300)
        assert rank.returncode == code, errors
        assert "terminate" not in errors
