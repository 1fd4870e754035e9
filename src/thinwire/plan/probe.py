"""The link probe: latency and rates of the network between ranks, from a few collectives.

Every rank must call it. Times are those of the slowest rank and equal on all ranks, so that all ranks probe
with the same sizes. A message of a few bytes measures the latency. A message that takes much longer measures
the rate. The fastest of some rounds is used, because other traffic and other processes only ever slow an
exchange down. A direction of the link is at least as fast as any exchange that used it.
"""

import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from thinwire.engine.comm.communicator import Communicator
from thinwire.engine.comm.group_communicator import GroupCommunicator
from thinwire.engine.ops import AllGather, AllReduce, AllToAll, Collective, Exchange
from thinwire.plan.network import HOST_RATE, MESSAGE_SECONDS, NARROW_RATE, Link, Network

_ROUNDS = 3
_SMALL_ROUNDS = 9
_SMALLEST, _LARGEST = 1 << 16, 1 << 24
_LONG_ENOUGH = 0.15
"""Seconds of an exchange in which latency is negligible."""
_ONE_WAY = 1.6
"""A link is half duplex if both directions together take this many times as long as one."""
_NEAR_LINK = 0.7
"""An exchange at this share of the link's rate was bound by the link, not by the host."""

Make = Callable[[int], Collective]
"""A function from a number of bytes to a collective in which each rank sends that many."""


class Probe:
    """A measurement of the network between the ranks of a communicator.

    Args:
        communicator: Issues the collectives.
        device: The device of the tensors to send.
    """

    def __init__(self, communicator: Communicator, device: torch.device | None = None) -> None:
        self._communicator = communicator
        self._device = device or torch.device("cpu")
        self._rank, self._size = communicator.rank, communicator.size
        self._spreads: list[float] = []

    def run(self) -> Network:
        """Measure latency, both directions and the rates of exchanges. Collective."""
        # Latency: an all-to-all of one byte per rank is a single round.
        small = statistics.median(self._seconds(self._all_to_all(0)) for _ in range(_SMALL_ROUNDS))
        both = self._rate(self._all_to_all, small)
        rounds = 2 * (self._size - 1)
        reduced = self._rate(partial(self._all_reduce, torch.float32), rounds * small)
        narrow = self._rate(partial(self._all_reduce, torch.bfloat16), rounds * small)
        used = max(both, reduced, narrow)
        # A star sends in one direction only: rank 0 to all others, then all others to rank 0.
        up = max(used, self._rate(partial(self._one_way, outward=True), small))
        down = max(used, self._rate(partial(self._one_way, outward=False), small))
        duplex = 1 / both < _ONE_WAY * max(1 / up, 1 / down)
        latency = max(0.0, small - MESSAGE_SECONDS)
        # A rate near the link's was bound by the link, and says nothing about the host.
        bound_by_link = _NEAR_LINK * min(up, down)
        return Network(
            ranks=self._size,
            link=Link(up=8 * up, down=8 * down, latency=latency, duplex=duplex),
            reduce_rate=reduced if reduced < bound_by_link else HOST_RATE,
            narrow_rate=narrow if narrow < bound_by_link else NARROW_RATE,
            message_rate=both if both < bound_by_link else HOST_RATE,
            spread=statistics.median(self._spreads),
        )

    def _rate(self, make: Make, small: float) -> float:
        """Return the bytes per second of a collective, beyond its latency."""
        # Grow the message until its time exceeds any latency. The loop ends on all ranks alike, because
        # `_seconds` returns the same value on all of them.
        count, seconds = _SMALLEST, 0.0
        while True:
            measured = [self._seconds(make(count)) for _ in range(_ROUNDS)]
            seconds = min(measured)
            if seconds > _LONG_ENOUGH or count >= _LARGEST:
                break
            count *= 4
        self._spreads.append((statistics.median(measured) - seconds) / seconds)
        return count / max(seconds - small, 0.1 * seconds)

    def _seconds(self, op: Collective) -> float:
        """Return the time of a collective that all ranks begin together, as the slowest rank sees it."""
        self._issue(AllReduce(self._zeros(1)))
        started = time.perf_counter()
        self._issue(op)
        own = torch.tensor([time.perf_counter() - started], dtype=torch.float64, device=self._device)
        return float(self._issue(AllGather(own)).max())

    def _issue(self, op: Collective) -> torch.Tensor:
        received: torch.Tensor = self._communicator.issue(op).wait()
        if self._device.type != "cpu":
            received.flatten()[:1].cpu()  # wait for the device, or only the launch would be timed
        return received

    def _all_to_all(self, count: int) -> Collective:
        return AllToAll(self._bytes(self._size, 1 + count // max(1, self._size - 1)))

    def _all_reduce(self, dtype: torch.dtype, count: int) -> Collective:
        # A ring sends 2 (W-1) / W of the tensor.
        numbers = count * self._size // (2 * (self._size - 1)) // dtype.itemsize
        return AllReduce(self._zeros(max(1, numbers), dtype))

    def _one_way(self, count: int, *, outward: bool) -> Collective:
        """Return an exchange in which rank 0 alone sends, or alone receives."""
        each, others = count // (self._size - 1), range(1, self._size)
        star = (0, *(each for _ in others))
        leaf = (each, *(0 for _ in others))
        none = (0,) * self._size
        if self._rank == 0:
            sends, receives = (star, none) if outward else (none, star)
        else:
            sends, receives = (none, leaf) if outward else (leaf, none)
        return Exchange(self._bytes(sum(sends)), sends, receives)

    def _zeros(self, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype, device=self._device)

    def _bytes(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.uint8, device=self._device)


def probe_group(group: dist.ProcessGroup, limit: timedelta | None = None) -> Network:
    """Measure the network between the ranks of a process group. Collective.

    Args:
        group: The ranks, at least two.
        limit: The time limit of a collective. None takes that of the group.
    """
    communicator = GroupCommunicator(group, limit)
    communicator.open()
    try:
        return Probe(communicator).run()
    finally:
        communicator.close()
