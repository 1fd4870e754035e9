"""The order in which collectives reach the wire: pure, without clocks, threads or I/O.

A bucket's program is a row of stages, each ending in a collective. Buckets overlap: while one bucket's
first collective travels, an older bucket is given its second. Collective `stage` of bucket `bucket`
stands at

    (bucket + LOOKAHEAD * stage, stage)

so every rank sorts the same way, whatever happened when. Nothing else decides the order.
"""

import heapq
from collections.abc import Sequence

LOOKAHEAD = 2
"""How many younger buckets start before a bucket moves on to its next stage.

Gloo works on two collectives at a time: with two younger ones queued, the link is busy while the wire
thread encodes. More would only delay the first results.
"""


def position(bucket: int, stage: int) -> tuple[int, int]:
    """The place of a bucket's collective in its step; lower goes first, and no two are equal."""
    return (bucket + LOOKAHEAD * stage, stage)


def order(stages: Sequence[int]) -> list[tuple[int, int]]:
    """The whole order of a step whose bucket `b` has `stages[b]` collectives.

    >>> order([2, 1, 1])
    [(0, 0), (1, 0), (2, 0), (0, 1)]
    """
    turns = [(bucket, stage) for bucket, count in enumerate(stages) for stage in range(count)]
    return sorted(turns, key=lambda turn: position(*turn))


class Agenda:
    """Deals out the turns of one step, in order, while its buckets are still arriving.

    A turn is dealt as soon as no bucket that is still to come could stand before it.

    >>> agenda = Agenda()
    >>> agenda.arrive(), agenda.next(), agenda.next()
    (0, (0, 0), None)
    """

    def __init__(self) -> None:
        self._due: list[tuple[tuple[int, int], tuple[int, int]]] = []
        self._arrived = 0
        self._closed = False

    def arrive(self) -> int:
        """Admit the next bucket and return its number in this step."""
        bucket = self._arrived
        self._arrived += 1
        self.again(bucket, 0)
        return bucket

    def close(self) -> None:
        """No further bucket will arrive in this step."""
        self._closed = True

    def again(self, bucket: int, stage: int) -> None:
        """The bucket wants a turn for this stage."""
        heapq.heappush(self._due, (position(bucket, stage), (bucket, stage)))

    def next(self) -> tuple[int, int] | None:
        """The next turn, or None when it depends on a bucket that has not arrived (or all is done)."""
        if not self._due:
            return None
        if not self._closed and self._due[0][0] > position(self._arrived, 0):
            return None
        return heapq.heappop(self._due)[1]

    @property
    def finished(self) -> bool:
        """Whether every bucket arrived and had all the turns it asked for."""
        return self._closed and not self._due
