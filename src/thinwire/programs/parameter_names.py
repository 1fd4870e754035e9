"""Names of parameters and buffers, without the prefixes that `torch.compile` adds, and in messages."""

from collections.abc import Sequence

_COMPILED = "_orig_mod"
"""Attribute of torch.compile's wrapper that holds the module."""


def original_name(name: str) -> str:
    """Return the name without the prefixes of torch.compile.

    >>> original_name("_orig_mod.encoder._orig_mod.weight")
    'encoder.weight'
    """
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def first_names(names: Sequence[str]) -> str:
    """Return the first three names as text, with the number of the others.

    >>> first_names(["a", "b", "c", "d"])
    'a, b, c and 1 more'
    """
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
