"""Link rates as people write them: `10mbit`, `2.5gbit`, `unlimited`."""

import re

from thinwire.errors import OptionError

_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_SLOWEST, _FASTEST = 10**5, 10**11


def parse_rate(text: str) -> int | None:
    """Bits per second; None for an unlimited link.

    >>> parse_rate("100mbit"), parse_rate("2.5 Gbit/s"), parse_rate("unlimited")
    (100000000, 2500000000, None)
    """
    if text.strip().lower() == "unlimited":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]bit)(?:/s)?", text.strip().lower())
    if not match:
        raise OptionError(
            f"rate={text!r} does not parse: write a number of bits a second with its unit, such as 10mbit,"
            " 2.5gbit or unlimited"
        )
    rate = round(float(match[1]) * _UNITS[match[2]])
    if not _SLOWEST <= rate <= _FASTEST:
        raise OptionError(f"rate={text!r} is outside of what can be emulated: 100kbit to 100gbit")
    return rate


def show_rate(rate: int | None) -> str:
    """The shortest way to write a rate.

    >>> show_rate(100_000_000), show_rate(2_500_000_000), show_rate(None)
    ('100mbit', '2.5gbit', 'unlimited')
    """
    if rate is None:
        return "unlimited"
    unit = next(name for name, size in reversed(_UNITS.items()) if rate >= size)
    return f"{rate / _UNITS[unit]:.6g}{unit}"
