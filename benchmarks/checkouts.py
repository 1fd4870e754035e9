"""One benchmark on two checkouts of thinwire, which take their steps in turns.

A process can import thinwire only once, so each checkout has its own ranks. They share the hosts, and a file
names the checkout that may run. The others wait between two rounds, without work for processor or network.

The bench of this checkout measures both, so that only the programs differ. See `use_checkout`.
"""

import os
import sys
import time
from importlib import import_module
from pathlib import Path

_POLL_SECONDS = 0.002
_GIVE_UP_SECONDS = 900.0
SOURCE = Path(__file__).parents[1] / "src"


class Turns:
    """The turns of several checkouts, taken in ascending order and then again from the first.

    Args:
        file: A file that all ranks of all checkouts can read and write.
        own: The number of this checkout.
        count: The number of checkouts.
    """

    def __init__(self, file: Path, own: int, count: int) -> None:
        self._file = file
        self._own = own
        self._count = count

    def wait(self) -> None:
        """Wait for this checkout's turn.

        Raises:
            TimeoutError: The turn did not come within 15 minutes, or another checkout has failed.
        """
        if self._count == 1:
            return
        until = time.monotonic() + _GIVE_UP_SECONDS
        while (now := self._read()) != str(self._own):
            if now == "failed" or time.monotonic() > until:
                raise TimeoutError(f"checkout {self._own} waits for its turn, but the file says {now!r}")
            time.sleep(_POLL_SECONDS)

    def pass_on(self) -> None:
        """Give the turn to the next checkout."""
        self._write(str((self._own + 1) % self._count))

    def fail(self) -> None:
        """Report to the others that this checkout has failed."""
        self._write("failed")

    def _read(self) -> str:
        return self._file.read_text() if self._file.exists() else "0"

    def _write(self, text: str) -> None:
        """Replace the file atomically, so that no reader finds a partial one."""
        if self._count == 1:
            return
        draft = self._file.with_name(f"{self._file.name}.{os.getpid()}")
        draft.write_text(text)
        draft.replace(self._file)


def use_checkout(source: Path) -> None:
    """Import thinwire from a checkout, and its bench from this one. Call it before thinwire is imported.

    Args:
        source: The folder `src` of the checkout.
    """
    sys.path.insert(0, str(source))
    import thinwire
    import thinwire.tools.bench

    check_imported(source)
    thinwire.tools.bench.__path__ = [str(SOURCE / "thinwire" / "tools" / "bench")]


def check_imported(source: Path) -> None:
    """Raise SystemExit if thinwire was not imported from a checkout's folder `src`."""
    found = Path(import_module("thinwire").__file__ or "").parents[1]
    if found.resolve() != source.resolve():
        raise SystemExit(f"thinwire was imported from {found}, not from {source}: is it a folder src?")
