"""Sinks, which write rows to a console, a file or a tracking service. A sink has `write(row)` and `close()`.

A sink imports its library in the constructor. It opens its file or run with the first row, because ranks that
must not write receive none.
"""

import importlib
import json
import math
import mmap
import os
from pathlib import Path
from typing import Any, Protocol, TextIO, runtime_checkable

from thinwire.engine.meter import GRADIENTS
from thinwire.errors import OptionError, UnavailableError

Row = dict[str, Any]
"""A step's figures by name. Values are numbers, or None if not known. `purpose` is what was exchanged.

`rank` is the rank in the job that measured them, `world_size` the number of ranks that exchange, and `time`
the seconds since the epoch when the row was sent, at the start of the next forward pass.
In rows of gradients, `overflowed` is true if the step was skipped, `log/NAME` are the values that the loop
passed to `Watch.log`, and the first row and those after a change have the name of the `program`. Audits have
the purpose `"audit"`.
"""

AUDIT = "audit"
LOGGED = "log/"
"""The beginning of the names of values that the training loop logs."""
_PLACE = ("step", "purpose", "rank", "world_size", "time")


class Sink(Protocol):
    """A destination of rows."""

    def write(self, row: Row) -> None:
        """Write the figures of one step.

        Args:
            row: The figures by name, all of them plain values.
        """

    def close(self) -> None:
        """Close the sink. No row follows."""


@runtime_checkable
class Checked(Protocol):
    """A sink that can check before the first row whether it can write."""

    def check_writable(self) -> None:
        """Raise OptionError if rows cannot be written. Called on ranks that write."""


class Console:
    """A sink that prints lines to stderr.

    Args:
        every: The number of steps between lines. Audits are always printed.
        console: A rich console to print to. None for a new one on stderr.
    """

    def __init__(self, every: int = 1, console: Any = None) -> None:
        if every < 1:
            raise OptionError(f"every={every} must be at least 1: it is the number of steps between lines")
        if console is None:
            rich_console = _library("rich.console", "the console sink", "thinwire[cli]")
            console = rich_console.Console(stderr=True, highlight=False)
            console.on_broken_pipe = _raise_again
        self._console = console
        self._every = every

    def write(self, row: Row) -> None:
        """Print the bytes and times of every n-th step, and the errors of every audit."""
        rank = _rank(row)
        whose = f"rank {rank}  " if rank else ""
        if row.get("purpose") == AUDIT:
            self._console.print(f"{whose}{_audit_line(row)}", markup=False)
            return
        if (row["step"] or 0) % self._every:
            return
        sent = f"{(row['bytes_sent'] or 0) / 1e6:.3f} MB"
        times = ((name, row[f"{name}_seconds"]) for name in ("encode", "wire", "exposed"))
        shown = "  ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in times if seconds is not None)
        purpose = row.get("purpose", GRADIENTS)
        what = "step" if purpose == GRADIENTS else f"{purpose} after step"
        logged = (
            f"  {name.removeprefix(LOGGED)} {value:.5g}"
            for name, value in row.items()
            if name.startswith(LOGGED) and value is not None
        )
        end = "".join(logged) + ("  overflowed" if row.get("overflowed") else "")
        self._console.print(f"{whose}{what} {row['step']}  sent {sent}  {shown}{end}", markup=False)

    def close(self) -> None:
        """Do nothing, as no resource is held."""


class JsonLines:
    """A sink that appends one JSON object per line to a file. The file is complete after every step.

    Args:
        path: The file of rank 0. Other ranks, if they write, use files in the same folder. For `steps.jsonl`,
            rank 1 writes `steps-rank1.jsonl`. The folder must exist on the hosts of the ranks that write.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._file: TextIO | None = None

    def check_writable(self) -> None:
        """Raise OptionError if the file cannot be written. Ranks that do not write need no folder."""
        if self._path.is_dir():
            raise self._not_writable("it is a folder")
        if not os.access(self._path if self._path.exists() else self._path.parent, os.W_OK):
            raise self._not_writable("its folder does not exist, or you may not write to it")

    def write(self, row: Row) -> None:
        """Append a line. The first row opens the file."""
        if self._file is None:
            self._file = self._open(_rank(row))
        self._file.write(json.dumps(row) + "\n")

    def close(self) -> None:
        """Close the file. A later row opens it again."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _open(self, rank: int) -> TextIO:
        name = f"{self._path.stem}-rank{rank}{self._path.suffix}" if rank else self._path.name
        path = self._path.with_name(name)
        try:
            _remove_incomplete_line(path)
            return path.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise self._not_writable(str(error.strerror)) from error

    def _not_writable(self, why: str) -> OptionError:
        return OptionError(
            f"path={str(self._path)!r} cannot be written: {why}; create its folder, or choose another"
        )


class TensorBoard:
    """A sink that adds scalars under `thinwire/` to TensorBoard.

    Args:
        folder: The log folder of TensorBoard. Ignored if `writer` is passed. Ranks other than 0, if they
            write, use folders in it, such as `rank1`.
        writer: A `torch.utils.tensorboard.SummaryWriter` to use. `close()` leaves it open.
    """

    def __init__(self, folder: str | Path = "runs", writer: Any = None) -> None:
        self._own = writer is None
        self._folder = Path(folder)
        if writer is None:
            _library("tensorboard", "the TensorBoard sink", "tensorboard")
        self._writer = writer

    def write(self, row: Row) -> None:
        """Add the step's scalars."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            rank = _rank(row)
            self._writer = SummaryWriter(str(self._folder / f"rank{rank}" if rank else self._folder))
        for name, value in _scalars(row).items():
            self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        """Write buffered scalars, and close the writer unless the user passed it. A later row reopens it."""
        if self._writer is None:
            return
        if self._own:
            writer, self._writer = self._writer, None
            writer.close()
        else:
            self._writer.flush()


class WandB:
    """A sink that logs values under `thinwire/` to a Weights & Biases run.

    Args:
        run: The run to use. By default the active one, or else a new one. `close()` leaves it open, so call
            `wandb.finish()`. If several ranks write, each has its own run. `thinwire/rank` is the rank.
    """

    def __init__(self, run: Any = None) -> None:
        self._wandb = _library("wandb", "the W&B sink", "wandb") if run is None else None
        self._run = run

    def write(self, row: Row) -> None:
        """Log the values of one step, with the step as a value, as W&B's own count belongs to the user."""
        if self._run is None and self._wandb is not None:
            self._run = self._wandb.run or self._wandb.init()
        place = {"thinwire/step": row["step"], "thinwire/rank": _rank(row)}
        self._run.log({**place, **_scalars(row)})

    def close(self) -> None:
        """Do nothing, as the run belongs to the user."""


def _scalars(row: Row) -> dict[str, float | int]:
    """Return the row's numbers by name, under `thinwire/` and the purpose unless it is gradients."""
    purpose = row.get("purpose", GRADIENTS)
    place = "thinwire" if purpose == GRADIENTS else f"thinwire/{purpose}"
    shown = {name: value for name, value in row.items() if name not in _PLACE}
    return {
        f"{place}/{name}": int(value) if isinstance(value, bool) else value
        for name, value in shown.items()
        if isinstance(value, int | float)
    }


def _rank(row: Row) -> int:
    """Return the rank of a row, or 0 if the row does not have it."""
    return int(row.get("rank", 0))


def _audit_line(row: Row) -> str:
    error, worst = (math.inf if row[key] is None else row[key] for key in ("error", "worst_error"))
    found = f"error {error:.3g}  worst {row['worst']} {worst:.3g}"
    return f"audit of step {row['step']}  {found}  {row['action']}".rstrip()


def _raise_again() -> None:
    """Raise the BrokenPipeError that rich has caught. Its own handler ends the process."""
    raise  # called in an except clause of rich


def _remove_incomplete_line(path: Path) -> None:
    """Remove an incomplete last line, left by a killed process, so that the next line is valid."""
    if not path.is_file() or not path.stat().st_size:
        return
    with path.open("rb+") as file:
        # Mapped, because a row of an audit has two values for each parameter, and may be megabytes long.
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            last = content.rfind(b"\n") + 1
            incomplete = content[last : last + 1] == b"{"
        if incomplete:
            file.truncate(last)


def _library(name: str, what: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UnavailableError(f"{what} needs {error.name}: pip install '{package}'") from error
