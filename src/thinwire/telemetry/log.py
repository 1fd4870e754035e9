"""Reads back what `JsonLines` has written: a training of months, in arrays of a few bytes a step."""

import json
import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thinwire.errors import StateError
from thinwire.programs.audit import Audit
from thinwire.telemetry.sinks import AUDIT, Row
from thinwire.wire.meter import GRADIENTS

_AUDIT_BYTES = f"bytes/{Audit.__name__}"
_WRONG = (AttributeError, KeyError, OverflowError, TypeError, ValueError)


@dataclass
class Series:
    """The exchanges of one purpose, in the order of the log.

    Attributes:
        steps: The step of each.
        own: Bytes that the program sent.
        audit: Bytes of the exact mean on top; 0 where nothing was audited.
        wire: Seconds with a collective under way; NaN where nobody can tell.
        exposed: Seconds that backward waited; likewise.
    """

    steps: "array[int]" = field(default_factory=lambda: array("q"))
    own: "array[int]" = field(default_factory=lambda: array("q"))
    audit: "array[int]" = field(default_factory=lambda: array("q"))
    wire: "array[float]" = field(default_factory=lambda: array("d"))
    exposed: "array[float]" = field(default_factory=lambda: array("d"))

    def take(self, row: Row) -> None:
        """Add a row; what is not gradients may take several exchanges a step, which are one here."""
        audit = row.get(_AUDIT_BYTES, 0)
        values: tuple[tuple[Any, float], ...] = (
            (self.own, (row["bytes_sent"] or 0) - audit),
            (self.audit, audit),
            (self.wire, _or(math.nan, row["wire_seconds"])),
            (self.exposed, _or(math.nan, row["exposed_seconds"])),
        )
        purpose, step = row.get("purpose", GRADIENTS), row["step"]
        again = purpose != GRADIENTS and len(self.steps) > 0 and self.steps[-1] == step
        if not again:
            self.steps.append(step)
        for column, value in values:
            if again:
                column[-1] += value
            else:
                column.append(value)


@dataclass
class Parameter:
    """One parameter through all audits; `residual` is the latest."""

    steps: "array[int]" = field(default_factory=lambda: array("q"))
    errors: "array[float]" = field(default_factory=lambda: array("d"))
    residual: float = 0.0


@dataclass(frozen=True)
class Audited:
    """One audit without its parameters; errors may be infinite."""

    step: int
    of: str
    error: float
    residual: float
    worst: str
    worst_error: float
    action: str


@dataclass
class Log:
    """A whole training log.

    Attributes:
        series: By purpose: `"gradients"`, `"models"`, `"parameters"`.
        parameters: By name.
        cut: Whether the last line was cut off, and left out.
    """

    series: dict[str, Series] = field(default_factory=dict)
    audits: list[Audited] = field(default_factory=list)
    parameters: dict[str, Parameter] = field(default_factory=dict)
    cut: bool = False

    @staticmethod
    def of(rows: Iterable[Row]) -> "Log":
        """The log of these rows."""
        log = Log()
        for row in rows:
            log.take(row)
        return log

    @staticmethod
    def load(path: Path) -> "Log":
        """Read a file of `JsonLines`; raises StateError where it is damaged, except for a cut-off end."""
        log = Log()
        try:
            for number, line in _lines(path):
                log._take_line(path, number, line)
        except OSError as error:
            raise StateError(f"{path} cannot be read: {error.strerror}") from error
        if not log.series:
            raise StateError(
                f"{path} has no whole step yet: telemetry.JsonLines writes one when the next forward pass"
                " begins, and the last when the watch is closed"
            )
        return log

    def take(self, row: Row) -> None:
        """Add a step, or an audit."""
        purpose = row.get("purpose", GRADIENTS)
        if purpose == AUDIT:
            self._take_audit(row)
        else:
            self.series.setdefault(purpose, Series()).take(row)

    def _take_line(self, path: Path, number: int, line: bytes) -> None:
        try:
            row = json.loads(line)
        except ValueError as error:
            if not line.endswith(b"\n"):
                self.cut = True
                return
            raise StateError(
                f"{path} is damaged in line {number} ({error}): look at it with sed -n {number}p, and take it"
                f" out with sed -i {number}d"
            ) from error
        try:
            self.take(row)
        except _WRONG as error:
            raise StateError(
                f"{path} has something else than a row of telemetry in line {number} ({error!r}): is it a"
                " file of telemetry.JsonLines alone?"
            ) from error

    def _take_audit(self, row: Row) -> None:
        step, errors = row["step"], (_or(math.inf, row[name]) for name in ("error", "worst_error"))
        error, worst_error = errors
        self.audits.append(
            Audited(step, row["of"], error, row["residual"], row["worst"], worst_error, row["action"])
        )
        for key, value in row.items():
            kind, _, name = key.partition("/")
            if kind == "error" and name:
                one = self.parameters.setdefault(name, Parameter())
                one.steps.append(step)
                one.errors.append(_or(math.inf, value))
                one.residual = float(row[f"residual/{name}"])


def is_log(path: Path) -> bool:
    """Whether a file is one of `JsonLines`: by its name, or its first line, which may be cut off."""
    try:
        with path.open("rb") as file:
            line = file.readline(1 << 16)
    except OSError:
        return False
    try:
        row = json.loads(line)
    except ValueError:
        return path.suffix == ".jsonl" or line.startswith(b'{"step"')
    return isinstance(row, dict) and "step" in row


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line


def _or(instead: float, value: Any) -> float:
    return instead if value is None else float(value)
