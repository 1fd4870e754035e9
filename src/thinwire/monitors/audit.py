"""Audits, which measure the error of compression against the exact mean in some steps.

    error of a parameter = |compressed mean - exact mean| / |exact mean|

With error feedback the compressed mean also contains residuals of earlier steps, and the exact one does not.
An error of 1 then means that the delayed part is as large as the new gradient, not that anything is lost. An
audited step sends the exact mean on top of its own bytes (float32, metered under `Audit`) and 32 bytes per
parameter. It keeps one more copy of a bucket while it runs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from thinwire.engine.ops import AllReduce, Broadcast, Collectives
from thinwire.engine.pack import pack, real_numbers, unpack
from thinwire.programs.allreduce import Exact
from thinwire.programs.memory import Memory
from thinwire.programs.program import Bucket, Outcome
from thinwire.programs.wrapper import Wrapper

_NEXT_TO_NOTHING = 1e-3
"""Fraction of the model's root mean square that is the least denominator of a parameter's error."""


class Audit(AllReduce):
    """The all-reduce of the exact mean, metered under its own name."""


@dataclass(frozen=True)
class ParameterAudit:
    """The figures of one parameter in an audit.

    Attributes:
        error: The relative error of its compressed mean.
        residual: The norm of all ranks' residuals.
    """

    error: float
    residual: float


@dataclass(frozen=True)
class AuditRecord:
    """One audit.

    Attributes:
        step: The step that was audited.
        error: The relative error of all compressed gradients together.
        residual: The norm of all ranks' residuals.
        parameters: The figures of each compressed parameter, by name. If the root mean square of its exact
            mean is under a thousandth of the model's, the error is relative to that thousandth.
        purpose: The purpose of the exchange, `"gradients"` or `"models"`.
        action: The action that was taken, such as `"warned"`; empty if no limit was exceeded.
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
    """The sums of squares of one audited step, collected by bucket and read after backward."""

    def __init__(self) -> None:
        self._sizes: list[dict[str, int]] = []
        self._squares: list[torch.Tensor] = []

    def take(self, means: Mapping[str, torch.Tensor], squares: torch.Tensor) -> None:
        """Add a bucket's sums of squares by parameter: of the error, the exact mean, and all residuals."""
        self._sizes.append({name: mean.numel() for name, mean in means.items()})
        self._squares.append(squares)

    def record(self, step: int, purpose: str) -> AuditRecord | None:
        """Return the record of the audit, with a single read; None if nothing was compressed."""
        rows = self._rows()
        if not rows:
            return None
        off, exact, residual, count = (sum(column) for column in zip(*rows.values(), strict=True))
        floor = _NEXT_TO_NOTHING**2 * exact / max(count, 1)
        parameters = {
            name: ParameterAudit(_ratio(error, max(mean, floor * size)), math.sqrt(kept))
            for name, (error, mean, kept, size) in rows.items()
        }
        return AuditRecord(step, _ratio(off, exact), math.sqrt(residual), parameters, purpose)

    def _rows(self) -> dict[str, tuple[float, float, float, int]]:
        """Return the sums of squares and the size of each parameter, without buckets that overflowed."""
        if not self._squares:
            return {}
        read, rows = iter(torch.cat(self._squares).tolist()), {}
        for sizes in self._sizes:
            own = {name: (*next(read), size) for name, size in sizes.items()}
            if all(math.isfinite(number) for row in own.values() for number in row):
                rows.update(own)
        return rows


@dataclass(frozen=True, repr=False)
class Audited(Wrapper):
    """A program that runs another one and measures the error of its mean. The mean is not changed."""

    findings: Findings = field(repr=False, compare=False)

    def __call__(self, bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
        """Run the program, then the exact mean. All ranks use rank 0's figures, so that all act the same."""
        audited = [name for name in bucket.names if name not in bucket.exact]
        if isinstance(self.program, Exact) or not audited:
            return (yield from self.program(bucket, memory))
        given = pack(_numbers(bucket, audited))  # before the program overwrites the buffer
        outcome = yield from self.program(bucket, memory)
        residuals = torch.stack([_squares(memory.residuals_of(name), given) for name in audited])
        sums = yield Audit(torch.cat([given.mul_(1 / bucket.world_size), residuals]))
        exact, residuals = sums[: -len(audited)], sums[-len(audited) :]
        means = _numbers(replace(bucket, buffer=outcome.mean), audited)
        rows = []
        for mean, true in zip(means, unpack(exact, [mean.shape for mean in means]), strict=True):
            rows.append(torch.stack([(mean - true).square().sum(), true.square().sum()]))
        # Sums of squares may differ in their last bits between hosts. One rank's figures decide for all, or
        # only some ranks would exceed the limit and fall back.
        squares = yield Broadcast(torch.cat([torch.stack(rows), residuals[:, None]], dim=1), src=0)
        self.findings.take(dict(zip(audited, means, strict=True)), squares)
        return outcome


def with_action(record: AuditRecord, action: str) -> AuditRecord:
    """Return the record with the action that was taken."""
    return replace(record, action=action)


def _numbers(bucket: Bucket, names: Sequence[str]) -> list[torch.Tensor]:
    """Return some gradients as real numbers of at least float32."""
    views = bucket.views()
    dtype = torch.promote_types(real_numbers(bucket.buffer[:0]).dtype, torch.float32)
    return [real_numbers(views[name]).to(dtype) for name in names]


def _squares(tensors: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Return the sum of all squares, as a scalar of the dtype and device of `like`."""
    return sum((tensor.abs().square().sum().to(like) for tensor in tensors), start=like.new_zeros(()))


def _ratio(off: float, exact: float) -> float:
    """Return the relative error from two sums of squares; infinite if only the exact sum is 0."""
    if exact > 0:
        return math.sqrt(off / exact)
    return math.inf if off > 0 else 0.0
