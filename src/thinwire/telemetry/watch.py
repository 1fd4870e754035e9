"""Brings finished step records to sinks, on the training loop's own thread."""

import math
from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from thinwire.handle import Wire
from thinwire.programs.audit import AuditRecord
from thinwire.telemetry.sinks import AUDIT, Row, Sink
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
        self._audited = wire.audits()[-1:]
        self._hook = ddp.register_forward_pre_hook(lambda module, args: self.flush())

    def flush(self) -> None:
        """Send what has finished since the last time."""
        records = self._wire.stats().records
        known = next((place for place, record in enumerate(records, 1) if record is self._latest), 0)
        for record in records[known:]:
            self._latest = record
            self._send(as_row(record))
        audits = self._wire.audits()
        known = next((place for place, audit in enumerate(audits, 1) if audit in self._audited), 0)
        for audit in audits[known:]:
            self._audited = (audit,)
            self._send(as_audit_row(audit))

    def _send(self, row: Row) -> None:
        for sink in self._sinks:
            sink.write(row)

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


def as_audit_row(audit: AuditRecord) -> Row:
    """An audit as plain values: the errors and residuals of all parameters by name, and what followed."""
    return {
        "step": audit.step,
        "purpose": AUDIT,
        "of": audit.purpose,
        "error": _finite(audit.error),
        "residual": audit.residual,
        "worst": audit.worst,
        "worst_error": _finite(audit.parameters[audit.worst].error),
        "action": audit.action,
        **{f"error/{name}": _finite(one.error) for name, one in audit.parameters.items()},
        **{f"residual/{name}": one.residual for name, one in audit.parameters.items()},
    }


def _finite(error: float) -> float | None:
    """JSON has no infinity, which an error is where the exact mean is zero and the compressed one is not."""
    return error if math.isfinite(error) else None
