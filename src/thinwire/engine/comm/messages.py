"""Collectives as messages from rank to rank, on Gloo.

Gloo's own all-to-all and all-gather send before they announce that they can receive. The announcement then
queues behind the data, so only one direction of a link is busy at a time. Here every receive is posted before
anything is sent, and both directions are busy at once. Gloo's own reduce-scatter sends as much as an
all-reduce. Here it is an all-to-all and a sum.

A message is matched by its tag, which contains its turn, and a hash of the kind and the size of its exchange.
Ranks whose exchanges differ therefore wait for each other up to the time limit, and raise. With equal tags
Gloo would abort the process where sizes differ, and mix up numbers where they do not. Ranks may issue
exchanges of different turns in different orders, so no two turns share a tag, which a hash would not promise.
"""

import collections
import contextlib
import os
import zlib
from datetime import timedelta

import torch
import torch.distributed as dist

from thinwire.engine.comm.pending import Issued
from thinwire.engine.ops import AllGather, AllToAll, Collective, Exchange, ReduceScatter

Messaged = AllGather | AllToAll | ReduceScatter | Exchange
"""The collectives that are sent as messages."""

Turn = tuple[int, int]
"""A bucket's number in its step, and the stage of its program."""

_BUCKETS, _STAGES, _HASHES = 1 << 12, 1 << 3, 1 << 15
"""The parts of a turn's tag, of 30 bits in all. A bit above them marks it."""
_AT_ONCE = timedelta(milliseconds=1)


class Mailbox:
    """A sender of one process group's messages. It numbers the exchanges of each turn, equally on all ranks.

    Args:
        group: A process group whose CPU backend is Gloo, and on which nothing else sends messages.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank, self._size = group.rank(), group.size()
        self._exchanges: collections.Counter[Turn | None] = collections.Counter()

    def exchange(self, op: Messaged, turn: Turn | None = None) -> Issued:
        """Issue a collective as messages, and return without waiting for them.

        Args:
            op: The collective, on the CPU. Torch's works keep its tensor until it is sent.
            turn: The bucket and stage by which ranks match it, together with the number of exchanges of this
                turn so far. Ranks may issue exchanges of different turns in different orders. None if all
                ranks issue in the same order.

        Returns:
            The messages in flight.
        """
        if isinstance(op, Exchange):
            received = op.tensor.new_empty(sum(op.receives))
            inward, outward = received.split(op.receives), op.tensor.split(op.sends)
        elif isinstance(op, AllGather):
            received = op.tensor.new_empty((self._size, *op.tensor.shape))
            inward, outward = received.unbind(), (op.tensor,) * self._size
        else:
            received = torch.empty_like(op.tensor)
            inward, outward = received.unbind(), op.tensor.unbind()
        inward[self._rank].copy_(outward[self._rank])
        # A turn is taken once in every step, and steps follow each other, so ranks count a turn's exchanges
        # alike even where they issue different turns in different orders.
        self._exchanges[turn] += 1
        works: list[dist.Work | None] = []
        try:
            # All receives are posted before the first send. In each round, every rank has a different peer.
            # 655 KB between 2 hosts at 100 Mbit/s take 54 ms so, and 106 by Gloo's own all-to-all (the link
            # needs 52; benchmarks/exchanges.py).
            for distance in range(1, self._size):
                peer = (self._rank - distance) % self._size
                if (message := inward[peer]).numel():
                    works.append(self._group.recv([message], peer, self._tag(op, turn, message)))
            for distance in range(1, self._size):
                peer = (self._rank + distance) % self._size
                if (message := outward[peer]).numel():
                    works.append(self._group.send([message], peer, self._tag(op, turn, message)))
        except RuntimeError as error:  # a connection broke before: reported like that of a wait
            return Issued.failed(error)
        if isinstance(op, ReduceScatter):
            return Issued(works, lambda: received.sum(0, dtype=received.dtype))
        return Issued(works, lambda: received)

    def _tag(self, op: Collective, turn: Turn | None, message: torch.Tensor) -> int:
        number, kind = self._exchanges[turn], type(op).__name__
        return tag_of(turn, f"{number} {kind} {message.numel()} {message.dtype}")


def tag_of(turn: Turn | None, words: str) -> int:
    """Return the tag of a message, of 31 bits.

    Args:
        turn: The turn of its exchange, or None if all ranks issue it in the same order.
        words: What else must be equal on both ranks.
    """
    hashed, turns = zlib.crc32(f"{turn} {words}".encode()), _BUCKETS * _STAGES * _HASHES
    if turn is None:
        return hashed % turns
    bucket, stage = turn
    return turns + (bucket % _BUCKETS * _STAGES + stage % _STAGES) * _HASHES + hashed % _HASHES


def cut(group: dist.ProcessGroup) -> None:
    """Close a Gloo group's connections, so that everything in flight fails on this rank and its peers.

    Torch cannot abort Gloo's operations in flight, and a pending receive keeps its connection open. But Gloo
    closes all connections of a group when a receive on it times out. This function therefore posts a receive
    that times out at once. A receive from a peer whose connection is already broken raises before it times
    out, so every peer is tried.
    """
    devices = os.environ.get("GLOO_SOCKET_IFNAME", "").count(",") + 1  # a message's tag chooses its device
    for tag in range(devices):
        for peer in range(group.size()):
            if peer != group.rank():
                with contextlib.suppress(RuntimeError):
                    group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], peer, tag).wait(_AT_ONCE)
