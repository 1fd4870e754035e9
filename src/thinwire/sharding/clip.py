"""Gradients that only their owners hold: their norm over all ranks, and who clipped without it."""

import math
from collections.abc import Iterable

import torch

from thinwire.errors import UnavailableError
from thinwire.wire.ops import AllGather, Steps

_DIFFERS = 1e-3
_UNIFORM = 1e-4


def norm_of(gradients: Iterable[torch.Tensor], kind: float) -> torch.Tensor:
    """The norm of this rank's own gradients together."""
    norms = [torch.linalg.vector_norm(gradient.detach(), kind).double() for gradient in gradients]
    return (
        torch.linalg.vector_norm(torch.stack(norms), kind) if norms else torch.zeros((), dtype=torch.float64)
    )


def total_norm(own: torch.Tensor, kind: float) -> Steps[torch.Tensor]:
    """The norm of all ranks' gradients together."""
    norms = yield AllGather(own.reshape(1))
    total: torch.Tensor = torch.linalg.vector_norm(norms.flatten(), kind)
    return total


class Scale:
    """By how much this rank's gradients have been scaled since backward, if all by the same factor."""

    def __init__(self) -> None:
        self._before: list[float] = []

    def remember(self, gradients: list[torch.Tensor]) -> None:
        """What backward has left."""
        self._before = _measures(gradients)

    def factor(self, gradients: list[torch.Tensor]) -> float:
        """How much larger they are now; NaN if that cannot be said."""
        now = _measures(gradients)
        if len(gradients) < 2 or len(now) != len(self._before) or not all(self._before):
            return math.nan
        first, second = (after / before for after, before in zip(now, self._before, strict=True))
        return first if abs(first - second) <= _UNIFORM * abs(first) else math.nan


def _measures(gradients: list[torch.Tensor]) -> list[float]:
    return [float(norm_of(gradients, kind)) for kind in (2.0, math.inf)] if gradients else []


def compare_factors(own: float, device: torch.device) -> Steps[torch.Tensor]:
    """Raise, on every rank, if ranks have scaled their gradients by different factors."""
    gathered = yield AllGather(torch.tensor([own], dtype=torch.float64, device=device))
    factors = [factor for factor in gathered.flatten().tolist() if not math.isnan(factor)]
    if factors and max(factors) - min(factors) > _DIFFERS * max(map(abs, factors)):
        told = ", ".join(f"{factor:.3g}" for factor in gathered.flatten().tolist())
        raise UnavailableError(
            f"ranks have scaled their gradients by different factors ({told}), as clip_grad_norm_ does where"
            " every rank holds only its own: use wire.clip_grad_norm_(max_norm)"
        )
    result: torch.Tensor = gathered
    return result
