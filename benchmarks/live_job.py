"""A job of replicas that are killed and rejoin, as processes of this machine, for soaks and tests."""

import json
import logging
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torchft.coordination import LighthouseServer

import thinwire
from examples import tiny
from thinwire.integrations import torchft
from thinwire.strategies.live.exchange import Exchange

_WIDTH = 8


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The options of a job.

    Attributes:
        folder: The folder in which replicas write their logs.
        program: The configuration, as Python text.
        replicas: The number of replicas.
        pause: Seconds added to each step.
        timeout: Seconds after which a collective fails.
        dies_in: The exchange in whose middle replica 1 dies, in its first life. -1: none.
    """

    folder: Path
    program: str = "DiLoCo(4, program=Int4())"
    replicas: int = 3
    pause: float = 0.01
    timeout: float = 20.0
    dies_in: int = -1


class Job:
    """A lighthouse and its replicas.

    Args:
        plan: The options.
        context: Starts processes. Its server should have torch and torchft loaded.
        minimum: Replicas that an exchange needs.
    """

    def __init__(self, plan: Plan, context: Any, minimum: int = 2) -> None:
        self.plan, self._context = plan, context
        self._lighthouse = LighthouseServer(
            bind="[::]:0", min_replicas=minimum, join_timeout_ms=20_000, heartbeat_timeout_ms=1_000
        )
        self._minimum = minimum
        self.lives = [-1] * plan.replicas
        self._processes: list[Any] = [None] * plan.replicas

    def __enter__(self) -> "Job":
        for place in range(self.plan.replicas):
            self.start(place)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._lighthouse.shutdown()

    def start(self, place: int) -> None:
        """Start or restart a replica."""
        self.lives[place] += 1
        args = (self.plan, place, self.lives[place], self._lighthouse.address(), self._minimum)
        self._processes[place] = self._context.Process(target=replica, args=args, daemon=True)
        self._processes[place].start()

    def kill(self, place: int) -> None:
        """Kill a replica with SIGKILL."""
        self._processes[place].kill()
        self._processes[place].join()

    def dead(self, place: int) -> bool:
        """Return whether a replica has ended."""
        return not self._processes[place].is_alive()

    def exchanges(self, place: int) -> list[dict[str, Any]]:
        """Return the records that a replica wrote after each committed exchange of its present life."""
        path = self.plan.folder / f"{place}-{self.lives[place]}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def log(self, place: int, life: int) -> str:
        """Return thinwire's log of one life of a replica."""
        path = self.plan.folder / f"{place}-{life}.log"
        return path.read_text() if path.exists() else ""

    def await_(self, what: str, condition: Callable[[], bool], seconds: float = 120.0) -> float:
        """Wait until a condition holds; return the time that it took, or raise TimeoutError."""
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > seconds:
                logs = {place: self.log(place, life)[-2000:] for place, life in enumerate(self.lives)}
                raise TimeoutError(f"{what} did not happen within {seconds:g} s: {logs}")
            time.sleep(0.02)
        return time.monotonic() - began

    def end(self, seconds: float = 120.0) -> list[dict[str, Any]]:
        """Let all replicas train a few more steps and finalize; return their results."""
        latest = max(one["step"] for place in range(self.plan.replicas) for one in self.exchanges(place))
        part = self.plan.folder / "end.part"
        part.write_text(str(latest + 50))
        part.rename(self.plan.folder / "end")
        results = [self.plan.folder / f"result-{place}.json" for place in range(self.plan.replicas)]
        self.await_("the end", lambda: all(path.exists() for path in results), seconds)
        return [json.loads(path.read_text()) for path in results]


def replica(plan: Plan, place: int, life: int, lighthouse: str, minimum: int) -> None:
    """Train as one replica, from its own random parameters, until the job's end."""
    torch.set_num_threads(1)
    logging.basicConfig(filename=plan.folder / f"{place}-{life}.log", level=logging.WARNING)
    logging.getLogger("thinwire").setLevel(logging.INFO)
    manager = torchft.make_manager(
        min_replicas=minimum,
        lighthouse=lighthouse,
        name=f"replica-{place}",
        host="localhost",
        timeout=plan.timeout,
        quorum_timeout=120.0,
    )
    torch.manual_seed(100 * place + life)  # a replica that received nothing would differ from all others
    module = torch.nn.Sequential(torch.nn.Linear(tiny.WIDTH, 64), torch.nn.Linear(64, tiny.WIDTH))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.005)
    program = eval(plan.program, {"torch": torch}, vars(thinwire))
    wire = torchft.attach(manager, module, program, optimizer=optimizer)
    if plan.dies_in >= 0 and (place, life) == (1, 0):
        patch.object(Exchange, "_average", _dying(Exchange._average, plan.dies_in)).start()
    wire.join()
    _train(plan, place, life, wire, (module, optimizer))
    wire.finalize()
    _write(plan.folder / f"result-{place}.json", {"step": wire.step, "digest": tiny.digest(module)})
    os._exit(0)  # torchft's threads need not be joined


def _train(plan: Plan, place: int, life: int, wire: Any, trained: tuple[Any, Any]) -> None:
    (module, optimizer), rows, end = trained, tiny.Rows().rows, plan.folder / "end"
    seen = -1
    with (plan.folder / f"{place}-{life}.jsonl").open("a") as progress:
        while wire.step < (int(end.read_text()) if end.exists() else math.inf):
            if wire.exchanges != seen:
                seen = wire.exchanges
                anchors = wire._replica.fingerprint()
                row = {"exchanges": seen, "step": wire.step, "anchors": anchors, "replicas": wire.replicas}
                progress.write(json.dumps(row) + "\n")
                progress.flush()
            start = _WIDTH * (wire.step * plan.replicas + place) % (len(rows) - _WIDTH)
            batch = rows[start : start + _WIDTH]
            optimizer.zero_grad()
            tiny.loss_of(module(batch), batch).backward()
            optimizer.step()
            time.sleep(plan.pause)


def _dying(average: Any, number: int) -> Any:
    """Return a method that kills the process while others already send it data."""

    def dying(self: Any, work: Any) -> None:
        if self._replica.exchanges == number:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        average(self, work)

    return dying


def _write(path: Path, row: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(row))
    part.rename(path)


def loaded_context() -> Any:
    """Return a context whose processes start with torch, torchft and thinwire loaded."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "torch.optim", "benchmarks.live_job"])
    return context
