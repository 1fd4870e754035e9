"""A communicator that answers itself, for engines in one process."""

import time
from datetime import timedelta
from typing import Any

import torch

from thinwire import AllReduce, Collectives
from thinwire.engine.comm.rendezvous import ranks_text
from thinwire.engine.engine import Engine
from thinwire.engine.ops import Await, Collective


class StoreRendezvous:
    ranks = range(8)

    def __init__(self) -> None:
        self.words: dict[int, str] = {}

    def text(self, ranks: list[int]) -> str:
        return ranks_text(ranks)

    def reported(self) -> dict[int, str]:
        return self.words

    def report(self, text: str, limit: timedelta) -> None:
        self.words.setdefault(0, text)

    def reports(self, limit: timedelta) -> dict[int, str]:
        return self.words


class Reply:
    def __init__(self, value: Any, delay: float) -> None:
        self._value = value
        self._at = time.monotonic() + delay

    def done(self) -> bool:
        return time.monotonic() >= self._at

    def complete(self) -> None:
        time.sleep(max(0.0, self._at - time.monotonic()))

    def wait(self) -> Any:
        self.complete()
        if isinstance(self._value, Exception):
            raise self._value
        return self._value


class Echo:
    """Rank 0 of two, whose peer sends the same."""

    rank, size = 0, 2

    def __init__(self, limit: float = 30, delay: float = 0.001) -> None:
        self.limit = timedelta(seconds=limit)
        self.report_limit = timedelta(0)
        self.rendezvous = StoreRendezvous()
        self.closed = False
        self.answer: Exception | None = None
        self._delay = delay

    def issue(self, op: Collective | Await, turn: tuple[int, int] | None = None) -> Reply:
        assert isinstance(op, Collective)
        return Reply(self.answer or op.tensor, self._delay)

    def abort(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def staged(stages: int) -> Collectives[torch.Tensor]:
    for stage in range(stages):
        yield AllReduce(torch.full((4,), float(stage)))
    return torch.tensor(float(stages))


def submit(engine: Engine, program: Collectives[torch.Tensor], *, label: str, last: bool) -> Any:
    return engine.submit(program, step=0, label=label, last=last, instead=torch.zeros(()))


def engine_on(echo: Echo, *, inline: bool = False) -> Engine:
    return Engine(echo, inline=inline)  # type: ignore[arg-type]
