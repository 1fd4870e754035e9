"""Data goes to stdout, everything else to stderr; colours only for eyes (rich heeds NO_COLOR)."""

import json
from typing import Any

from rich.console import Console

out = Console(highlight=False, soft_wrap=True)
err = Console(highlight=False, soft_wrap=True, stderr=True)


def print_json(data: Any) -> None:
    """One JSON document on stdout."""
    out.print(json.dumps(data, indent=2), markup=False)


def megabytes(count: float) -> str:
    """A number of bytes in MB, to three digits or the nearest byte.

    >>> megabytes(25_900_000), megabytes(130), megabytes(0)
    ('25.9 MB', '0.00013 MB', '0 MB')
    """
    return f"{count / 1e6:.3g} MB"
