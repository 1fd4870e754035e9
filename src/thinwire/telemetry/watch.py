"""Delivery of finished step records to sinks, on the training loop's own thread."""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.engine.meter import GRADIENTS, StepRecord
from thinwire.errors import OptionError
from thinwire.models.ddp.internals import called_module
from thinwire.models.ddp.unwrap import ddp_of
from thinwire.monitors.audit import AuditRecord
from thinwire.plan.auto import Auto
from thinwire.programs.description import short
from thinwire.telemetry.sinks import AUDIT, LOGGED, Checked, Row, Sink
from thinwire.wire import Wire

logger = logging.getLogger("thinwire")

Ranks: TypeAlias = Literal["rank0", "all"]
"""The ranks that send their rows to sinks."""


def watch(ddp: nn.Module, wire: Wire, *sinks: Sink, ranks: Ranks = "rank0") -> "Watch":
    """Send every finished step of `wire` to `sinks`.

    A step is sent when the next forward pass begins. The training loop does not change. Call `watch` on
    every rank. By default only the first rank of the model's process group writes, and sinks of the other
    ranks open no file. Call `close()`, or use the result as a context manager, to send the last step.

    A sink that fails during training, as on a full disk, does not end it. One warning names the error, and
    the sink receives no more rows.

    Rows contain the rank in the whole job, and sinks separate ranks by it. If several groups train in one
    job, as with tensor parallelism, the first rank of each group writes, each to its own file.

    Args:
        ddp: The model that the wire belongs to.
        wire: The result of `attach`.
        *sinks: Objects with `write(row)` and `close()`.
        ranks: `"rank0"`, the first rank of the group, or `"all"`. With `"all"` every rank writes its own
            rows, and sinks separate them. Rank 1's `JsonLines("steps.jsonl")` is `steps-rank1.jsonl`, its
            `TensorBoard("runs")` is `runs/rank1`, its lines on the console begin with `rank 1`, and its
            `WandB()` is a separate run.

    Returns:
        The running watch.

    Raises:
        OptionError: `ranks` has another value, or a file of this rank cannot be written.

    Example::

        with telemetry.watch(ddp, wire, telemetry.JsonLines("steps.jsonl")):
            train(ddp)
    """
    if ranks not in get_args(Ranks):
        raise OptionError(f"ranks={ranks!r} is not one of {', '.join(map(repr, get_args(Ranks)))}")
    return Watch(ddp_of(ddp), wire, sinks, ranks)


class Watch:
    """The handle of a running `watch`. As a context manager it closes itself.

    Example::

        with telemetry.watch(ddp, wire, telemetry.JsonLines("steps.jsonl")) as watch:
            for batch in batches:
                loss = loss_of(ddp(batch))
                loss.backward()
                watch.log(loss=loss)
    """

    def __init__(
        self, ddp: DistributedDataParallel, wire: Wire, sinks: tuple[Sink, ...], ranks: Ranks = "rank0"
    ) -> None:
        group = ddp.process_group
        # The rank in the job. In a job of several groups, each group has a rank 0, and their files would
        # collide.
        self._place = {"rank": dist.get_rank(), "world_size": group.size()}
        self._wire = wire
        self._sinks = sinks
        self._silent = ranks == "rank0" and group.rank() != 0
        for sink in sinks:
            if isinstance(sink, Checked) and not self._silent:
                sink.check_writable()
        self._seen = wire.stats().exchanges
        self._audited = wire.audits()[-1:]
        self._logged: dict[str, tuple[float | torch.Tensor, int]] = {}
        """The sum and the number of the values that the running step has logged, by name."""
        self._program, self._sent_program = _program_of(wire), ""
        flush = torch.compiler.disable(lambda module, args: self.flush())
        # Rows are sent from the next forward pass, on the training loop's own thread: the wire thread must
        # not wait for a disk or a service.
        self._hook = called_module(ddp).register_forward_pre_hook(flush)

    def flush(self) -> None:
        """Send the steps and audits that have finished since the last call."""
        if self._silent:
            return
        stats = self._wire.stats()
        new = min(stats.exchanges - self._seen, len(stats.records))
        for record in stats.records[len(stats.records) - new :]:
            self._seen += 1
            self._send(as_row(record) | (self._of_step() if record.purpose == GRADIENTS else {}))
        # A schedule's own forward hook came first and may have changed the program, for the next step.
        self._program = _program_of(self._wire)
        self._seen = stats.exchanges  # the history may have dropped some before they were sent
        audits = self._wire.audits()
        known = next((place for place, audit in enumerate(audits, 1) if audit in self._audited), 0)
        for audit in audits[known:]:
            self._audited = (audit,)
            self._send(as_audit_row(audit))

    def log(self, **values: float | torch.Tensor) -> None:
        """Add values such as the loss to the row of the running step.

        Call it before or after the step's backward. Of several calls in one step, as with accumulated
        gradients, the mean is sent. Values are those of this rank. A tensor is read when the row is sent, so
        that the loop does not wait for an accelerator. `thinwire report` draws each name by step.

        Args:
            **values: Numbers, or tensors with one number, by name.

        Raises:
            OptionError: A value is not one number.
        """
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
                value = value.detach().float()
            elif not isinstance(value, int | float):
                shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
                raise OptionError(
                    f"{name} is a {type(value).__name__}{shape}, expected one number: log loss.mean(), or"
                    " float(value)"
                )
            if not self._silent:
                total, count = self._logged.get(name, (0.0, 0))
                self._logged[name] = (total + value, count + 1)

    def _of_step(self) -> Row:
        """Return the values that were logged in a finished step, and the program if it has changed."""
        means = {name: float(total) / count for name, (total, count) in self._logged.items()}
        row: Row = {f"{LOGGED}{name}": _finite(mean) for name, mean in means.items()}
        self._logged = {}
        if self._program != self._sent_program:
            self._sent_program = row["program"] = self._program
        return row

    def _send(self, row: Row) -> None:
        row = row | self._place | {"time": round(time.time(), 3)}
        for sink in self._sinks:
            if not self._works(sink, partial(sink.write, dict(row))):
                self._sinks = tuple(other for other in self._sinks if other is not sink)
                with contextlib.suppress(Exception):  # it may fail again, on what it could not write
                    sink.close()

    def _works(self, sink: Sink, call: Callable[[], None]) -> bool:
        """Call a sink, and return whether it succeeded; log a warning if not."""
        try:
            call()
        except Exception as error:  # raised, it would end this rank, and the others would wait for it
            logger.warning(
                "the telemetry sink %s failed (%s: %s) and receives no more rows. Training continues",
                type(sink).__name__,
                type(error).__name__,
                error,
                exc_info=not isinstance(error, OSError),
            )
            return False
        return True

    def close(self) -> None:
        """Send the remaining steps and close all sinks. A second call does nothing."""
        self._hook.remove()
        try:
            self.flush()
        finally:
            sinks, self._sinks = self._sinks, ()
            for sink in sinks:
                self._works(sink, sink.close)

    def __enter__(self) -> "Watch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _program_of(wire: Wire) -> str:
    """Return the short name of the running program. For `Auto` it is its choice."""
    running = wire.program
    return short(running.gradient_program() if isinstance(running, Auto) else running)


def as_row(record: StepRecord) -> Row:
    """Convert a step to plain values.

    Times are None on accelerators, where measuring them would need a synchronisation.

    Args:
        record: A record of `wire.stats()`.

    Returns:
        The figures by name.
    """
    by_kind: Mapping[str, Any] = {f"bytes/{kind}": count for kind, count in record.bytes_by_kind.items()}
    of_gradients: Mapping[str, Any] = {"overflowed": record.overflowed, "ddp_bytes": record.ddp_bytes}
    return {
        "step": record.step,
        "purpose": record.purpose,
        **(of_gradients if record.purpose == GRADIENTS else {}),
        "bytes_sent": record.bytes_sent,
        "encode_seconds": record.encode_seconds,
        "wire_seconds": record.wire_seconds,
        "exposed_seconds": record.exposed_seconds,
        "collectives": len(record.ops),
        **by_kind,
    }


def as_audit_row(audit: AuditRecord) -> Row:
    """Convert an audit to plain values, with errors and residuals by parameter and the action taken.

    Args:
        audit: A record of `wire.audits()`.

    Returns:
        The figures by name.
    """
    return {
        "step": audit.step,
        "purpose": AUDIT,
        "of": audit.purpose,
        "error": _finite(audit.error),
        "residual": audit.residual,
        "worst": audit.worst,
        "worst_error": _finite(audit.parameters[audit.worst].error),
        "action": audit.action,
        **{f"error/{name}": _finite(figures.error) for name, figures in audit.parameters.items()},
        **{f"residual/{name}": figures.residual for name, figures in audit.parameters.items()},
    }


def _finite(error: float) -> float | None:
    """Replace a non-finite number by None for JSON. An error is infinite if only the exact mean is zero."""
    return error if math.isfinite(error) else None
