"""Brings finished step records to sinks, on the training loop's own thread."""

from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from thinwire.handle import Wire
from thinwire.telemetry.sinks import Row, Sink
from thinwire.wire.meter import StepRecord


def watch(ddp: DistributedDataParallel, wire: Wire, *sinks: Sink) -> "Watch":
    """Send every finished step of `wire` to `sinks`, from the start of the next forward pass.

    The training loop stays as it is. Call it on the ranks whose figures you want, rank 0 mostly: records are
    each rank's own. `close()` it, or use it as a context manager, so that the last step arrives too.

    Args:
        ddp: The model that the wire belongs to.
        wire: What `attach` returned.
        sinks: Anything with `write(row)` and `close()`.
    """
    return Watch(ddp, wire, sinks)


class Watch:
    """A running `watch`; the context manager closes it."""

    def __init__(self, ddp: DistributedDataParallel, wire: Wire, sinks: tuple[Sink, ...]) -> None:
        self._wire = wire
        self._sinks = sinks
        self._latest = wire.stats().last
        self._hook = ddp.register_forward_pre_hook(lambda module, args: self.flush())

    def flush(self) -> None:
        """Send what has finished since the last time."""
        records = self._wire.stats().records
        known = next((place for place, record in enumerate(records, 1) if record is self._latest), 0)
        for record in records[known:]:
            self._latest = record
            for sink in self._sinks:
                sink.write(as_row(record))

    def close(self) -> None:
        """Send the rest, and end; a second call does nothing."""
        self._hook.remove()
        with ExitStack() as closing:  # one that fails does not keep the others open
            for sink in self._sinks:
                closing.callback(sink.close)
            self.flush()
            self._sinks = ()

    def __enter__(self) -> "Watch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def as_row(record: StepRecord) -> Row:
    """A step as plain values; times are None on accelerators, where nobody can tell without stopping them."""
    by_kind: Mapping[str, Any] = {f"bytes/{kind}": count for kind, count in record.bytes_by_kind.items()}
    return {
        "step": record.step,
        "purpose": record.purpose,
        "bytes_sent": record.bytes_sent,
        "compute_seconds": record.compute_seconds,
        "wire_seconds": record.wire_seconds,
        "exposed_seconds": record.exposed_seconds,
        "collectives": len(record.ops),
        **by_kind,
    }
