"""What options of averaging may be."""

import operator

from thinwire.errors import OptionError


def whole_number(option: str, value: object, least: int, why: str) -> int:
    """The value as an int; OptionError unless it is a whole number of at least `least`.

    >>> whole_number("period", 4, 1, "steps from one averaging to the next")
    4
    """
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if number < least:
        raise OptionError(f"{option}={value!r} must be a whole number, at least {least}: {why}")
    return number
