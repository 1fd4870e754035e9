"""Presets: complete programs of a codec, the collectives that suit it, and error feedback."""

from thinwire.codecs.float8 import Float8, Variant
from thinwire.codecs.quantize import Quantize
from thinwire.codecs.randomk import RandomEntries
from thinwire.codecs.sign import SignBits
from thinwire.codecs.topk import LargestEntries, Values
from thinwire.codecs.two_magnitudes import TwoMagnitudes
from thinwire.errors import OptionError
from thinwire.programs.allreduce import Reduced
from thinwire.programs.description import preset
from thinwire.programs.error_feedback import ErrorFeedback
from thinwire.programs.gathered import SparseMean
from thinwire.programs.program import Program
from thinwire.programs.twoshot import TwoShot

# ruff: noqa: N802 - these read as the programs they make


@preset
def Int8(*, block: int = 256, stochastic: bool = False, error_feedback: bool = True) -> Program:
    """Send 8-bit integers with a scale per block: a quarter of fp32's bytes.

    Try this after BF16. Our benchmarks show no measurable loss of accuracy.

    Args:
        block: Numbers that share a scale. Smaller blocks are more accurate and cost more bytes.
        stochastic: Round up or down at random, so that the mean of many roundings is exact.
        error_feedback: Add the error of compression to the next step's gradient. See `ErrorFeedback`.

    Returns:
        `ErrorFeedback(TwoShot(Quantize(bits=8)))`, or without `ErrorFeedback`.

    Raises:
        OptionError: An option has the wrong type or is out of range.

    Example::

        wire = thinwire.attach(ddp, thinwire.Int8())
    """
    return _fed_back(TwoShot(Quantize(bits=8, block=block, stochastic=stochastic)), error_feedback)


@preset
def Int4(*, block: int = 64, stochastic: bool = False, error_feedback: bool = True) -> Program:
    """Send 4-bit integers with a scale per block: a seventh of fp32's bytes.

    With blocks of 64 numbers a number takes 4.5 bits, scales included.

    Args:
        block: Numbers that share a scale. Smaller blocks are more accurate and cost more bytes.
        stochastic: Round up or down at random, so that the mean of many roundings is exact.
        error_feedback: Add the error of compression to the next step's gradient. See `ErrorFeedback`.

    Returns:
        `ErrorFeedback(TwoShot(Quantize(bits=4)))`, or without `ErrorFeedback`.

    Raises:
        OptionError: An option has the wrong type or is out of range.

    Example::

        wire = thinwire.attach(ddp, thinwire.Int4())
    """
    return _fed_back(TwoShot(Quantize(bits=4, block=block, stochastic=stochastic)), error_feedback)


@preset
def Int2(*, block: int = 128, keep: float = 1.0) -> Program:
    """Send two bits per number, with two magnitudes per block: a fourteenth of fp32's bytes.

    With blocks of 128 numbers a number takes 2.25 bits, magnitudes included. A number is sent as its sign and
    as one of two magnitudes, the means of the large and of the small numbers of its block.

    Args:
        block: Numbers that share two magnitudes, a multiple of 4. Smaller blocks are more accurate and cost
            more bytes.
        keep: Share of the residual that is fed back. See `ErrorFeedback`.

    Returns:
        `ErrorFeedback(TwoShot(TwoMagnitudes()), keep=keep)`.

    Raises:
        OptionError: An option has the wrong type or is out of range.

    Example::

        wire = thinwire.attach(ddp, thinwire.Int2())
    """
    return ErrorFeedback(TwoShot(TwoMagnitudes(block=block)), keep=keep)


@preset
def FP8(variant: Variant = "e4m3", *, block: int = 256, error_feedback: bool = True) -> Program:
    """Send 8-bit floating point numbers with a scale per block: as many bytes as Int8.

    It is more accurate than Int8 where magnitudes differ widely within a block. On most models Int8 is more
    accurate.

    Args:
        variant: "e4m3" for more precision, "e5m2" for more range within a block. See `Float8`.
        block: Numbers that share a scale.
        error_feedback: Add the error of compression to the next step's gradient. See `ErrorFeedback`.

    Returns:
        `ErrorFeedback(TwoShot(Float8()))`, or without `ErrorFeedback`.

    Raises:
        OptionError: An option has the wrong type or is out of range.

    Example::

        wire = thinwire.attach(ddp, thinwire.FP8())
    """
    return _fed_back(TwoShot(Float8(variant=variant, block=block)), error_feedback)


@preset
def Sign(*, block: int = 128, keep: float = 0.5) -> Program:
    """Send the sign of each number and a magnitude per block: a twenty-fifth of fp32's bytes.

    Use it on links where a step with Int4 still waits for the network, and Int4 otherwise. With blocks of 128
    numbers a number takes 1.25 bits, magnitudes included. Half of the residual is fed back, because with Adam
    both all of it and none of it train slower (docs/benchmarks.md).

    Args:
        block: Numbers that share a magnitude, a multiple of 8.
        keep: Share of the residual that is fed back. See `ErrorFeedback`.

    Returns:
        `ErrorFeedback(TwoShot(SignBits()), keep=keep)`.

    Raises:
        OptionError: An option has the wrong type or is out of range.

    Example::

        wire = thinwire.attach(ddp, thinwire.Warmup(thinwire.Sign(), steps=100))
    """
    return ErrorFeedback(TwoShot(SignBits(block=block)), keep=keep)


@preset
def TopK(
    ratio: float = 1 / 16, *, block: int = 4096, values: Values = "int2", error_feedback: bool = True
) -> Program:
    """Send the numbers of largest magnitude in every block, and their positions.

    With the defaults an entry takes 8.1 bits, 6 of them for its position: 1/63 of fp32's bytes, on any number
    of ranks. With a 64th it takes 10.5 bits: 1/195 of fp32's bytes. Most coordinates receive a gradient only
    occasionally. The fewer are sent, the more slowly Adam converges (docs/benchmarks.md).

    Args:
        ratio: Share that is sent, above 0 and at most 1.
        block: Numbers in a block, at most 32768. Larger blocks are more accurate and cost more time.
        values: Form of the sent numbers: "int2", "int4", "int8", "bf16" or "fp32". See `LargestEntries`.
        error_feedback: Add the error of compression to the next step's gradient. Without it numbers that are
            never among the largest are never sent.

    Returns:
        `ErrorFeedback(SparseMean(LargestEntries()))`, or without `ErrorFeedback`.

    Raises:
        OptionError: An option has the wrong type or is out of range.

    Example::

        wire = thinwire.attach(ddp, thinwire.TopK())
    """
    return _fed_back(SparseMean(LargestEntries(ratio=ratio, block=block, values=values)), error_feedback)


@preset
def RandomK(ratio: float = 0.1, *, seed: int = 0, error_feedback: bool = True) -> Program:
    """Send a random share of the numbers, at the same positions on every rank, by all-reduce.

    Positions are not sent, because every rank derives them from the seed. It is much cheaper to compute than
    `TopK`, and less accurate for the same bytes.

    Args:
        ratio: Share that is sent, above 0 and at most 1. 1/ratio is rounded to a whole number.
        seed: Seed of the positions, which change with every step.
        error_feedback: Add the error of compression to the next step's gradient. Without it gradients are
            noisy, and on average too small by the factor `ratio`.

    Returns:
        `ErrorFeedback(Reduced(RandomEntries()))`, or without `ErrorFeedback`.

    Raises:
        OptionError: An option has the wrong type or is out of range.

    Example::

        wire = thinwire.attach(ddp, thinwire.RandomK(0.1))
    """
    return _fed_back(Reduced(RandomEntries(ratio=ratio, seed=seed)), error_feedback)


def _fed_back(program: Program, error_feedback: bool) -> Program:
    if not isinstance(error_feedback, bool):
        raise OptionError(f"error_feedback={error_feedback!r} must be True or False")
    return ErrorFeedback(program) if error_feedback else program
