"""What compression missed is added to the next step's gradient."""

from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import ClassVar

import torch

from thinwire.errors import OptionError, ProgramError
from thinwire.programs.memory import RESIDUAL, Memory
from thinwire.programs.overflow import is_finite, overflow
from thinwire.programs.program import Bucket, Outcome, Program, describe, require_program
from thinwire.wire.ops import Steps
from thinwire.wire.pack import unpack


@dataclass(frozen=True)
class ErrorFeedback:
    """Runs `program` on gradient + residual, and keeps as the residual what it did not get across.

        mean = program(gradient + residual)
        residual = gradient + residual - what this rank got across

    Nothing is ever lost, only delayed: what has been applied plus the mean of all ranks' residuals is at any
    time the sum of all mean gradients. It costs one float32 copy of the gradients. If the mean is not finite,
    the residual stays as it was; so does that of parameters that no rank used in a step, to which DDP gives
    no gradient under `find_unused_parameters`.

    Args:
        program: What to run; it must say what it did not get across, as `TwoShot`, `Gathered` and `Reduced`
            do for any codec.
        keep: The share of the residual that is added. Below 1 old errors are forgotten little by little, so
            something is lost; but where compression is so coarse that the residual outgrows the gradient, it
            brings stale directions, and less of it can train faster. See `Sign`.

    Stich, Cordonnier, Jaggi: Sparsified SGD with Memory, https://arxiv.org/abs/1809.07599.

    Example::

        wire = thinwire.attach(ddp, thinwire.ErrorFeedback(thinwire.TwoShot(thinwire.Quantize(bits=4))))
    """

    program: Program
    keep: float = 1.0

    tracks_error: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_program(self.program)
        if not getattr(self.program, "tracks_error", True):
            raise OptionError(
                f"program={self.program!r} makes up for its errors itself, or cannot tell them: feed back"
                " what a codec misses, as in AcrossNodes(ErrorFeedback(TwoShot(codec)))"
            )
        if not isinstance(self.keep, Real) or not 0 < self.keep <= 1:
            raise OptionError(
                f"keep={self.keep!r} must be above 0 and at most 1: the share of the error that is fed back"
            )

    def __call__(self, bucket: Bucket, memory: Memory) -> Steps[Outcome]:
        """As the program goes."""
        # At least float32: a residual that is rounded to bf16 loses what it is there to keep.
        corrected = bucket.buffer.to(torch.promote_types(bucket.buffer.dtype, torch.float32))
        for name, gradient in zip(bucket.names, unpack(corrected, bucket.shapes), strict=True):
            residual = memory.read(name, RESIDUAL, partial(torch.zeros_like, gradient))
            gradient.add_(residual.to(gradient.dtype), alpha=self.keep)  # another program may have left it
        outcome = yield from self.program(replace(bucket, buffer=corrected, track_error=True), memory)
        if outcome.error is None:
            raise ProgramError(
                f"{describe(self.program)} does not say what it failed to send, so its error cannot be fed"
                " back: return Outcome(mean, error) where bucket.track_error is set"
            )
        if not is_finite(outcome):
            return overflow(bucket)
        mean, error = _rounded(outcome.mean, outcome.error, bucket.buffer.dtype)
        for name, missed in zip(bucket.names, unpack(error, bucket.shapes), strict=True):
            memory.put(name, RESIDUAL, missed)
        return Outcome(mean, finite=True)


def _rounded(
    mean: torch.Tensor, error: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean in the gradients' dtype; what that rounds off, and what exceeds its range, is fed back too."""
    if mean.dtype == dtype:
        return mean, error
    limits = torch.finfo(dtype)
    rounded = mean.clamp(limits.min, limits.max).to(dtype)
    return rounded, error.add_(mean.sub_(rounded))
