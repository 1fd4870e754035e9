"""Progress of a benchmark, shown as a bar on a terminal and as occasional lines elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from thinwire.tools.cli.output import err

_SECONDS_BETWEEN_LINES = 10.0


class Tracker:
    """A counter of rounds over several cells.

    Args:
        total: The number of rounds of all cells.
        bar: The progress bar to update. None to print lines.
    """

    def __init__(self, total: int, bar: Progress | None) -> None:
        self._total = total
        self._bar = bar
        self._task = bar.add_task("", total=total) if bar else None
        self._label = ""
        self._before = 0
        self._done = 0
        self._latest = self._begun = time.monotonic()

    def __call__(self, label: str, done: int) -> None:
        """Show that `done` rounds of the cell `label` have finished."""
        if label != self._label:
            self._label, self._before = label, self._before + self._done
            self._begun = time.monotonic()
            self._announce(f"{label} ...")
        self._done = done
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=label, completed=self._before + done)
        elif time.monotonic() - self._latest > _SECONDS_BETWEEN_LINES:
            self._announce(f"{label}: {self._before + done} of {self._total} rounds, {self._left()}")

    def _left(self) -> str:
        """Estimate the remaining time from the pace of the running cell."""
        pace = (time.monotonic() - self._begun) / max(1, self._done)
        return f"about {pace * (self._total - self._before - self._done):.0f} s left"

    def _announce(self, line: str) -> None:
        self._latest = time.monotonic()
        if self._bar is None:
            err.print(line, style="dim")


@contextmanager
def progress(total: int) -> Iterator[Tracker]:
    """Yield a tracker of `total` rounds."""
    if not err.is_terminal:
        yield Tracker(total, None)
        return
    columns = (
        TextColumn("{task.description:<28}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} rounds"),
    )
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with Progress(*columns, *times, console=err) as bar:
        yield Tracker(total, bar)
