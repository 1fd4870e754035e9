"""A job of replicas that are killed, frozen or cut off, and come back, for soaks and tests.

Replicas are processes of this machine. With a lab, each of them is on its own emulated host, and the
lighthouse is on the lab's last host.
"""

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.live_replica import Place, Plan, replica, serve
from thinwire.tools.lab.namespaces import Lab

_PORT = 29510


class Job:
    """A lighthouse and its replicas.

    Args:
        plan: The options.
        context: Starts processes. Its server should have torch and torchft loaded.
        lab: An open lab with a host for each replica, and one for the lighthouse.
    """

    def __init__(self, plan: Plan, context: Any, lab: Lab | None = None) -> None:
        self.plan, self._context, self._lab = plan, context, lab
        self.lives = [-1] * plan.replicas
        self._processes: dict[tuple[int, int], Any] = {}
        self._lighthouse = None if lab else plan.lighthouse()
        self._server: Any = None

    def __enter__(self) -> "Job":
        if self._lab is not None:
            last = self._lab.count - 1
            args = (self.plan, _PORT, self._lab.network_of(last))
            self._server = self._context.Process(target=serve, args=args, daemon=True)
            self._server.start()
        for place in range(self.plan.replicas):
            self.start(place)
        return self

    def __exit__(self, *_: object) -> None:
        for process in [*self._processes.values(), *([self._server] if self._server else [])]:
            process.kill()
            process.join()
        if self._lighthouse is not None:
            self._lighthouse.shutdown()

    def start(self, place: int) -> None:
        """Start or restart a replica."""
        self.lives[place] += 1
        for rank in range(self.plan.shards):
            where = self._place(place, rank)
            process = self._context.Process(target=replica, args=(self.plan, where), daemon=True)
            process.start()
            self._processes[place, rank] = process

    def _place(self, place: int, rank: int) -> Place:
        lab, life = self._lab, self.lives[place]
        if lab is None:
            assert self._lighthouse is not None
            return Place(replica=place, life=life, rank=rank, lighthouse=self._lighthouse.address())
        return Place(
            replica=place,
            life=life,
            rank=rank,
            lighthouse=f"http://{lab.network.address(lab.count - 1)}:{_PORT}",
            host=lab.network.address(place),
            network=lab.network_of(place),
        )

    def _of(self, place: int) -> list[Any]:
        return [self._processes[place, rank] for rank in range(self.plan.shards)]

    def kill(self, place: int) -> None:
        """Kill all ranks of a replica with SIGKILL, as torchrun does when one of them has died."""
        for process in self._of(place):
            process.kill()
        for process in self._of(place):
            process.join()

    def freeze(self, place: int) -> None:
        """Stop all ranks of a replica with SIGSTOP."""
        for process in self._of(place):
            os.kill(process.pid, signal.SIGSTOP)

    def thaw(self, place: int) -> None:
        """Let a frozen replica go on."""
        for process in self._of(place):
            os.kill(process.pid, signal.SIGCONT)

    def dead(self, place: int) -> bool:
        """Return whether the first rank of a replica has ended."""
        return not self._of(place)[0].is_alive()

    def exchanges(self, place: int, life: int | None = None) -> list[dict[str, Any]]:
        """Return what a replica has written after each committed exchange of a life (the present one)."""
        path = self.plan.folder / f"{place}-{self.lives[place] if life is None else life}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def log(self, place: int, life: int, rank: int = 0) -> str:
        """Return what thinwire has logged in a life of a replica, on one of its ranks."""
        path = self.plan.folder / f"{place}-{life}{f'-rank-{rank}' if rank else ''}.log"
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

    def await_start(self) -> None:
        """Wait until all replicas have committed exchanges together."""
        self.await_(
            "the start", lambda: self.all_there() and all(map(self._second, range(self.plan.replicas)))
        )

    def _second(self, place: int) -> bool:
        return bool(self.exchanges(place)[1:])

    def all_there(self) -> bool:
        """Return whether the last exchange of each replica was with all others."""
        rows = [self.exchanges(place)[-1:] for place in range(self.plan.replicas)]
        return all(row and len(row[0]["replicas"]) == self.plan.replicas for row in rows)

    def end(self, seconds: float = 120.0) -> list[dict[str, Any]]:
        """Let all replicas train some steps more and finalize; return the results of all ranks."""
        latest = max(row["step"] for place in range(self.plan.replicas) for row in self.exchanges(place))
        part = self.plan.folder / "end.part"
        part.write_text(str(latest + 50))
        part.rename(self.plan.folder / "end")
        results = [self._result(*key) for key in sorted(self._processes)]
        self.await_("the end", lambda: all(path.exists() for path in results), seconds)
        return [json.loads(path.read_text()) for path in results]

    def _result(self, place: int, rank: int) -> Path:
        return self.plan.folder / (f"result-{place}-{rank}.json" if rank else f"result-{place}.json")


def loaded_context() -> Any:
    """Return a context whose processes start with torch, torchft and thinwire loaded."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "torch.optim", "benchmarks.live_job"])
    return context
