"""A lost or different rank is an error on the others, in time: never a hang, never an abort."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.harness import run_ranks
from tests.models import Staged, batch, flat_gradients, flat_parameters, mlp
from thinwire import AllReduce, Bucket, Collectives, Memory, Outcome
from thinwire.ddp_comm_hooks.default_hooks import allreduce_hook
from thinwire.engine.comm.process_group import store_of

LIMIT = 6.0
IN_TIME = 60.0
"""A wide margin over LIMIT for a busy machine; the group's own timeout is three times as long."""


def train_until_error(rank: int, ddp: DDP) -> tuple[str, str, float]:
    """The error's type and text, and how long it took to come in its step."""
    started = time.monotonic()
    try:
        for step in range(100):
            started = time.monotonic()
            ddp(batch(rank, step)).square().mean().backward()
    except thinwire.ThinwireError as error:
        return type(error).__name__, str(error), time.monotonic() - started
    raise AssertionError("no error came")


@dataclass(frozen=True)
class Fatal(thinwire.Program):
    """At step 3, halfway through the buckets, something happens on one rank."""

    what: str
    victim: int

    def __call__(self, bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
        if bucket.step == 3 and bucket.index == 4 and bucket.rank == self.victim:
            if self.what == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            elif self.what == "stalled":
                time.sleep(2 * LIMIT)
            elif self.what == "buggy":
                raise ZeroDivisionError("a bug on one rank")
        return (yield from Staged()(bucket, memory))


def struck(rank: int, world_size: int, what: str, victim: int, unused: bool = False) -> Any:
    ddp = DDP(mlp(), bucket_cap_mb=0.002, find_unused_parameters=unused)
    # After a bug nobody waits for the limit: it is longer than the time that the error may take.
    thinwire.attach(ddp, Fatal(what, victim), timeout=2 * IN_TIME if what == "buggy" else LIMIT)
    return train_until_error(rank, ddp)


@pytest.mark.parametrize(
    ("world_size", "victim", "unused"),
    [
        pytest.param(2, 0, False, marks=pytest.mark.slow),
        (3, 1, False),
        pytest.param(3, 1, True, marks=pytest.mark.slow),
        pytest.param(4, 3, False, marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_is_named_by_the_others(world_size: int, victim: int, unused: bool) -> None:
    """With unused parameters too, where DDP has a collective of its own at the end of backward."""
    results = run_ranks(struck, world_size, "killed", victim, unused, dies={victim})
    for rank, result in enumerate(results):
        if rank != victim:
            kind, text, seconds = result
            assert kind == "WireError"
            assert f"Rank {victim} did not respond:" in text
            assert "step 3" in text
            assert "bucket" in text
            assert seconds < IN_TIME


def test_a_stalled_rank_is_named_within_the_limit() -> None:
    results = run_ranks(struck, 3, "stalled", 2)
    for kind, text, seconds in results[:2]:
        assert kind == "WireError"
        assert "Rank 2 did not respond:" in text
        assert seconds < IN_TIME
    assert results[2][0] in ("WireError", "ProgramError")  # when it wakes up, the wire is down for it too


def test_a_bug_on_one_rank_reaches_the_others_as_its_words() -> None:
    results = run_ranks(struck, 3, "buggy", 1)
    assert results[1][0] == "ProgramError"
    assert "ZeroDivisionError: a bug on one rank" in results[1][1]
    for kind, text, seconds in (results[0], results[2]):
        assert kind == "WireError"
        assert "Rank 1 failed: the program failed on" in text
        assert "a bug on one rank" in text
        assert seconds < IN_TIME


def absent_at_attach(rank: int, world_size: int) -> tuple[str, str]:
    ddp = DDP(mlp())
    store = store_of(dist.distributed_c10d._get_default_group())
    if rank == 1:
        store.wait(["rank 0 raised", "rank 2 raised"])
        return "", ""
    try:
        thinwire.attach(ddp, thinwire.Exact(), timeout=3.0)
    except thinwire.ThinwireError as error:
        store.set(f"rank {rank} raised", "")
        return type(error).__name__, str(error)
    raise AssertionError("no error came")


def test_a_rank_that_does_not_attach_is_named() -> None:
    for kind, text in run_ranks(absent_at_attach, 3)[::2]:
        assert kind == "WireError"
        assert "after 3 s: rank 1 did not reach it in time" in text
        assert "'attach' timed out on rank" in text


def interrupted(rank: int, world_size: int) -> tuple[str, str]:
    """A user's own error in the middle of backward, caught, and training goes on as if nothing was."""
    ddp = DDP(mlp(), bucket_cap_mb=0.002)
    thinwire.attach(ddp, Staged())
    ddp(batch(rank, 0)).square().mean().backward()

    def stumble(gradient: torch.Tensor) -> None:
        raise KeyError("a user's error")

    trap = ddp.module[4].weight.register_hook(stumble)
    with pytest.raises(KeyError, match="a user's error"):
        ddp(batch(rank, 1)).square().mean().backward()
    trap.remove()
    try:
        for step in range(2, 4):
            ddp(batch(rank, step)).square().mean().backward()
    except RuntimeError as error:
        return type(error).__name__, str(error)
    raise AssertionError("no error came")


def test_a_backward_that_was_cut_off_cannot_be_continued() -> None:
    """DDP refuses by itself, or thinwire does; nobody averages leftovers with a new step."""
    for kind, text in run_ranks(interrupted, 2):
        assert kind in ("RuntimeError", "WireError")
        assert "Expected to have finished reduction" in text or "its backward was interrupted" in text


class OddError(thinwire.ThinwireError):
    """A user's error whose constructor does not take what it keeps."""

    def __init__(self, number: int, *, reason: str) -> None:
        super().__init__(f"error {number}: {reason}")


@dataclass(frozen=True)
class Wrong:
    """Exact, until in step 2 a bucket in the middle goes wrong."""

    how: str

    def __call__(self, bucket: Bucket, memory: Memory) -> Any:
        mean = yield AllReduce(bucket.buffer.mul_(1 / bucket.world_size))
        if bucket.step == 2 and bucket.index == 2:
            if self.how == "shrinks":
                return Outcome(mean[:-1])
            if self.how == "bare":
                return mean
            if self.how == "babbles":
                yield "hello"
            if self.how == "sums bytes":
                yield AllReduce(bucket.buffer.to(torch.float8_e4m3fn))
            if self.how == "own error":
                raise OddError(7, reason="mine")
            if self.how == "exits":
                raise SystemExit(3)
        return Outcome(mean)


def wrong(rank: int, world_size: int, how: str) -> tuple[str, str, bool]:
    ddp = DDP(mlp(), bucket_cap_mb=0.002)
    thinwire.attach(ddp, Wrong(how))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    before = torch.empty(0)
    try:
        for step in range(10):
            before = flat_parameters(ddp.module)
            optimizer.zero_grad()
            ddp(batch(rank, step)).square().mean().backward()
            optimizer.step()
    except (thinwire.ThinwireError, SystemExit) as error:
        return type(error).__name__, str(error), torch.equal(before, flat_parameters(ddp.module))
    raise AssertionError("no error came")


@pytest.mark.parametrize(
    ("how", "kinds", "said"),
    [
        ("shrinks", {"ProgramError"}, "returned a mean of shape"),
        ("bare", {"ProgramError"}, "returned a Tensor for bucket 2"),
        ("babbles", {"ProgramError"}, "yielded 'hello'"),
        ("sums bytes", {"ProgramError"}, "cannot be summed"),
        ("own error", {"OddError"}, "error 7: mine"),
        ("exits", {"WireError", "SystemExit"}, "3"),  # whichever thread took the turn
    ],
)
def test_a_program_that_goes_wrong_is_named_on_every_rank(how: str, kinds: set[str], said: str) -> None:
    for kind, text, unchanged in run_ranks(wrong, 2, how):
        assert kind in kinds
        assert said in text
        assert unchanged, "parameters changed although backward raised"


@dataclass(frozen=True)
class Multiplying:
    """Sends what a matrix product gives, whose dtype autocast would change."""

    def __call__(self, bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
        row = bucket.buffer.view(1, -1)
        product = yield AllReduce(row.t() @ torch.ones(1, 1))
        assert product.dtype == torch.float32
        total = yield AllReduce(product)
        return Outcome(total.flatten() * (1 / bucket.world_size**2))


def under_autocast(rank: int, world_size: int) -> torch.Tensor:
    ddp = DDP(mlp(), bucket_cap_mb=0.002)
    thinwire.attach(ddp, Multiplying())
    for step in range(20):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ddp(batch(rank, step)).float().square().mean().backward()
    return flat_gradients(ddp.module)


def test_autocast_around_backward_does_not_reach_programs() -> None:
    first, second = run_ranks(under_autocast, 2)
    assert torch.equal(first, second)


SCRIPT = """
import os, sys, torch, torch.distributed as dist, thinwire
from torch.nn.parallel import DistributedDataParallel as DDP
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
ddp = DDP(torch.nn.Sequential(*(torch.nn.Linear(50, 50) for _ in range(8))), bucket_cap_mb=0.01)
wire = thinwire.attach(ddp, thinwire.BF16())
for step in range(3):
    if sys.argv[3] == "exit" and step == 2:
        ddp.module[3].weight.register_hook(lambda gradient: sys.exit(5))
    ddp(torch.ones(2, 50)).sum().backward()
"""


@pytest.mark.parametrize(("how", "code"), [pytest.param("end", 0, marks=pytest.mark.slow), ("exit", 5)])
def test_a_process_ends_by_itself_with_its_own_code(tmp_path: Path, how: str, code: int) -> None:
    """Without any clean-up by the user: at the end of the script, or in the middle of a step."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SCRIPT, str(rank), str(tmp_path / "meet"), how],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=300)
        assert rank.returncode == code, errors


DAEMON = """
import sys, threading, torch, torch.distributed as dist, thinwire
from torch.nn.parallel import DistributedDataParallel as DDP
rank, steps, begun = int(sys.argv[1]), iter(range(10**9)), threading.Event()
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=3)
ddp = DDP(torch.nn.Sequential(*(torch.nn.Linear(50, 50) for _ in range(8))), bucket_cap_mb=0.01)
wire = thinwire.attach(ddp, thinwire.Int8())
ddp.module[3 + rank].weight.register_hook(lambda gradient: begun.set() if next(steps) == 4 else None)
def train():
    while True:
        ddp(torch.ones(2, 50)).sum().backward()
threading.Thread(target=train, daemon=True).start()
begun.wait()
"""


@pytest.mark.slow
def test_a_process_ends_while_a_daemon_thread_is_in_backward(tmp_path: Path) -> None:
    """Torch may abort it, as without thinwire, but no rank waits for the others."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", DAEMON, str(rank), str(tmp_path / "meet")],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            stderr=subprocess.DEVNULL,
        )
        for rank in range(3)
    ]
    try:
        assert {rank.wait(timeout=240) for rank in ranks} <= {0, -signal.SIGABRT}
    finally:
        for rank in ranks:
            rank.kill()


def some_buckets_only(rank: int, world_size: int) -> tuple[str, str, float]:
    def picky(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.is_last():
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future
        return allreduce_hook(state, bucket)

    ddp = DDP(mlp(), bucket_cap_mb=0.002)
    ddp.register_comm_hook(None, picky)
    started = time.monotonic()
    try:
        for step in range(3):
            ddp(batch(rank, step)).square().mean().backward()
    except RuntimeError as error:
        return type(error).__name__, str(error), time.monotonic() - started
    raise AssertionError("no error came")


def test_a_hook_that_passes_only_some_buckets_is_told_so() -> None:
    for _, text, _ in run_ranks(some_buckets_only, 2, group_timeout=5):
        assert "the step's last bucket did not arrive within 5 s" in text


def split(rank: int, world_size: int) -> str:
    """Parameters of one bucket go by several programs, and one of them fails after backward's own work."""
    ddp = DDP(mlp(), bucket_cap_mb=0.002)
    rules = [("*.weight", thinwire.Int8()), ("*.bias", Fatal("buggy", 1))]
    thinwire.attach(ddp, thinwire.Exact(), rules=rules, timeout=LIMIT)
    return train_until_error(rank, ddp)[0]


def test_a_failure_in_a_part_of_a_bucket_does_not_keep_the_model() -> None:
    """The harness looks whether the model's thread has gone with it."""
    assert run_ranks(split, 2) == ["WireError", "ProgramError"]
