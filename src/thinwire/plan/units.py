"""Quantities as text: rates of links, durations, sizes in bytes, shares in per cent and counts."""

import math
import re

from thinwire.errors import OptionError

_RATES = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_BYTE_RATES = {"kB/s": 8e3, "MB/s": 8e6, "GB/s": 8e9}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_BYTES = {"kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30}
_NUMBER = r"(\d+(?:\.\d+)?)"


def parse_rate(text: str, option: str = "rate") -> float:
    """Parse the rate of a link.

    Args:
        text: A number with its unit, or `unlimited`.
        option: The name of the option, for error messages.

    Returns:
        Bits per second, infinite for an unlimited link.

    Raises:
        OptionError: `text` does not parse, or the rate is 0.

    >>> parse_rate("100mbit"), parse_rate("2.5 Gbit/s"), parse_rate("unlimited")
    (100000000.0, 2500000000.0, inf)
    >>> parse_rate("25GB/s")
    200000000000.0
    """
    if text.strip().lower() == "unlimited":
        return math.inf
    wanted = "write a number of bits a second with its unit, such as 10mbit, 2.5gbit, 25GB/s or unlimited"
    if is_byte_rate(text):
        number, unit = text.strip()[:-4], text.strip()[-4:]
        rate = _BYTE_RATES[unit] * _parse(number, {"": 1.0}, option, text, wanted)
    else:
        rate = _parse(text.strip().lower().removesuffix("/s"), _RATES, option, text, wanted)
    if rate <= 0:
        raise OptionError(f"{option}={text!r} must be above 0: pass a rate, such as 100mbit")
    return rate


def is_byte_rate(text: str) -> bool:
    """Return whether a rate is in bytes of data, such as `25GB/s`. With a small b it would be bits.

    >>> is_byte_rate("25GB/s"), is_byte_rate("25Gb/s"), is_byte_rate("200gbit")
    (True, False, False)
    """
    return text.strip()[-4:] in _BYTE_RATES


def parse_seconds(text: str, option: str) -> float:
    """Parse a duration such as `20ms` or `0.4s`.

    Raises:
        OptionError: `text` does not parse.

    >>> parse_seconds("20ms", "rtt"), parse_seconds("0.4 s", "compute")
    (0.02, 0.4)
    """
    return _parse(text, _SECONDS, option, text, "write a time with its unit, such as 20ms or 0.4s")


def parse_bytes(text: str, option: str) -> float:
    """Parse a size in bytes such as `500MB` or `2GiB`.

    Raises:
        OptionError: `text` does not parse.

    >>> parse_bytes("500MB", "max-memory")
    500000000.0
    """
    return _parse(text, _BYTES, option, text, "write a size with its unit, such as 500MB or 2GiB")


def parse_share(text: str, option: str) -> float:
    """Parse a share such as `1%` or `0.01`.

    Raises:
        OptionError: `text` does not parse.

    >>> parse_share("1%", "max-gap"), parse_share("0.01", "max-gap")
    (0.01, 0.01)
    """
    return _parse(text, {"%": 0.01, "": 1.0}, option, text, "write a share such as 1% or 0.01")


def _parse(text: str, units: dict[str, float], option: str, shown: str, wanted: str) -> float:
    found = re.fullmatch(rf"{_NUMBER}\s*(\D*)", text.strip().lower())
    if not found or found[2] not in units:
        raise OptionError(f"{option}={shown!r} does not parse: {wanted}")
    return float(found[1]) * units[found[2]]


def show_rate(rate: float | None) -> str:
    """Return the shortest text for a rate. None and infinity are unlimited.

    >>> show_rate(100_000_000), show_rate(2_500_000_000), show_rate(None)
    ('100mbit', '2.5gbit', 'unlimited')
    """
    if rate is None or math.isinf(rate):
        return "unlimited"
    unit = next((name for name, size in reversed(_RATES.items()) if rate >= size), "kbit")
    return f"{rate / _RATES[unit]:.6g}{unit}"


def show_seconds(seconds: float) -> str:
    """Return a duration as text.

    >>> show_seconds(0.0213), show_seconds(1.5), show_seconds(0.00042)
    ('21 ms', '1.5 s', '0.42 ms')
    """
    if seconds >= 1:
        return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.01 else f"{1e3 * seconds:.2g} ms"


def show_bytes(count: float) -> str:
    """Return a size as text.

    >>> show_bytes(5_090_000), show_bytes(26_000_000_000), show_bytes(51_700)
    ('5.09 MB', '26 GB', '0.0517 MB')
    """
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"
