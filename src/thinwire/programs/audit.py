"""What compression costs in accuracy: now and then, the exact mean is taken beside the compressed one.

    error of a parameter = |compressed mean - exact mean| / |exact mean|

With error feedback the compressed mean also brings what earlier steps left out, which the exact one does not:
then an error of 1 says that as much is late as is new, not that anything is lost. An audited step sends the
exact mean on top of its own bytes (float32, metered under `Audit`), 32 bytes a parameter, and keeps one more
copy of a bucket while it runs.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from thinwire.programs.allreduce import Exact
from thinwire.programs.memory import Memory
from thinwire.programs.program import Bucket, Outcome, Program
from thinwire.wire.ops import AllReduce, Broadcast, Steps
from thinwire.wire.pack import real_numbers, unpack

_NEXT_TO_NOTHING = 1e-3
"""Of the model's root mean square: a parameter whose gradient is smaller is held against this instead."""


class Audit(AllReduce):
    """The exact mean, to hold the compressed one against; an all-reduce that is metered by its own name."""


@dataclass(frozen=True)
class ParameterAudit:
    """How one parameter fared: the relative error of its mean, and the norm of all ranks' residuals of it."""

    error: float
    residual: float


@dataclass(frozen=True)
class AuditRecord:
    """One audit.

    Attributes:
        step: The step that was audited.
        error: The relative error of all compressed gradients together.
        residual: The norm of all ranks' residuals.
        parameters: Each compressed parameter's own figures. A gradient that is next to nothing, under a
            thousandth of the model's root mean square, is held against that instead of itself.
        purpose: What was exchanged, `"gradients"` or `"models"`.
        action: What followed from it, in words; empty where the limit holds.
    """

    step: int
    error: float
    residual: float
    parameters: Mapping[str, ParameterAudit] = field(repr=False)
    purpose: str = "gradients"
    action: str = ""

    @property
    def worst(self) -> str:
        """The parameter with the largest error."""
        return max(self.parameters, key=lambda name: self.parameters[name].error)


class Findings:
    """Collects what the buckets of one audited step show."""

    def __init__(self) -> None:
        self._rows: dict[str, tuple[float, float, float, int]] = {}

    def record(self, step: int, purpose: str) -> AuditRecord | None:
        """The audit; None where nothing was compressed."""
        if not self._rows:
            return None
        off, exact, owed, count = (sum(column) for column in zip(*self._rows.values(), strict=True))
        floor = _NEXT_TO_NOTHING**2 * exact / max(count, 1)
        parameters = {
            name: ParameterAudit(_ratio(one[0], max(one[1], floor * one[3])), math.sqrt(one[2]))
            for name, one in self._rows.items()
        }
        return AuditRecord(step, _ratio(off, exact), math.sqrt(owed), parameters, purpose)

    def take(self, bucket: Bucket, squares: torch.Tensor) -> None:
        """A bucket's sums of squares, by parameter: of the error, of the exact mean, of all residuals."""
        for name, shape, (off, exact, owed) in zip(
            bucket.names, bucket.shapes, squares.tolist(), strict=True
        ):
            self._rows[name] = (off, exact, owed, shape.numel())


@dataclass(frozen=True)
class Audited:
    """Runs `program`, and looks how far its mean is from the exact one; the mean stays the program's."""

    program: Program
    findings: Findings = field(repr=False, compare=False)

    def __call__(self, bucket: Bucket, memory: Memory) -> Steps[Outcome]:
        """The program, then the exact mean; ranks hear rank 0's figures, so that all conclude the same."""
        if isinstance(self.program, Exact):
            return (yield from self.program(bucket, memory))
        given = real_numbers(bucket.buffer)
        exact = given.to(torch.promote_types(given.dtype, torch.float32), copy=True)
        outcome = yield from self.program(bucket, memory)
        owed = exact.new_tensor([_squares(memory.residuals_of(name)) for name in bucket.names])
        sums = yield Audit(torch.cat([exact.mul_(1 / bucket.world_size), owed]))
        exact, owed = sums[: -len(bucket.names)], sums[-len(bucket.names) :]
        off = real_numbers(outcome.mean).to(exact.dtype) - exact
        rows = [
            torch.stack([torch.stack([one.square().sum() for one in unpack(part, bucket.shapes)])])
            for part in (off, exact)
        ]
        squares = yield Broadcast(torch.cat([*rows, owed[None]]).mT.contiguous(), src=0)
        if squares.isfinite().all():
            self.findings.take(bucket, squares)
        return outcome


def with_action(record: AuditRecord, action: str) -> AuditRecord:
    """The record, and what followed."""
    return replace(record, action=action)


def _squares(tensors: list[torch.Tensor]) -> float:
    return sum(float(tensor.abs().square().sum()) for tensor in tensors)


def _ratio(off: float, exact: float) -> float:
    """Of two sums of squares; of nothing, what is off is infinitely wrong."""
    if exact > 0:
        return math.sqrt(off / exact)
    return math.inf if off > 0 else 0.0
