"""Validation of options that are whole numbers."""

from numbers import Integral
from typing import TypeGuard

from thinwire.errors import OptionError


def check_block(block: object, *, of: int = 1, most: int = 1 << 20) -> None:
    """Raise OptionError unless `block` is a multiple of `of`, at most `most`."""
    if not is_whole(block) or not of <= block <= most or block % of:
        raise OptionError(
            f"block={block!r} must be a whole number from {of} to {most}"
            + (f", a multiple of {of}" if of > 1 else "")
            + ": it is the number of elements in a block; try 256"
        )


def check_seed(seed: object) -> None:
    """Raise OptionError unless `seed` is a whole number."""
    if not is_whole(seed):
        raise OptionError(f"seed={seed!r} must be a whole number, such as 0")


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether a value is an integer of any library, but not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_whole(name: str, value: object, least: int, why: str) -> None:
    """Raise OptionError unless `value` is a whole number of at least `least`."""
    if not is_whole(value) or value < least:
        raise OptionError(f"{name}={value!r} must be a whole number, at least {least}: {why}")
