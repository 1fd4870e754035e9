"""The import of torch without its warning about a missing numpy, and access to its private members.

thinwire's core does not use numpy, and the warning would precede the output of every command. Features that
need numpy raise an error that says so, and `thinwire doctor` shows whether it is installed.

Private members are named in four modules only, each with a table of its names: `amp/internals.py`,
`engine/process_group.py`, `ddp/internals.py` and `fsdp/internals.py`.
"""

import warnings
from typing import Any

from thinwire.errors import UnavailableError

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    import torch


def private(owner: object, name: str) -> Any:
    """Return a private member of torch; raise UnavailableError if this version of torch lacks it."""
    try:
        return getattr(owner, name)
    except AttributeError as error:
        of = getattr(owner, "__name__", type(owner).__name__)
        raise UnavailableError(
            f"torch {torch.__version__} has no {of}.{name}, which thinwire needs: use torch 2.6 to 2.15, or a"
            " newer thinwire"
        ) from error
