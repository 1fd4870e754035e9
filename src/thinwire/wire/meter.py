"""What every step cost: bytes sent, time on the wire, time exposed.

Bytes come from the tensors handed to each collective. Times are read off the host clock,
without synchronising any device; on accelerators, where the host runs ahead, they are `None`.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from thinwire.wire.ops import Await, Collective

GRADIENTS, MODELS, PARAMETERS = "gradients", "models", "parameters"
"""What a step exchanged."""


@dataclass
class OpRecord:
    """One collective of one step, in the order in which it reached the wire."""

    bucket: int
    stage: int
    kind: str
    bytes_sent: int
    issued: float
    ended: float | None = None


@dataclass(frozen=True)
class StepRecord:
    """One backward pass, or one exchange of models.

    Attributes:
        step: Counted from 0; accumulation steps under `no_sync` do not count. Of an exchange of models: the
            training steps that were over when it began.
        ops: Every collective, in issue order: the same on every rank.
        compute_seconds: Time spent in the programs themselves (encode, decode, matmuls).
        wire_seconds: Time during which at least one collective was under way. The end of one that nobody
            waits for is noticed late, by up to its own length, and at least 1 ms.
        exposed_seconds: Time that backward spent waiting after its own work was done. (In the first step
            of `static_graph` DDP waits where we cannot look, and this says 0.)
    """

    step: int
    ops: tuple[OpRecord, ...]
    compute_seconds: float | None
    wire_seconds: float | None
    exposed_seconds: float | None
    purpose: str = GRADIENTS
    """What was exchanged: `"gradients"`; `"models"` by `LocalSGD` and its like; `"parameters"` by `ZeRO`."""

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank put on the network, headers aside."""
        return sum(op.bytes_sent for op in self.ops)

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        """The same, by kind of collective."""
        by_kind: Counter[str] = Counter()
        for op in self.ops:
            by_kind[op.kind] += op.bytes_sent
        return dict(by_kind)

    @property
    def order(self) -> tuple[tuple[int, int, str], ...]:
        """(bucket, stage, kind) of every collective as it was issued."""
        return tuple((op.bucket, op.stage, op.kind) for op in self.ops)


@dataclass(frozen=True)
class Stats:
    """A snapshot: totals since attach, and the most recent steps, exchanges of models among them.

    `steps` counts backward passes; an exchange of models adds to the bytes and times only.

    Example::

        print(wire.stats().last.bytes_sent)
    """

    steps: int
    bytes_sent: int
    wire_seconds: float
    exposed_seconds: float
    compute_seconds: float
    overflows: int
    """Steps that did not count, because a gradient was infinite or NaN on some rank."""
    records: tuple[StepRecord, ...] = field(repr=False)

    @property
    def last(self) -> StepRecord | None:
        """The latest finished step, or None before the first."""
        return self.records[-1] if self.records else None


class StepTrace:
    """Collects one step while it runs; written by the thread that moves the track."""

    def __init__(self, step: int, rank: int, size: int, purpose: str = GRADIENTS) -> None:
        self.step = step
        self.purpose = purpose
        self.compute_seconds = 0.0
        self._rank = rank
        self._size = size
        self._ops: list[OpRecord] = []

    def issued(self, bucket: int, stage: int, op: Collective | Await) -> OpRecord:
        """Book a collective at the moment it goes out."""
        sent = 0 if isinstance(op, Await) else op.bytes_sent(*op.place(self._rank, self._size))
        record = OpRecord(bucket, stage, type(op).__name__, sent, issued=time.perf_counter())
        self._ops.append(record)
        return record

    def finish(self, exposed: float, *, timed: bool) -> StepRecord:
        """The step as it will be remembered."""
        return StepRecord(
            step=self.step,
            ops=tuple(self._ops),
            compute_seconds=self.compute_seconds if timed else None,
            wire_seconds=_covered(self._ops) if timed else None,
            exposed_seconds=exposed if timed else None,
            purpose=self.purpose,
        )


class Meter:
    """Remembers the latest steps in full and all in total; engines on several threads may share it."""

    def __init__(self, history: int = 1000) -> None:
        self._lock = threading.Lock()
        self._records: deque[StepRecord] = deque(maxlen=history)
        self._total = Stats(0, 0, 0.0, 0.0, 0.0, 0, ())

    def add(self, record: StepRecord) -> None:
        """Take in a finished step."""
        with self._lock:
            self._records.append(record)
            self._total = self._with(record)

    def _with(self, record: StepRecord) -> Stats:
        total = self._total
        return replace(
            total,
            steps=total.steps + (record.purpose == GRADIENTS),
            bytes_sent=total.bytes_sent + record.bytes_sent,
            wire_seconds=total.wire_seconds + (record.wire_seconds or 0.0),
            exposed_seconds=total.exposed_seconds + (record.exposed_seconds or 0.0),
            compute_seconds=total.compute_seconds + (record.compute_seconds or 0.0),
        )

    def overflowed(self) -> None:
        """The latest step turned out not to count; what it sent was sent."""
        with self._lock:
            self._total = replace(self._total, overflows=self._total.overflows + 1)

    def snapshot(self) -> Stats:
        """Totals and recent records, safe to keep."""
        with self._lock:
            return replace(self._total, records=tuple(self._records))


def _covered(ops: Iterable[OpRecord]) -> float:
    """Length of the union of the intervals in which collectives were under way."""
    total, until = 0.0, 0.0
    for op in sorted((op for op in ops if op.kind != Await.__name__), key=lambda op: op.issued):
        ended = op.issued if op.ended is None else op.ended
        if ended > until:
            total += ended - max(op.issued, until)
            until = ended
    return total
