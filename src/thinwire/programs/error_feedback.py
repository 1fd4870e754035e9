"""Error feedback: the residual of compression is added to the next step's gradient."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real

import torch

from thinwire.codecs.codec import numbers_of
from thinwire.codecs.rounding import add_scaled
from thinwire.engine.ops import Collective, Collectives
from thinwire.engine.pack import unpack
from thinwire.errors import OptionError, ProgramError
from thinwire.programs.description import short
from thinwire.programs.finite import finite
from thinwire.programs.leftovers import add_residuals
from thinwire.programs.memory import RESIDUAL, Memory
from thinwire.programs.program import Bucket, Outcome, Residuals, is_alone
from thinwire.programs.wrapper import Wrapper


@dataclass(frozen=True, repr=False)
class ErrorFeedback(Wrapper):
    """A program that runs `program` on gradient + residual, and keeps its error as the new residual.

        mean, error = program(gradient + residual)
        residual = error

    With `keep=1` nothing is lost, only delayed. At any time the sum of the applied means plus the mean of all
    ranks' residuals equals the sum of all exact means, up to float32's rounding. Parameters that are averaged
    exactly have the rounding of their own dtype, as in plain DDP. The residual costs one float32 copy of the
    gradients, and a second one during backward, for rolling back the step.

    A step with a non-finite mean leaves residuals unchanged. So does a step for parameters that no rank used,
    which get no gradient from DDP under `find_unused_parameters`. When another program takes over, by `swap`,
    a `Schedule`, an audit or `Auto`, its first exchange of a parameter applies the residual. A group of one
    rank sends nothing, so programs of thinwire compress nothing there, and no residual is kept.

    See Stich, Cordonnier, Jaggi: Sparsified SGD with Memory, https://arxiv.org/abs/1809.07599.

    Args:
        program: Program that reports all of its error, as `TwoShot` and `Gathered` do with any codec.
            `Reduced` does unless its sums are rounded to 16 bits, as those of `BF16` are. Use
            `TwoShot(Cast(torch.bfloat16))` there, which sends as many bytes. `Warmup` and `Partition` do if
            all their programs do.
        keep: Share of the residual that is added to the gradient, above 0 and at most 1. Below 1 the rest of
            the residual is lost. This can still train faster if compression is so coarse that the residual
            outgrows the gradient and contains stale directions. See `Sign`.

    Raises:
        OptionError: `program` is not a program, or does not report all of its error, or `keep` is out of
            range.

    Example::

        wire = thinwire.attach(ddp, thinwire.ErrorFeedback(thinwire.TwoShot(thinwire.Quantize(bits=4))))
    """

    keep: float = 1.0

    stateless = False
    tracks_error = False  # the residual keeps it
    folds_residuals = False
    # Residuals have the order of the parameter's numbers, and are dense.
    ignores_order = False
    takes_sparse = False

    def __post_init__(self) -> None:
        super().__post_init__()
        # Around a sum in 16 bits, what the sum rounds away is lost: ErrorFeedback(BF16()) lost 1.7e-3 of the
        # mean after 30 steps, BF16() 2.4e-3, and ErrorFeedback(TwoShot(Cast(torch.bfloat16))) 4e-8, in as
        # many bytes.
        if not self.program.tracks_error:
            raise OptionError(
                f"program={self.program!r} feeds back its own error already, or does not report all of it:"
                " wrap the program that has the codec, as in AcrossNodes(ErrorFeedback(TwoShot(codec))) or"
                " Warmup(ErrorFeedback(TwoShot(codec)), steps); sums in 16 bits lose what no rank can report,"
                " so use TwoShot(Cast(dtype)) instead of Reduced(Cast(dtype)), for as many bytes"
            )
        if not isinstance(self.keep, Real) or not 0 < self.keep <= 1:
            raise OptionError(
                f"keep={self.keep!r} must be above 0 and at most 1: the share of the residual to feed back"
            )

    def feeds_back(self, shape: torch.Size) -> bool:
        """Return whether all of a parameter's residual is added to its gradient."""
        return self.keep == 1

    def outline(self, bucket: Bucket) -> Iterator[Collective] | None:
        """Return the collectives of a bucket as the program outlines them, or None if it has no outline."""
        return self.program.outline(_widened(bucket))

    def __call__(self, bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
        """Run the program on gradient + residual, and keep its error as the new residual."""
        if is_alone(self.program, bucket):
            add_residuals(bucket, memory)
            return (yield from self.program(bucket, memory))
        if self.program.folds_residuals:
            return (yield from self._folded(bucket, memory))
        # x <- gradient + keep * residual
        corrected = _widened(bucket)
        for name, gradient in _lossy(bucket, corrected.buffer):
            add_scaled(gradient, _kept(memory, name, gradient), self.keep)
        # mean, error <- program(x), where mean over ranks of x = mean + mean over ranks of error
        outcome = yield from self.program(corrected, memory)
        if outcome.error is None:
            raise ProgramError(
                f"{short(self.program)} returned no error to feed back: return Outcome(mean, error) where"
                " bucket.track_error is set"
            )
        # residual <- error + what rounding the mean to the gradients' dtype removes. All ranks have the same
        # mean, so the mean over ranks of their residuals contains the rounding once.
        flag = _flag(outcome)
        mean, lost = _rounded(outcome.mean, bucket.buffer.dtype, flag)
        error = outcome.error if lost is None else outcome.error.add_(lost)
        for name, missed in _lossy(bucket, error):
            memory.put(name, RESIDUAL, missed)
        return Outcome(mean, finite=flag)

    def _folded(self, bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
        """Run a program that adds the residuals, and writes the new ones, in its own passes."""
        wide = _widened(bucket)
        old: dict[str, torch.Tensor] = {}
        new: dict[str, torch.Tensor] = {}
        for name, gradient in _lossy(bucket, wide.buffer):
            # Read first: `new_value` may return the same memory, which each pass reads before it writes.
            old[name] = numbers_of(_kept(memory, name, gradient))
            new[name] = numbers_of(memory.new_value(name, RESIDUAL, gradient))
        residuals = Residuals(
            tuple(old.get(name) for name in bucket.names),
            tuple(new.get(name) for name in bucket.names),
            self.keep,
        )
        outcome = yield from self.program(replace(wide, residuals=residuals), memory)
        flag = _flag(outcome)
        mean, lost = _rounded(outcome.mean, bucket.buffer.dtype, flag)
        if lost is not None:
            for name, missed in _lossy(bucket, lost):
                new[name].add_(numbers_of(missed))
        return Outcome(mean, finite=flag)


def _widened(bucket: Bucket) -> Bucket:
    """Return the bucket in at least float32, for a program that tracks its error.

    Rounding a residual to bf16 would lose the small errors that it accumulates. Exact numbers have none, so
    they are sent in the gradients' dtype.
    """
    buffer = bucket.buffer.to(torch.promote_types(bucket.buffer.dtype, torch.float32))
    return replace(
        bucket, buffer=buffer, track_error=True, exact_dtype=bucket.exact_dtype or bucket.buffer.dtype
    )


def _flag(outcome: Outcome) -> torch.Tensor:
    """Return whether the mean is finite, before rounding, which clamps it to the dtype's range."""
    return finite(outcome.mean) if outcome.finite is None else outcome.finite


def _lossy(bucket: Bucket, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names of the compressed parameters, and their views of a buffer like the bucket's."""
    for name, view in zip(bucket.names, unpack(buffer, bucket.shapes), strict=True):
        if name not in bucket.exact:
            yield name, view


def _kept(memory: Memory, name: str, gradient: torch.Tensor) -> torch.Tensor:
    """Return a parameter's residual. Another program may have left one of another dtype."""
    residual = memory.read(name, RESIDUAL, partial(torch.zeros_like, gradient))
    return residual.to(gradient.dtype)


def _rounded(
    mean: torch.Tensor, dtype: torch.dtype, finite: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the mean clamped and rounded to `dtype`, and the removed part, or None if nothing is rounded.

    Clamping would turn infinity into a number. A program around this one, such as `AcrossNodes`, checks only
    the mean, so the mean is NaN unless all of it was `finite`.
    """
    if mean.dtype == dtype:
        return mean, None
    limits = torch.finfo(dtype)
    rounded = torch.where(finite, mean.clamp(limits.min, limits.max).to(dtype), torch.nan)
    return rounded, mean.sub_(rounded)
