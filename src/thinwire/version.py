"""The version of thinwire, and access to private members of the versions of torch that it supports.

Private members are named in four modules only, each with a table of its names: `amp/internals.py`,
`engine/comm/process_group.py`, `models/ddp/internals.py` and `models/fsdp/internals.py`.
"""

from typing import Any

from thinwire.errors import UnavailableError

__version__ = "0.1.0"


def private(owner: object, name: str) -> Any:
    """Return a private member of torch; raise UnavailableError if this version of torch lacks it."""
    try:
        return getattr(owner, name)
    except AttributeError as error:
        import torch

        of = getattr(owner, "__name__", type(owner).__name__)
        raise UnavailableError(
            f"torch {torch.__version__} has no {of}.{name}, which thinwire needs: use torch 2.6 to 2.15, or a"
            " newer thinwire"
        ) from error
