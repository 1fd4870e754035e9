"""Costs that grow with the number of ranks: requests to the store, time on the host, bytes, memory, messages.

    .venv/bin/python benchmarks/scale.py              # all parts
    .venv/bin/python benchmarks/scale.py store --ranks 8,64,256

There is no cluster here. Ranks are threads of one process (`store`), generators in one process (`simulated`),
or rank 0 alone, with every collective answered at once (`host`, `bytes`).
"""

import argparse
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import thinwire
from thinwire.engine.comm.agreement import agree_on
from thinwire.engine.comm.rendezvous import StoreRendezvous
from thinwire.plan.encode import measure
from thinwire.plan.traffic import Layout, traffic
from thinwire.programs.program import Program
from thinwire.testing import SimulatedRanks

SLICE = {"weight": torch.Size((512, 512)), "bias": torch.Size((512,))}
"""About a megabyte, the size of a slice of `Int8` and `Int4`."""
PROGRAMS: list[Program] = [
    thinwire.Exact(),
    thinwire.Int8(),
    thinwire.Int4(),
    thinwire.TopK(),
    thinwire.PowerSGD(rank=4, factor_dtype="bf16"),
]
LIMIT = timedelta(seconds=300)


class Counted(dist.Store):
    """A store in memory that counts requests, and keys asked for."""

    def __init__(self) -> None:
        super().__init__()
        self._inner = dist.HashStore()
        self.requests: Counter[str] = Counter()
        self.keys = 0

    def _count(self, what: str, keys: int = 1) -> None:
        self.requests[what] += 1
        self.keys += keys

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self._count("set")
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        """Get a key."""
        self._count("get")
        return bytes(self._inner.get(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Get several keys."""
        self._count("multi_get", len(keys))
        return [bytes(value) for value in self._inner.multi_get(keys)]

    def add(self, key: str, amount: int) -> int:
        """Add to a counter."""
        self._count("add")
        return int(self._inner.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        """Check whether all keys exist."""
        self._count("check", len(keys))
        return bool(self._inner.check(keys))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a key if it has the expected value."""
        self._count("compare_set")
        return bytes(self._inner.compare_set(key, expected, desired))


class Place:
    """A rank of a group that does not exist."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        """Return the rank."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self._size


def store(ranks: int) -> None:
    """Count the requests of one comparison of set-ups, as `attach` makes."""
    counted = Counted()

    def attach(rank: int) -> None:
        place: Any = Place(rank, ranks)
        agree_on({"program": "Int8()"}, StoreRendezvous(place, LIMIT, counted), LIMIT)

    threads = [threading.Thread(target=attach, args=(rank,)) for rank in range(ranks)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    polls = counted.requests["check"]
    total = sum(counted.requests.values())
    print(
        f"{ranks:>6} ranks: {total:>7} requests, {total / ranks:>5.1f} for each rank, of which"
        f" {polls / ranks:>5.1f} are polls; {counted.keys:>8} keys; {time.perf_counter() - started:.1f} s"
    )


def simulated(ranks: int) -> None:
    """Run one step of a small model on all ranks, in one process, and check that replicas are equal."""
    shapes = {"weight": (64, 48), "bias": (64,)}
    length = 64 * 48 + 64
    for program in PROGRAMS:
        run = SimulatedRanks(program, shapes, ranks)
        gradients = list(torch.randn(ranks, length, generator=torch.Generator().manual_seed(0)))
        started = time.perf_counter()
        means = [outcome.mean for outcome in run.step(gradients)]
        seconds = time.perf_counter() - started
        assert all(torch.equal(mean, means[0]) for mean in means), f"{program}: replicas differ"
        print(
            f"{ranks:>6} ranks: {program!r:<36}{1e3 * seconds / ranks:>9.2f} ms for each rank, replicas equal"
        )


def _layout(program: Program) -> Layout:
    exact = ["bias"] if getattr(program, "carries_exact", False) else []
    return Layout.of(program, list(SLICE), SLICE, exact)


def host(ranks: int) -> None:
    """Measure the time that a rank spends in a program for one slice of a megabyte."""
    for program in PROGRAMS:
        speed = measure(_layout(program), ranks, 10)
        print(f"{ranks:>6} ranks: {program!r:<36}{1e3 * sum(speed.seconds):>9.2f} ms for a slice of 1 MB")


def sent(ranks: int) -> None:
    """Count the bytes that a rank sends for one slice of a megabyte, its messages, and what it keeps."""
    for program in PROGRAMS:
        found = traffic(_layout(program), ranks, 10)
        total = sum(transfer.sent for transfer in found.transfers)
        messages = [
            2 * (ranks - 1) if transfer.kind == "AllReduce" else ranks - 1 for transfer in found.transfers
        ]
        flying = found.in_flight / 1e6
        print(
            f"{ranks:>6} ranks: {program!r:<36}{total / 1e6:>9.3f} MB sent, {sum(messages):>6} messages of"
            f" {total / max(1, sum(messages)) / 1e3:>8.2f} KB, {flying:>7.3f} MB in flight"
        )


PARTS: dict[str, Callable[[int], None]] = {
    "store": store,
    "simulated": simulated,
    "host": host,
    "bytes": sent,
}
RANKS = {"store": "8,64,256", "simulated": "64,256", "host": "8,64,512", "bytes": "8,64,512,4096"}


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=", ".join(PARTS))
    parser.add_argument("--ranks", help="numbers of ranks, separated by commas")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for part in options.parts:
        print(f"\n{part}: {(PARTS[part].__doc__ or '').splitlines()[0]}")
        for count in (options.ranks or RANKS[part]).split(","):
            PARTS[part](int(count))


if __name__ == "__main__":
    main()
