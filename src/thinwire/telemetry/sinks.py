"""Where rows go. A sink has `write(row)` and `close()`; each imports its library when it is made."""

import importlib
import json
import math
from pathlib import Path
from typing import Any, Protocol

from thinwire.errors import OptionError, UnavailableError
from thinwire.wire.meter import GRADIENTS

Row = dict[str, Any]
"""A step's figures by name: numbers, None where nobody can tell, and under `purpose` what was exchanged.

Audits are rows too, of purpose `"audit"`.
"""

AUDIT = "audit"
_LONGEST_LINE = 1 << 20


class Sink(Protocol):
    """Anything that takes rows."""

    def write(self, row: Row) -> None:
        """Take one step's figures."""

    def close(self) -> None:
        """No more will come."""


class Console:
    """One line on stderr every so many steps.

    Args:
        every: How many steps to a line.
        console: A rich console of your own.
    """

    def __init__(self, every: int = 1, console: Any = None) -> None:
        if every < 1:
            raise OptionError(f"every={every} must be at least 1: it is the number of steps to a line")
        if console is None:
            rich_console = _library("rich.console", "the console sink", "thinwire[cli]")
            console = rich_console.Console(stderr=True, highlight=False)
        self._console = console
        self._every = every

    def write(self, row: Row) -> None:
        """Print the step's bytes and times, if it is its turn; of an audit, what it has found."""
        if row.get("purpose") == AUDIT:
            self._console.print(_audit_line(row), markup=False)
            return
        if (row["step"] or 0) % self._every:
            return
        sent = f"{(row['bytes_sent'] or 0) / 1e6:.3f} MB"
        times = ((name, row[f"{name}_seconds"]) for name in ("compute", "wire", "exposed"))
        shown = "  ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in times if seconds is not None)
        purpose = row.get("purpose", GRADIENTS)
        what = "step" if purpose == GRADIENTS else f"{purpose} after step"
        self._console.print(f"{what} {row['step']}  sent {sent}  {shown}", markup=False)

    def close(self) -> None:
        """Nothing is held."""


class JsonLines:
    """One JSON object a line, appended to a file, whole after every step."""

    def __init__(self, path: str | Path) -> None:
        try:
            _cut_off_half_a_line(Path(path))
            self._file = Path(path).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115 - open until close()
        except OSError as error:
            raise OptionError(f"path={str(path)!r} cannot be written: {error.strerror}") from error

    def write(self, row: Row) -> None:
        """Append a line."""
        self._file.write(json.dumps(row) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Scalars under `thinwire/`, by step.

    Args:
        folder: Where TensorBoard looks; ignored where `writer` is given.
        writer: A `torch.utils.tensorboard.SummaryWriter` of your own; it stays open.
    """

    def __init__(self, folder: str | Path = "runs", writer: Any = None) -> None:
        self._own = writer is None
        if writer is None:
            _library("tensorboard", "the TensorBoard sink", "tensorboard")
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(str(folder))
        self._writer = writer

    def write(self, row: Row) -> None:
        """Add the step's scalars."""
        for name, value in _scalars(row).items():
            self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        """Write what is buffered."""
        if self._own:
            self._writer.close()
        else:
            self._writer.flush()


class WandB:
    """Values under `thinwire/`, logged to a Weights & Biases run.

    Args:
        run: Yours; by default the active one, or else a new one. It stays open: call `wandb.finish()`.
    """

    def __init__(self, run: Any = None) -> None:
        if run is None:
            wandb = _library("wandb", "the W&B sink", "wandb")
            run = wandb.run or wandb.init()
        self._run = run

    def write(self, row: Row) -> None:
        """Log the step's values; the step goes along as a value, so that your own count is left alone."""
        self._run.log({"thinwire/step": row["step"], **_scalars(row)})

    def close(self) -> None:
        """The run is the user's."""


def _scalars(row: Row) -> dict[str, float | int]:
    """By name; what is exchanged beside gradients has names of its own."""
    purpose = row.get("purpose", GRADIENTS)
    place = "thinwire" if purpose == GRADIENTS else f"thinwire/{purpose}"
    shown = {name: value for name, value in row.items() if name not in ("step", "purpose")}
    return {f"{place}/{name}": value for name, value in shown.items() if isinstance(value, int | float)}


def _audit_line(row: Row) -> str:
    error, worst = (math.inf if row[key] is None else row[key] for key in ("error", "worst_error"))
    found = f"error {error:.3g}  worst {row['worst']} {worst:.3g}"
    return f"audit of step {row['step']}  {found}  {row['action']}".rstrip()


def _cut_off_half_a_line(path: Path) -> None:
    """What a killed process has left at the end of its log, so that the next line is whole."""
    if not path.is_file():
        return
    with path.open("rb+") as file:
        start = max(0, file.seek(0, 2) - _LONGEST_LINE)
        file.seek(start)
        end = file.read()
        last = end.rfind(b"\n") + 1
        if end[last:].startswith(b"{"):
            file.truncate(start + last)


def _library(name: str, what: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UnavailableError(f"{what} needs {error.name}: pip install '{package}'") from error
