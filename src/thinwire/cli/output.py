"""Data goes to stdout, everything else to stderr; colours only for eyes (rich heeds NO_COLOR)."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from thinwire.bench.results import plain
from thinwire.errors import OptionError

_WIDE = 160  # where nobody's window sets a limit
_PLAIN = {"highlight": False, "markup": False, "emoji": False, "soft_wrap": True}
out = Console(**_PLAIN, width=None if sys.stdout.isatty() else _WIDE)  # type: ignore[arg-type] # all are flags
err = Console(**_PLAIN, stderr=True)  # type: ignore[arg-type]


def print_json(data: Any) -> None:
    """One JSON document on stdout."""
    click.echo(json.dumps(plain(data), indent=2, allow_nan=False))


def check_writable(path: Path) -> None:
    """Before hours of measuring, rather than after."""
    if not path.parent.is_dir():
        raise OptionError(f"out={str(path)!r} is in a folder that does not exist: make {path.parent} first")
    if path.is_dir():
        raise OptionError(f"out={str(path)!r} is a folder: give the name of a file in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise OptionError(f"out={str(path)!r} cannot be written: choose another place")
