"""Training logs of `JsonLines`, read into arrays that take a few bytes per step."""

import json
import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thinwire.codecs.checks import is_whole
from thinwire.engine.meter import GRADIENTS
from thinwire.errors import StateError
from thinwire.monitors.audit import Audit
from thinwire.telemetry.sinks import AUDIT, LOGGED, Row

_AUDIT_BYTES = f"bytes/{Audit.__name__}"
_WRONG = (AttributeError, KeyError, OverflowError, TypeError, ValueError)
_NOT_JSON = (ValueError, RecursionError)  # RecursionError: too many brackets


@dataclass
class Series:
    """The exchanges of one purpose, in the order of the log.

    Attributes:
        steps: The step of each exchange.
        own: Bytes that the program sent.
        audit: Additional bytes for the exact mean of an audit, or 0.
        wire: Seconds with a collective in flight. NaN if not measured.
        exposed: Seconds that backward waited for the network. NaN if not measured.
        overflowed: 1 if the step was skipped, 0 if not.
        ddp: Bytes that plain DDP would have sent. 0 in exchanges of models and parameters.
        ended: Seconds since the epoch when the next step began.
    """

    steps: "array[int]" = field(default_factory=lambda: array("q"))
    own: "array[int]" = field(default_factory=lambda: array("q"))
    audit: "array[int]" = field(default_factory=lambda: array("q"))
    wire: "array[float]" = field(default_factory=lambda: array("d"))
    exposed: "array[float]" = field(default_factory=lambda: array("d"))
    overflowed: "array[int]" = field(default_factory=lambda: array("b"))
    ddp: "array[int]" = field(default_factory=lambda: array("q"))
    ended: "array[float]" = field(default_factory=lambda: array("d"))

    def take(self, row: Row) -> None:
        """Add a row. Several exchanges in one step are joined, except those of gradients."""
        audit = row.get(_AUDIT_BYTES, 0)
        values: tuple[tuple[Any, float], ...] = (
            (self.own, (row["bytes_sent"] or 0) - audit),
            (self.audit, audit),
            (self.wire, _or(math.nan, row["wire_seconds"])),
            (self.exposed, _or(math.nan, row["exposed_seconds"])),
        )
        purpose, step = row["purpose"], row["step"]
        again = purpose != GRADIENTS and len(self.steps) > 0 and self.steps[-1] == step
        if not again:
            self.steps.append(step)
            self.overflowed.append(int(row["overflowed"] if purpose == GRADIENTS else 0))
            self.ddp.append(int(row["ddp_bytes"] if purpose == GRADIENTS else 0))
            self.ended.append(float(row["time"]))
        for column, value in values:
            if again:
                column[-1] += value
            else:
                column.append(value)


@dataclass
class Logged:
    """The values of one name that the training loop logged.

    Attributes:
        steps: The step of each value.
        values: The values. NaN for non-finite ones.
    """

    steps: "array[int]" = field(default_factory=lambda: array("q"))
    values: "array[float]" = field(default_factory=lambda: array("d"))


@dataclass
class Parameter:
    """The errors of one parameter in all audits.

    Attributes:
        steps: The step of each audit.
        errors: The relative error in each audit.
        residual: The norm of the residuals in the latest audit.
    """

    steps: "array[int]" = field(default_factory=lambda: array("q"))
    errors: "array[float]" = field(default_factory=lambda: array("d"))
    residual: float = 0.0


@dataclass(frozen=True)
class Audited:
    """One audit without its parameters. Errors may be infinite."""

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
        series: The exchanges by purpose: `"gradients"`, `"models"`, `"parameters"`.
        audits: All audits, in the order of the log.
        parameters: The audited parameters by name.
        logged: The values that the training loop logged, by name.
        programs: The programs that ran, each with the first step that used it.
        cut: Whether the last line was incomplete and therefore ignored.
        rank: The rank that wrote the log. -1 before the first row.
        world_size: The number of ranks at the end of the log.
    """

    series: dict[str, Series] = field(default_factory=dict)
    audits: list[Audited] = field(default_factory=list)
    parameters: dict[str, Parameter] = field(default_factory=dict)
    logged: dict[str, Logged] = field(default_factory=dict)
    programs: list[tuple[int, str]] = field(default_factory=list)
    cut: bool = False
    rank: int = -1
    world_size: int = 0

    @staticmethod
    def of(rows: Iterable[Row]) -> "Log":
        """Make a log from rows."""
        log = Log()
        for row in rows:
            log.take(row)
        return log

    @staticmethod
    def load(path: Path) -> "Log":
        """Read a file of `JsonLines`. An incomplete last line is ignored.

        Raises:
            StateError: The file cannot be read, is damaged, mixes ranks or has no complete step.
        """
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
        """Add a row of a step or an audit.

        Raises:
            StateError: The row is of another rank than the rows before.
        """
        rank, size = _count(row, "rank"), _count(row, "world_size")
        if self.rank not in (-1, rank):
            raise StateError(
                f"rows of rank {rank} follow rows of rank {self.rank}, and bytes and times of several ranks"
                " cannot be added: write one file per rank, as telemetry.watch(..., ranks='all') does"
                f""", or split this one, as by grep '"rank": {rank},'"""
            )
        self.rank, self.world_size = rank, size
        purpose = row["purpose"]
        if purpose == AUDIT:
            self._take_audit(row)
        else:
            self.series.setdefault(purpose, Series()).take(row)
            self._take_logged(row)

    def _take_logged(self, row: Row) -> None:
        """Add the values that the training loop logged, and the program if it has changed."""
        for name, value in row.items():
            if name.startswith(LOGGED):
                logged = self.logged.setdefault(name.removeprefix(LOGGED), Logged())
                logged.steps.append(row["step"])
                logged.values.append(_or(math.nan, value))
        program = row.get("program")
        if program is not None and (not self.programs or self.programs[-1][1] != program):
            self.programs.append((row["step"], str(program)))

    def _take_line(self, path: Path, number: int, line: bytes) -> None:
        try:
            row = json.loads(line)
        except _NOT_JSON as error:
            if not line.endswith(b"\n"):
                self.cut = True
                return
            raise StateError(
                f"{path} is damaged in line {number} ({error}): show it with sed -n {number}p, and remove it"
                f" with sed -i {number}d"
            ) from error
        try:
            self.take(row)
        except StateError as error:
            raise StateError(f"{path}, line {number}: {error}") from error
        except _WRONG as error:
            raise StateError(
                f"{path}, line {number} is not a row of telemetry ({error!r}): pass a file that only"
                " telemetry.JsonLines writes"
            ) from error

    def _take_audit(self, row: Row) -> None:
        step = row["step"]
        error, worst_error, residual = (_error(row[name]) for name in ("error", "worst_error", "residual"))
        of, worst, action = (_text(row[name]) for name in ("of", "worst", "action"))
        self.audits.append(Audited(step, of, error, residual, worst, worst_error, action))
        for key, value in row.items():
            kind, _, name = key.partition("/")
            if kind == "error" and name:
                parameter = self.parameters.setdefault(name, Parameter())
                parameter.steps.append(step)
                parameter.errors.append(_error(value))
                parameter.residual = _error(row[f"residual/{name}"])


def is_log(path: Path) -> bool:
    """Return whether a file is a log of `JsonLines`, judged by its first line and its name."""
    try:
        with path.open("rb") as file:
            line = file.readline(1 << 16)
    except OSError:
        return False
    try:
        row = json.loads(line)
    except _NOT_JSON:
        return path.suffix == ".jsonl" or line.startswith(b'{"step"')
    return isinstance(row, dict) and "step" in row


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line


def _count(row: Row, name: str) -> int:
    value = row[name]
    if not is_whole(value) or value < 0:
        raise TypeError(f"{name} is {value!r}")
    return int(value)


def _error(value: Any) -> float:
    """Return an error or a norm. None and NaN are infinite."""
    error = _or(math.inf, value)
    return math.inf if math.isnan(error) else error


def _or(instead: float, value: Any) -> float:
    return instead if value is None else float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    return value
