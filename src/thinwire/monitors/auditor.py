"""The auditor, which decides when to audit and acts on the results."""

import logging
from collections import deque
from collections.abc import Mapping
from numbers import Real
from typing import Literal, TypeAlias

from thinwire.codecs.checks import check_whole
from thinwire.errors import AuditError, OptionError
from thinwire.monitors.audit import Audited, AuditRecord, Findings, with_action
from thinwire.programs.description import short
from thinwire.programs.program import Program
from thinwire.programs.wrapper import as_program

logger = logging.getLogger("thinwire")

OnExcess: TypeAlias = Literal["warn", "raise"] | Program
"""`"warn"`, `"raise"`, or a program to fall back to."""


def watched_all(
    program: Program, exceptions: Mapping[str, Program], findings: Findings | None
) -> tuple[Program, Mapping[str, Program]]:
    """Return a program and its exceptions, wrapped in `Audited` if `findings` is given."""
    if findings is None:
        return program, exceptions
    audited = {id(other): Audited(other, findings) for other in (program, *exceptions.values())}
    return audited[id(program)], {name: audited[id(other)] for name, other in exceptions.items()}


class Auditor:
    """A schedule of audits, with the latest records and a limit on the error.

    Args:
        every: The number of exchanges from one audit to the next. 0 never audits.
        limit: The largest relative error that any parameter may have. None sets no limit.
        on_excess: The action when the limit is exceeded.
        history: The number of records to keep.

    Raises:
        OptionError: An argument is not valid.
    """

    def __init__(self, every: int, limit: float | None, on_excess: OnExcess, history: int) -> None:
        check_audit(every, limit, on_excess)
        self.every = every
        self.limit = limit
        self.on_excess = on_excess
        self.records: deque[AuditRecord] = deque(maxlen=history)

    def begin(self, number: int) -> Findings | None:
        """Begin an exchange, numbered from 0; return its empty findings, or None if it is not audited."""
        return Findings() if self.every > 0 and (number + 1) % self.every == 0 else None

    def conclude(self, findings: Findings | None, step: int, purpose: str) -> Program | None:
        """Record an audited exchange, and act if the limit is exceeded.

        All ranks have the same figures, so all act the same.

        Args:
            findings: The result of `begin`.
            step: The step of the exchange.
            purpose: The purpose of the exchange, `"gradients"` or `"models"`.

        Returns:
            The program to fall back to, or None to continue.

        Raises:
            AuditError: The limit is exceeded, and `on_excess` is `"raise"`.
        """
        record = None if findings is None else findings.record(step, purpose)
        if record is None:
            return None
        worst = record.parameters[record.worst]
        if self.limit is None or worst.error <= self.limit:
            self.records.append(record)
            logger.info("audit at step %d: error %.3g, worst %s", step, record.error, record.worst)
            return None
        text = (
            f"audit at step {step}: the compressed mean of {record.worst!r} has a relative error of"
            f" {worst.error:.3g}, above max_error={self.limit:g} (all {purpose}: {record.error:.3g})"
        )
        if self.on_excess == "raise":
            self.records.append(with_action(record, "raised"))
            raise AuditError(
                f"{text}. Compress less (a higher rank, more bits), give that parameter a rule, or raise"
                " max_error"
            )
        fallback = None if isinstance(self.on_excess, str) else self.on_excess
        action = "warned" if fallback is None else f"fell back to {short(fallback)}"
        self.records.append(with_action(record, action))
        logger.warning("%s; %s", text, action)
        return fallback


def check_audit(every: object, limit: object, on_excess: object) -> None:
    """Raise OptionError unless these are valid options for audits."""
    check_whole("audit_every", every, 0, "0 never audits")
    if limit is not None:
        if not isinstance(limit, Real) or isinstance(limit, bool) or not float(limit) > 0:
            raise OptionError(f"max_error={limit!r} must be a positive number: 0.5 is half of the exact mean")
        if every == 0:
            raise OptionError(f"max_error={limit!r} needs audits: pass audit_every=1000, for example")
    if on_excess not in ("warn", "raise"):
        if isinstance(on_excess, str):
            raise OptionError(f"on_excess={on_excess!r} must be 'warn', 'raise' or a program to fall back to")
        as_program(on_excess, "on_excess")
