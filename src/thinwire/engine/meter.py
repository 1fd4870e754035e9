"""The cost of every step: bytes sent, time on the wire, exposed time.

Bytes come from the tensors handed to each collective. Times are read from the host clock, without
synchronising any device. On accelerators, where the host runs ahead, they are `None`.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from thinwire.engine.ops import Await, Collective

GRADIENTS, MODELS, PARAMETERS = "gradients", "models", "parameters"
"""The purposes of a step: the kind of tensors that it exchanges."""


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
        step: Counted from 0, without accumulation steps under `no_sync`. For an exchange of models, the
            number of training steps that had ended when it began.
        ops: Every collective, in issue order, which is the same on every rank.
        encode_seconds: Time spent in the programs themselves (encode, decode, matmuls).
        wire_seconds: Time during which at least one collective was in flight.
        exposed_seconds: Time that backward spent waiting after its own work was done. It is 0 in the first
            step of `static_graph`, where DDP waits in a place that thinwire cannot measure.
        overflowed: Whether the step was skipped because a gradient was non-finite. It is valid after
            backward.
    """

    step: int
    ops: tuple[OpRecord, ...]
    encode_seconds: float | None
    wire_seconds: float | None
    exposed_seconds: float | None
    purpose: str = GRADIENTS
    """`"gradients"`, or `"models"` (averaged models), or `"parameters"` (`ZeRO`)."""
    overflowed: bool = False
    ddp_bytes: int = 0
    """Bytes that this rank would have sent for this step with plain DDP; 0 if it exchanged no gradients."""

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank put on the network, without headers."""
        return sum(op.bytes_sent for op in self.ops)

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes that this rank put on the network, by kind of collective."""
        by_kind: Counter[str] = Counter()
        for op in self.ops:
            if op.kind != Await.__name__:  # which sends nothing
                by_kind[op.kind] += op.bytes_sent
        return dict(by_kind)

    @property
    def order(self) -> tuple[tuple[int, int, str], ...]:
        """The (bucket, stage, kind) of every collective, in issue order."""
        return tuple((op.bucket, op.stage, op.kind) for op in self.ops)


@dataclass(frozen=True)
class Stats:
    """A snapshot of totals since attach and of the most recent steps, exchanges of models included.

    `steps` counts backward passes. An exchange of models adds to bytes and times only.

    Example::

        print(wire.stats().last.bytes_sent)
    """

    steps: int
    bytes_sent: int
    wire_seconds: float
    exposed_seconds: float
    encode_seconds: float
    overflows: int
    """Steps that were skipped, because a gradient was non-finite on some rank."""
    exchanges: int
    """Number of records since attach, of backward passes and of exchanges of models or parameters."""
    records: tuple[StepRecord, ...] = field(repr=False)
    ddp_bytes: int = 0
    """Bytes that this rank would have sent in these steps with plain DDP."""

    def __str__(self) -> str:
        text = f"{_steps(self.steps)}: {sent_text(self.bytes_sent, self.ddp_bytes)}"
        text += f", exposed {self.exposed_seconds:.3g} s"
        return f"{text}, {_steps(self.overflows)} skipped after overflows" if self.overflows else text

    @property
    def compression(self) -> float | None:
        """Bytes of plain DDP over those sent. None before the first exchange, and with one rank."""
        return self.ddp_bytes / self.bytes_sent if self.bytes_sent else None

    @property
    def last(self) -> StepRecord | None:
        """The latest finished step, or None before the first."""
        return self.records[-1] if self.records else None


class StepTrace:
    """A recorder of one running step, written to by the thread that advances the scheduler."""

    def __init__(self, step: int, rank: int, size: int, purpose: str = GRADIENTS) -> None:
        self.step = step
        self.purpose = purpose
        self.encode_seconds = 0.0
        self._rank = rank
        self._size = size
        self._ops: list[OpRecord] = []

    def issued(self, bucket: int, stage: int, op: Collective | Await) -> OpRecord:
        """Record a collective at the moment it is issued."""
        sent = 0 if isinstance(op, Await) else op.bytes_sent(*op.place(self._rank, self._size))
        record = OpRecord(bucket, stage, type(op).__name__, sent, issued=time.perf_counter())
        self._ops.append(record)
        return record

    def finish(self, exposed: float, *, timed: bool) -> StepRecord:
        """Return the record of the finished step; its times are None unless `timed`."""
        return StepRecord(
            step=self.step,
            ops=tuple(self._ops),
            encode_seconds=self.encode_seconds if timed else None,
            wire_seconds=_covered(self._ops) if timed else None,
            exposed_seconds=exposed if timed else None,
            purpose=self.purpose,
        )


class Meter:
    """A store of the latest step records and of totals. Engines on several threads may share it.

    Args:
        history: The number of records to keep.
        ddp_bytes: Bytes that this rank would send in one step with plain DDP.
    """

    def __init__(self, history: int = 1000, ddp_bytes: int = 0) -> None:
        # Reentrant: a signal handler that calls stats() may interrupt this thread while it holds the lock.
        self._lock = threading.RLock()
        self._records: deque[StepRecord] = deque(maxlen=history)
        self._total = Stats(0, 0, 0.0, 0.0, 0.0, 0, 0, ())
        self._ddp_bytes = ddp_bytes

    def add(self, record: StepRecord) -> None:
        """Add the record of a finished step."""
        if record.purpose == GRADIENTS:
            record = replace(record, ddp_bytes=self._ddp_bytes)
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
            encode_seconds=total.encode_seconds + (record.encode_seconds or 0.0),
            exchanges=total.exchanges + 1,
            ddp_bytes=total.ddp_bytes + record.ddp_bytes,
        )

    def overflowed(self) -> None:
        """Mark the latest record of gradients as overflowed. Its bytes and times still count."""
        with self._lock:
            self._total = replace(self._total, overflows=self._total.overflows + 1)
            for place in reversed(range(len(self._records))):
                record = self._records[place]
                if record.purpose == GRADIENTS:
                    self._records[place] = replace(record, overflowed=True)
                    return

    def snapshot(self) -> Stats:
        """Return totals and recent records, as an immutable copy."""
        with self._lock:
            return replace(self._total, records=tuple(self._records))


def sent_text(sent: int, ddp: int) -> str:
    """Describe bytes sent, relative to those of plain DDP.

    >>> sent_text(37_600_000, 146_640_000), sent_text(200_000, 100_000), sent_text(0, 100)
    ('37.6 MB sent, 3.9 x less than plain DDP', '0.2 MB sent, 2 x more than plain DDP', '0 MB sent')
    """
    text = f"{sent / 1e6:.3g} MB sent"
    if not sent or not ddp:
        return text
    return f"{text}, {ratio_text(ddp / sent)} plain DDP"


def ratio_text(compression: float) -> str:
    """Describe plain DDP's bytes over those sent, as words before "plain DDP".

    A few bytes a step, such as the checks of ZeRO, are no difference worth a figure.

    >>> ratio_text(3.912), ratio_text(0.5), ratio_text(114.3), ratio_text(0.998)
    ('3.9 x less than', '2 x more than', '114 x less than', 'as much as')
    """
    ratio, word = (compression, "less") if compression >= 1 else (1 / compression, "more")
    if ratio < 1.05:  # two digits would show 1
        return "as much as"
    return f"{ratio:.2g} x {word} than" if ratio < 100 else f"{ratio:,.0f} x {word} than"


def _steps(count: int) -> str:
    return f"{count} step{'' if count == 1 else 's'}"


def _covered(ops: Iterable[OpRecord]) -> float:
    """Return the length of the union of the intervals in which collectives were in flight."""
    total, until = 0.0, 0.0
    for op in sorted((op for op in ops if op.kind != Await.__name__), key=lambda op: op.issued):
        ended = op.issued if op.ended is None else op.ended
        if ended > until:
            total += ended - max(op.issued, until)
            until = ended
    return total
