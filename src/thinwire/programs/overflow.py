"""What every program does when the mean is not finite: DDP hears of it, and nothing is remembered."""

import math

import torch

from thinwire.programs.program import Bucket, Outcome


def all_finite(x: torch.Tensor) -> bool:
    """Whether no number is infinite or NaN; by their extremes, twenty times as fast as looking at each."""
    real = torch.view_as_real(x) if x.is_complex() else x
    return not x.numel() or all(extreme.isfinite() for extreme in real.aminmax())


def spread(bucket: Bucket) -> None:
    """Where a bucket's parts go different ways: if one number is infinite or NaN, all become NaN.

    So that every part, on every rank, hears of it, and all of them forget the step.
    """
    if not all_finite(bucket.buffer):
        overflow(bucket)


def overflow(bucket: Bucket) -> Outcome:
    """NaN for all of the bucket: a GradScaler sees it and skips the step."""
    return Outcome(bucket.buffer.fill_(math.nan))
