"""What every program does when the mean is not finite: DDP hears of it, and nothing is remembered."""

import math

import torch

from thinwire.programs.program import Bucket, Outcome


def all_finite(x: torch.Tensor) -> bool:
    """Whether no number is infinite or NaN.

    By the sum, into which both go: forty times as fast as looking at each. Where that is not finite, huge
    numbers may have added up to it, and the extremes tell.
    """
    real = torch.view_as_real(x) if x.is_complex() else x
    total = real.sum(dtype=torch.promote_types(real.dtype, torch.float32))
    return bool(total.isfinite()) or all(extreme.isfinite() for extreme in real.aminmax())


def is_finite(outcome: Outcome) -> bool:
    """Whether a mean is finite; looks where nobody has."""
    return all_finite(outcome.mean) if outcome.finite is None else outcome.finite


def overflow(bucket: Bucket) -> Outcome:
    """NaN for all of the bucket: a GradScaler sees it and skips the step."""
    return Outcome(bucket.buffer.fill_(math.nan), finite=False)
