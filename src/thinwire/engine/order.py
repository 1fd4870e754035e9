"""The static order of collectives, as pure functions without clocks, threads or I/O.

A bucket is here what was submitted to the engine as one program: one of DDP's buckets, a slice of one, or
other tensors. Buckets are numbered within a step. A bucket's program is a sequence of stages, each ending in
a collective. Buckets overlap: while one bucket's first collective is in flight, an earlier bucket issues its
second. Collective `stage` of bucket `bucket` has the position

    (bucket + LOOKAHEAD * stage, stage)

so every rank sorts the same way, regardless of timing. There is one exception. If a hook waits for a result,
all collectives of the buckets so far come before those of later buckets.

Messages are matched by their tags and need no order. A program whose next turn does not depend on other
buckets declares so (`Collective.in_order`). It then resumes as soon as its message has arrived.
"""

import heapq
from collections.abc import Sequence

LOOKAHEAD = 2
"""Number of later buckets that start before a bucket moves on to its next stage.

Gloo runs two collectives at a time. With two collectives of later buckets queued, the link is busy while the
wire thread encodes. More would only delay the first results.
"""


def position(bucket: int, stage: int) -> tuple[int, int]:
    """Return the position of a bucket's collective in its step. Lower is first, and no two are equal."""
    # With three buckets of two stages: (0,0) (1,0) (2,0) (0,1) (1,1) (2,1). At an equal first number the
    # lower stage goes first: it belongs to the later bucket, whose program has only just begun.
    return (bucket + LOOKAHEAD * stage, stage)


def order(stages: Sequence[int]) -> list[tuple[int, int]]:
    """Return the (bucket, stage) turns, in order, of a step whose bucket `b` has `stages[b]` collectives.

    >>> order([2, 1, 1])
    [(0, 0), (1, 0), (2, 0), (0, 1)]
    """
    turns = [(bucket, stage) for bucket, count in enumerate(stages) for stage in range(count)]
    return sorted(turns, key=lambda turn: position(*turn))


class Agenda:
    """The turns of one step, dealt in order while its buckets are still arriving.

    A turn is dealt as soon as no bucket that has not arrived could precede it.

    >>> agenda = Agenda()
    >>> agenda.arrive(), agenda.next(), agenda.next()
    (0, (0, 0), None)
    """

    def __init__(self) -> None:
        self._due: list[tuple[tuple[int, int, int], tuple[int, int]]] = []
        self._arrived = 0
        self._closed = False
        self._parts: list[int] = []
        """By bucket, the number of waits by hooks before it arrived."""
        self._part = 0

    def arrive(self) -> int:
        """Admit the next bucket and return its number in this step."""
        bucket = self._arrived
        self._arrived += 1
        self._parts.append(self._part)
        self.again(bucket, 0)
        return bucket

    def barrier(self) -> None:
        """Deal all turns of the buckets that have arrived before those of later buckets.

        All ranks must call it between the same two buckets, so that the order stays the same on all.
        """
        self._part += 1

    def close(self) -> None:
        """Declare that no further bucket will arrive in this step."""
        self._closed = True

    def again(self, bucket: int, stage: int) -> None:
        """Request a turn for a bucket's stage."""
        heapq.heappush(self._due, ((self._parts[bucket], *position(bucket, stage)), (bucket, stage)))

    def next(self) -> tuple[int, int] | None:
        """Return the next turn, or None if it depends on a bucket that has not arrived, or none is left."""
        if not self._due:
            return None
        # The next bucket to arrive would take the position of its first stage. What comes before that is due.
        if not self._closed and self._due[0][0] > (self._part, *position(self._arrived, 0)):
            return None
        return heapq.heappop(self._due)[1]

    def later_stages(self) -> list[tuple[int, int]]:
        """Return the later stages whose turns come right after the first one of the newest bucket.

        They need none of that bucket's gradients, so their programs may compute before it, although their
        collectives come after its first. (Turns behind these would have to wait for collectives that have
        only just been issued, and the newest bucket with them.)

        >>> agenda = Agenda()
        >>> agenda.arrive(), agenda.next(), agenda.again(0, 1), agenda.arrive(), agenda.later_stages()
        (0, (0, 0), None, 1, [])
        >>> agenda.next(), agenda.again(1, 1), agenda.arrive(), agenda.later_stages()
        ((1, 0), None, 2, [(0, 1)])
        """
        newest = self._arrived - 1
        return [turn for _, turn in sorted(self._due) if turn[1] > 0 and position(*turn)[0] <= newest]

    @property
    def finished(self) -> bool:
        """True once every bucket has arrived and has taken all its requested turns."""
        return self._closed and not self._due
