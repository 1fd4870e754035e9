"""A signal's handler that saves a checkpoint, as of a job that is about to be preempted."""

import contextlib
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.harness import run_ranks
from tests.models import Staged, batch, flat_parameters, mlp, own
from thinwire import Bucket, Collectives, DiLoCo, Int8, Memory, Outcome, ZeRO
from thinwire.strategies.zero.sharder import Sharder

STEPS = 8


@dataclass(frozen=True)
class Signalled(thinwire.Program):
    """Sends a signal to its own process whenever it runs, on backward's thread or the wire's."""

    def __call__(self, bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        outcome = yield from Staged()(bucket, memory)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        return outcome


def trained(rank: int, runs: Any, told: list[str], finish: bool = False) -> torch.Tensor:
    ddp = DDP(mlp(), bucket_cap_mb=0.002)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    wire = thinwire.attach(ddp, runs, optimizer=optimizer)

    def save(number: int, frame: object) -> None:
        wire.stats()
        try:
            wire.state_dict()
        except thinwire.AttachError as error:
            told.append(str(error))
        else:
            told.append("saved")

    signal.signal(signal.SIGUSR1, save)
    for step in range(STEPS):
        optimizer.zero_grad()
        ddp(batch(rank, step)).square().mean().backward()
        optimizer.step()
        assert own(wire.state_dict())["step"] == step + 1
    told.append("between steps")
    signal.raise_signal(signal.SIGUSR1)
    if finish:
        wire.finalize()
    return flat_parameters(ddp.module)


def preempted(rank: int, world_size: int) -> None:
    for plain, signalled in (
        (Staged(), Signalled()),
        (thinwire.DiLoCo(period=2), thinwire.DiLoCo(period=2, program=Signalled())),
    ):
        told: list[str] = []
        finish = not isinstance(plain, Staged)
        expected = trained(rank, plain, [], finish)
        assert torch.equal(trained(rank, signalled, told, finish), expected)
        refused = [text for text in told if text.startswith("state_dict was called during backward")]
        assert len(refused) > (STEPS // 4)
        assert "only set a flag" in refused[0]
        assert told[told.index("between steps") + 1] == "saved"


def test_a_handler_that_saves_is_refused_in_a_step_and_served_between_steps() -> None:
    run_ranks(preempted, 2)


PROGRAMS: dict[str, Any] = {
    "int8": Int8(),
    "diloco": DiLoCo(period=2),
    "zero": ZeRO(parameters=torch.bfloat16),
}


class Job:
    """A model whose handler of SIGUSR1 makes all calls that need a moment between steps."""

    def __init__(self, program: Any, folder: str) -> None:
        self.ddp = DDP(mlp(width=8, layers=3), bucket_cap_mb=0.001)
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=0.01)
        self.wire = wire = thinwire.attach(self.ddp, program, optimizer=self.optimizer, timeout=170)
        held, state = (self.ddp, self.optimizer, wire), wire.state_dict()
        self.calls: dict[str, Callable[[], Any]] = {
            "save_checkpoint": lambda: thinwire.save_checkpoint(folder, *held),
            "load_checkpoint": lambda: thinwire.load_checkpoint(folder, *held),
            "state_dict": wire.state_dict,
            "load_state_dict": lambda: wire.load_state_dict(state),
            "swap": lambda: wire.swap(thinwire.Exact()),
            "finalize": wire.finalize,
            "consolidate_optimizer_state": wire.consolidate_optimizer_state,
        }
        self.told: dict[str, list[str]] = {name: [] for name in self.calls}

    def handle(self, number: int, frame: object) -> None:
        for name, call in self.calls.items():
            self.told[name].append(_answer(call))

    def train(self, rank: int) -> torch.Tensor:
        for step in range(4):
            self.optimizer.zero_grad()
            self.ddp(batch(rank, step, width=8)).square().mean().backward()
            self.optimizer.step()
        self.wire.finalize()
        return flat_parameters(self.ddp.module)


def _answer(call: Callable[[], Any]) -> str:
    try:
        call()
    except thinwire.AttachError as error:
        return str(error)
    return "served"


@contextlib.contextmanager
def signalled_in(what: str, job: Job) -> Iterator[None]:
    """Raise the signal in backward, or within ZeRO's exchange in optimizer.step()."""
    chunks = Sharder._chunks

    def each(self: Sharder) -> Iterator[Bucket]:
        for one in chunks(self):
            yield one
            signal.raise_signal(signal.SIGUSR1)

    signal.signal(signal.SIGUSR1, job.handle)
    if what == "backward":
        next(job.ddp.parameters()).register_hook(lambda gradient: signal.raise_signal(signal.SIGUSR1))
    else:
        Sharder._chunks = each  # type: ignore[method-assign]
    try:
        yield
    finally:
        Sharder._chunks = chunks  # type: ignore[method-assign]
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def interrupted(rank: int, world_size: int, what: str, name: str, folder: str) -> None:
    """Only rank 1 is interrupted, so that a call that waits for rank 0 would time out."""
    warnings.simplefilter("ignore")  # DCP's
    expected = Job(PROGRAMS[name], folder).train(rank)
    job, began = Job(PROGRAMS[name], folder), time.monotonic()
    with signalled_in(what, job) if rank == 1 else contextlib.nullcontext():
        assert torch.equal(job.train(rank), expected)
    assert time.monotonic() - began < 120  # a call that waits for rank 0 takes 170 s
    for call, told in job.told.items():
        assert len(told) == (4 if rank == 1 else 0), (call, told)
        assert all(text.startswith(f"{call} was called during backward") for text in told), (call, told)
    thinwire.save_checkpoint(folder, job.ddp, job.optimizer, job.wire)


@pytest.mark.parametrize(
    ("what", "name"), [("backward", "int8"), ("backward", "diloco"), ("backward", "zero"), ("step", "zero")]
)
def test_a_handler_in_backward_or_an_exchange_is_refused_without_waiting_for_other_ranks(
    what: str, name: str, tmp_path: Path
) -> None:
    run_ranks(interrupted, 2, what, name, str(tmp_path / "checkpoint"))
