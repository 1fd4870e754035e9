"""Int8 and Int4 in slices of other sizes than thinwire's, to find the fastest.

    .venv/bin/thinwire bench --links 100mbit,1gbit --programs "$(.venv/bin/python -m benchmarks.slices)"

The command in $() prints the programs. `thinwire report` shows the steps of all side by side.
"""

from dataclasses import dataclass

from thinwire import ErrorFeedback, Program, Quantize, TwoShot
from thinwire.codecs.codec import Codec

KILOBYTES = (256, 512, 1024, 2048, 4096, 1 << 20)
"""Sizes to compare. The last is larger than any bucket."""


@dataclass(frozen=True, repr=False)
class Sized(TwoShot):
    """TwoShot in slices of about `preferred_bytes`."""

    preferred_bytes: int = 1 << 20


def Int8InSlices(kilobytes: int = 1024) -> Program:  # noqa: N802 - reads as a program
    """Return `Int8` in slices of this size."""
    return _in_slices(Quantize(bits=8), kilobytes)


def Int4InSlices(kilobytes: int = 1024) -> Program:  # noqa: N802 - reads as a program
    """Return `Int4` in slices of this size."""
    return _in_slices(Quantize(bits=4, block=64), kilobytes)


def _in_slices(codec: Codec, kilobytes: int) -> Program:
    return ErrorFeedback(Sized(codec, kilobytes << 10))


if __name__ == "__main__":
    names = ("Int8InSlices", "Int4InSlices")
    print(",".join(f"benchmarks.slices:{name}(kilobytes={size})" for name in names for size in KILOBYTES))
