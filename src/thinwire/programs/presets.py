"""Complete programs by name: a codec, the exchange that suits it, and error feedback."""

from thinwire.codecs.float8 import Float8
from thinwire.codecs.quantize import Quantize
from thinwire.codecs.randomk import RandomEntries
from thinwire.codecs.sign import SignBits
from thinwire.codecs.topk import LargestEntries
from thinwire.errors import OptionError
from thinwire.programs.allreduce import Reduced
from thinwire.programs.error_feedback import ErrorFeedback
from thinwire.programs.gathered import Gathered
from thinwire.programs.program import Program
from thinwire.programs.twoshot import TwoShot

# ruff: noqa: N802 - these read as the programs they make


def Int8(*, block: int = 256, stochastic: bool = False, error_feedback: bool = True) -> Program:
    """Eight bits a number: a quarter of fp32's bytes, and no loss of accuracy that we could measure.

    The first thing to try after BF16. See `Quantize` for the options.

    Example::

        wire = thinwire.attach(ddp, thinwire.Int8())
    """
    return _fed_back(TwoShot(Quantize(bits=8, block=block, stochastic=stochastic)), error_feedback)


def Int4(*, block: int = 64, stochastic: bool = False, error_feedback: bool = True) -> Program:
    """Four bits a number, 4.5 with the scales: a seventh of fp32's bytes.

    Example::

        wire = thinwire.attach(ddp, thinwire.Int4())
    """
    return _fed_back(TwoShot(Quantize(bits=4, block=block, stochastic=stochastic)), error_feedback)


def FP8(variant: str = "e4m3", *, block: int = 256, error_feedback: bool = True) -> Program:
    """Eight-bit floating point, "e4m3" or "e5m2": as many bytes as Int8.

    Better than Int8 where magnitudes differ widely within a block; on most models Int8 is more accurate.

    Example::

        wire = thinwire.attach(ddp, thinwire.FP8())
    """
    return _fed_back(TwoShot(Float8(variant=variant, block=block)), error_feedback)


def Sign(*, block: int = 128, keep: float = 0.5) -> Program:
    """One bit a number, 1.25 with the magnitudes: a twenty-fifth of fp32's bytes.

    For links so slow that Int4 still waits for them; train with Int4 where you can. Half of the residual is
    fed back: with Adam the whole of it, and none of it, train slower (docs/benchmarks.md).

    Args:
        block: Numbers that share a magnitude.
        keep: The share of the residual that is fed back; see `ErrorFeedback`.

    Example::

        wire = thinwire.attach(ddp, thinwire.Warmup(thinwire.Sign(), steps=100))
    """
    return ErrorFeedback(TwoShot(SignBits(block=block)), keep=keep)


def TopK(ratio: float = 0.01, *, block: int = 1024, error_feedback: bool = True) -> Program:
    """The numbers of largest magnitude, a share of every block, and where they stand.

    At 1 % a hundredth of fp32's bytes for two ranks, and as many more as there are ranks; from three on
    `ErrorFeedback(TwoShot(LargestEntries()))` sends less, but chooses twice. Most coordinates hear of their
    gradient only now and then, which Adam takes badly: begin with `Warmup`, and expect to need more steps.

    Args:
        ratio: The share that is sent.
        block: Out of how many numbers it is chosen: smaller is faster, larger more accurate.
        error_feedback: Without it what is never among the largest is never learnt.

    Example::

        wire = thinwire.attach(ddp, thinwire.Warmup(thinwire.TopK(0.01), steps=100))
    """
    return _fed_back(Gathered(LargestEntries(ratio=ratio, block=block)), error_feedback)


def RandomK(ratio: float = 0.1, *, seed: int = 0, error_feedback: bool = True) -> Program:
    """A random share of the numbers, the same places on every rank, all-reduced: no places travel.

    Much cheaper to compute than `TopK` and less accurate for its bytes.

    Args:
        ratio: The share that is sent: one of every 1/ratio numbers, rounded to a whole number.
        seed: Of the places, which differ from step to step.
        error_feedback: Without it gradients are small by the ratio, and noisy.

    Example::

        wire = thinwire.attach(ddp, thinwire.RandomK(0.1))
    """
    return _fed_back(Reduced(RandomEntries(ratio=ratio, seed=seed)), error_feedback)


def _fed_back(program: Program, error_feedback: bool) -> Program:
    if not isinstance(error_feedback, bool):
        raise OptionError(f"error_feedback={error_feedback!r} must be True or False")
    return ErrorFeedback(program) if error_feedback else program
