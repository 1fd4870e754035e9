"""Links and hosts, and the time that a collective takes on them. Pure functions, without torch.

A collective among W ranks, of which each sends and receives B bytes, takes

    latency   = rounds * (one-way latency + time of a message on the host)
    occupied  = max(B / up, B / down, B / host rate)      full duplex; half duplex adds up and down
                + other messages * time of a message on the host
    processor = messages * time of a message on the host + B / host rate

This is the alpha-beta model of collectives (Hockney; Thakur, Rabenseifner and Gropp, "Optimization of
Collective Communication Operations in MPICH"), with the algorithms that Gloo uses. Sums of half-precision
numbers have a lower host rate, because processors add them slowly. Rounds depend on each other, messages of
one round do not. An all-reduce is a ring of 2 (W-1) rounds. All-gather, all-to-all and reduce-scatter are W-1
messages in one round. Reduce and broadcast are trees of log2 W rounds. The link is occupied by one collective
after another, and the latency of one is hidden behind the bytes of others.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

FRAMING = 1448 / 1514
"""The share of a link's rate that carries data: 1448 bytes in each Ethernet frame of 1514, with TCP."""
HOST_RATE, NARROW_RATE = 1.5e9, 0.75e9
"""Bytes per second that Gloo moves on a host, and of half-precision sums (benchmarks/plan.py)."""
MESSAGE_SECONDS = 50e-6
"""Time that a message takes on the sending and receiving hosts."""
WAKE_UP_SECONDS = 1e-3
"""Time that a woken thread waits where two threads compete for each core (benchmarks/plan.py)."""


class Transfer(NamedTuple):
    """One collective, as a rank takes part in it."""

    kind: str
    """The class of the collective, such as `"AllReduce"`."""
    sent: int
    """Bytes that the rank sends, which is as much as it receives."""
    ranks: int
    """The number of ranks that take part."""
    local: bool = False
    """Whether all of them are on one node."""
    width: int = 4
    """Bytes of a number. Hosts add narrow numbers at another rate."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """A host's link to the others.

    Attributes:
        up: Bits per second that a host can send. Infinite if unlimited.
        down: Bits per second that a host can receive.
        latency: Seconds from one host to another, half of the round trip.
        duplex: Whether both directions can be used at the same time.
    """

    up: float = math.inf
    down: float = math.inf
    latency: float = 0.0
    duplex: bool = True

    def seconds(self, count: float) -> float:
        """Return the time in which a host sends and receives `count` bytes each."""
        up, down = 8 * count / self.up, 8 * count / self.down
        return max(up, down) if self.duplex else up + down

    def scaled(self, factor: float) -> "Link":
        """Return the link with other rates and the same latency."""
        return replace(self, up=factor * self.up, down=factor * self.down)


@dataclass(frozen=True, kw_only=True)
class Network:
    """All hosts and the links between them.

    Attributes:
        ranks: The number of ranks.
        link: The link of each host, or the slowest one.
        inside: The link between ranks of one node. None if it is unlimited.
        reduce_rate: Bytes of float32 per second that the host itself can process in an all-reduce.
        narrow_rate: The same of half-precision numbers.
        message_rate: Bytes per second of messages that the host itself can process.
        message_seconds: Time that a message takes on the sending and the receiving host.
        spread: Relative deviation of probed transfer times. 0 for a link that the user described.
    """

    ranks: int
    link: Link
    inside: Link | None = None
    reduce_rate: float = HOST_RATE
    narrow_rate: float = NARROW_RATE
    message_rate: float = HOST_RATE
    message_seconds: float = MESSAGE_SECONDS
    spread: float = 0.0

    def latency(self, transfer: Transfer) -> float:
        """Return the time of a collective during which the link is not occupied."""
        if transfer.ranks == 1:
            return 0.0
        link = self._link(transfer)
        return rounds(transfer.kind, transfer.ranks) * (link.latency + self.message_seconds)

    def occupied(self, transfer: Transfer) -> float:
        """Return the time for which a collective occupies the link."""
        if transfer.ranks == 1:
            return 0.0
        # `latency` has one message per round. The others are issued in the same round, one after another.
        others = _messages(transfer.kind, transfer.ranks) - rounds(transfer.kind, transfer.ranks)
        bound = max(self._link(transfer).seconds(transfer.sent), self._on_host(transfer))
        return bound + others * self.message_seconds

    def processor(self, transfer: Transfer) -> float:
        """Return the processor time that a collective takes on a rank's host."""
        if transfer.ranks == 1:
            return 0.0
        return _messages(transfer.kind, transfer.ranks) * self.message_seconds + self._on_host(transfer)

    def _on_host(self, transfer: Transfer) -> float:
        if transfer.kind not in _SUMS:
            return transfer.sent / self.message_rate
        return transfer.sent / (self.reduce_rate if transfer.width >= _WIDE else self.narrow_rate)

    def _link(self, transfer: Transfer) -> Link:
        return (self.inside or Link()) if transfer.local else self.link

    def on_busy_hosts(self, cores: float) -> "Network":
        """Return the network with the time of a message on hosts that compute at the same time.

        Where all cores are busy, the thread that a message wakes waits for a core. The probe runs on idle
        hosts and does not see this. Fitted to steps of two and four ranks on two cores (benchmarks/plan.py).

        Args:
            cores: Processor cores for each rank. From two on, a thread finds one that is idle.
        """
        # No wait with two cores per rank, half of WAKE_UP_SECONDS with one.
        waits = WAKE_UP_SECONDS * max(0.0, 1 / cores - 0.5)
        return replace(self, message_seconds=self.message_seconds + waits)


_SUMS = ("AllReduce", "Reduce")
_WIDE = 4
_TREES = ("Reduce", "Broadcast")


def rounds(kind: str, ranks: int) -> int:
    """Return the number of messages of a collective that wait for each other.

    >>> rounds("AllReduce", 4), rounds("AllToAll", 4), rounds("Broadcast", 5), rounds("AllReduce", 1)
    (6, 1, 3, 0)
    """
    if ranks == 1:
        return 0
    if kind == "AllReduce":
        return 2 * (ranks - 1)
    return (ranks - 1).bit_length() if kind in _TREES else 1


def _messages(kind: str, ranks: int) -> int:
    """Return the number of messages that a rank sends."""
    return rounds(kind, ranks) if kind == "AllReduce" or kind in _TREES else ranks - 1
