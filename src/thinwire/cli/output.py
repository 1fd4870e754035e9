"""Data goes to stdout, everything else to stderr; colours only for eyes (rich heeds NO_COLOR)."""

import json
from typing import Any

from rich.console import Console

out = Console(highlight=False, soft_wrap=True)
err = Console(highlight=False, soft_wrap=True, stderr=True)


def print_json(data: Any) -> None:
    """One JSON document on stdout."""
    out.print(json.dumps(data, indent=2), markup=False)
