"""The rates of links that the lab can emulate, such as `10mbit`, `2.5gbit` and `unlimited`."""

import math

from thinwire.errors import OptionError
from thinwire.plan import units
from thinwire.plan.units import show_rate as show_rate

_SLOWEST, _FASTEST = 10**5, 10**11


def parse_rate(text: str) -> int | None:
    """Parse a rate.

    Returns:
        Bits per second, or None for an unlimited link.

    Raises:
        OptionError: `text` does not parse, or the rate cannot be emulated.

    >>> parse_rate("100mbit"), parse_rate("2.5 Gbit/s"), parse_rate("unlimited")
    (100000000, 2500000000, None)
    """
    rate = units.parse_rate(text)
    if math.isinf(rate):
        return None
    if not _SLOWEST <= rate <= _FASTEST:
        raise OptionError(f"rate={text!r} cannot be emulated: choose a rate from 100kbit to 100gbit")
    return round(rate)
