"""The process of each rank, which runs every check in a child and gathers the outcomes of all ranks."""

import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from thinwire.tools.doctor.check import FAILED, HUNG, OK, SKIPPED, Outcome, store_of, worst
from thinwire.tools.doctor.child import CHECKS
from thinwire.tools.doctor.facts import without_host_names

_MARGIN = 30.0  # seconds between ranks that start a check, with imports on a busy machine
_STACKS = 6000  # characters of stacks in the JSON file


@dataclass(frozen=True)
class Request:
    """What the user asked for.

    Args:
        device: Type of the device, such as "cuda".
        backend: The backend for it.
        imports: Modules to import first, which register a device of another vendor.
        parameters: Size of the model for memory and speed.
        checks: Names of the checks to run.
        limit: Seconds after which a check counts as hung. 0 takes each check's own limit.
    """

    device: str
    backend: str
    imports: tuple[str, ...]
    parameters: int
    checks: tuple[str, ...]
    limit: float = 0.0

    def seconds(self, name: str) -> float:
        """Return the seconds that a check may take, with the start of its process."""
        return self.limit or CHECKS[name].limit + _MARGIN


def examine(
    request: Request,
    shown: Callable[[str, Outcome, float], None],
    finished: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Run all checks on all ranks, one after another.

    Args:
        request: The device and the checks.
        shown: Is called on rank 0 with each check's name, outcome and seconds.
        finished: Is called on rank 0 with the report. The other ranks wait for its end.

    Returns:
        The report, the same on every rank: for each check the outcome of every rank.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = store_of(seconds=120)
    report: dict[str, Any] = {
        "ranks": size,
        "device": request.device,
        "backend": request.backend,
        "checks": {},
    }
    for name in request.checks:
        started = time.perf_counter()
        mine = _run(name, request, rank)
        # Only this host knows its own name.
        store.set(f"doctor/{name}/outcome/{rank}", without_host_names(json.dumps(mine.as_dict())))
        # Every rank waits here for the slowest, so that the next check starts on all of them together.
        keys = [f"doctor/{name}/outcome/{peer}" for peer in range(size)]
        store.wait(keys, datetime.timedelta(seconds=request.seconds(name) + _MARGIN))
        outcomes = [Outcome(**json.loads(store.get(key))) for key in keys]
        if name == "lost rank":
            outcomes = _without_the_killed(outcomes)
        seconds = time.perf_counter() - started
        verdict = worst(outcomes)
        report["checks"][name] = {
            "verdict": verdict.verdict,
            "text": verdict.text,
            "seconds": round(seconds, 1),
            "ranks": [outcome.as_dict() for outcome in outcomes],
        }
        if rank == 0:
            shown(name, verdict, seconds)
    if rank == 0:
        finished(report)
    _leave(store, rank, size)
    return report


def _run(name: str, request: Request, rank: int) -> Outcome:
    """Run one check in a child process. A hang is a result, with the stacks of all threads."""
    asked = {
        "device": request.device,
        "backend": request.backend,
        "imports": request.imports,
        "parameters": request.parameters,
    }
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "stderr"
        with log.open("wb") as errors:
            child = subprocess.Popen(
                [sys.executable, "-m", "thinwire.tools.doctor.child", name, str(result)],
                env={**os.environ, "THINWIRE_DOCTOR_CHILD": json.dumps(asked)},
                stdout=errors,
                stderr=errors,
            )
            try:
                child.wait(request.seconds(name))
            except subprocess.TimeoutExpired:
                return _hung(child, request.seconds(name), log)
            finally:
                if child.poll() is None:
                    child.kill()
                    child.wait()
        if result.exists():
            return Outcome(**json.loads(result.read_text(encoding="utf-8")))
        said = without_host_names(log.read_text(encoding="utf-8", errors="replace"))
        last = next((line for line in reversed(said.splitlines()) if line.strip()), "nothing")
        text = f"rank {rank} ended with exit code {child.returncode}; it printed last: {last[:200]}"
        return Outcome(FAILED, text, {"exit": child.returncode, "log": said[-_STACKS:]})


def _hung(child: "subprocess.Popen[bytes]", seconds: float, log: Path) -> Outcome:
    before = log.stat().st_size
    child.send_signal(signal.SIGUSR1)
    # faulthandler writes the stacks without Python's help, usually within milliseconds.
    for _ in range(20):
        time.sleep(0.5)
        if log.stat().st_size > before:
            break
    stacks = without_host_names(log.read_bytes()[before:].decode(errors="replace"))
    text = f"no result after {seconds:.0f} s; the JSON file has the stacks of all threads"
    return Outcome(HUNG, text, {"stacks": stacks[-_STACKS:]})


def _without_the_killed(outcomes: list[Outcome]) -> list[Outcome]:
    """Accept that the rank which killed itself has no result."""
    *others, last = outcomes
    killed = last.details.get("exit") == -signal.SIGKILL
    return [*others, Outcome(SKIPPED, "killed, as the check asks", {}) if killed else last]


def _leave(store: dist.Store, rank: int, size: int) -> None:
    """Leave after rank 0 has written the report. It leaves last, because it may host the store."""
    # If a check found anything, ranks exit with 1, and torchrun ends all others within 0.1 s of the first.
    if rank == 0:
        store.set("doctor/written", "1")
    store.wait(["doctor/written"], datetime.timedelta(seconds=_MARGIN))
    store.set(f"doctor/left/{rank}", "1")
    if rank == 0:
        store.wait([f"doctor/left/{peer}" for peer in range(size)])


def passed(report: dict[str, Any]) -> bool:
    """Return whether no check found anything."""
    return all(check["verdict"] in (OK, SKIPPED) for check in report["checks"].values())
