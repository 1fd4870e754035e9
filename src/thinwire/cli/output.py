"""The command line's output. Data goes to stdout, everything else to stderr. rich respects NO_COLOR."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from thinwire.bench.results import plain
from thinwire.errors import OptionError

_WIDE = 160  # the width without a terminal
_PLAIN = {"highlight": False, "markup": False, "emoji": False, "soft_wrap": True}
out = Console(**_PLAIN, width=None if sys.stdout.isatty() else _WIDE)  # type: ignore[arg-type] # all are flags
err = Console(**_PLAIN, stderr=True)  # type: ignore[arg-type]


def print_json(data: Any) -> None:
    """Print one JSON document to stdout."""
    click.echo(json.dumps(plain(data), indent=2, allow_nan=False))


def write_page(path: Path, page: str, *, as_json: bool) -> None:
    """Write an HTML page, and print its path, or as JSON its path and size."""
    path.write_text(page, encoding="utf-8")
    if as_json:
        print_json({"path": str(path), "bytes": len(page.encode())})
    else:
        err.print("open in a browser:", style="dim")
        out.print(str(path.resolve()))


def check_writable(path: Path) -> None:
    """Raise OptionError if `path` cannot be written. Call it before hours of measuring."""
    if not path.parent.is_dir():
        raise OptionError(f"out={str(path)!r} is in a folder that does not exist: create {path.parent} first")
    if path.is_dir():
        raise OptionError(f"out={str(path)!r} is a folder: pass the name of a file in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise OptionError(f"out={str(path)!r} cannot be written: choose another place")
