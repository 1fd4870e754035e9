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
    held = [gradient.detach() for gradient in gradients if gradient.numel()]
    norms = [torch.linalg.vector_norm(gradient, kind).float() for gradient in held]
    return torch.linalg.vector_norm(torch.stack(norms), kind) if norms else torch.zeros(())


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

    def forget(self) -> None:
        """Whatever has been done to them since was right."""
        self._before = []

    def factor(self, gradients: list[torch.Tensor]) -> tuple[float, float]:
        """How much larger they are now, NaN if that cannot be said; and their norm before."""
        now = _measures(gradients)
        if not self._before or len(now) != len(self._before) or not all(self._before):
            return math.nan, 0.0
        first, second = (after / before for after, before in zip(now, self._before, strict=True))
        close = max(4 * torch.finfo(gradient.dtype).eps for gradient in gradients)
        uniform = abs(first - second) <= max(close, _UNIFORM) * abs(first)
        return (first if uniform else math.nan), self._before[0]


def _measures(gradients: list[torch.Tensor]) -> list[float]:
    return [float(norm_of(gradients, kind)) for kind in (2.0, math.inf)] if gradients else []


def compare_factors(own: tuple[float, float], device: torch.device) -> Steps[torch.Tensor]:
    """Raise, on every rank, if all look as if clipped to one norm, each by its own gradients' alone."""
    gathered = yield AllGather(torch.tensor(own, dtype=torch.float32, device=device))
    told = [(factor, norm) for factor, norm in gathered.tolist() if norm]
    limits = [factor * norm for factor, norm in told if factor < 1 - _DIFFERS]
    if limits and len(told) > 1:
        limit = max(limits)
        expected = [min(1.0, limit / norm) for _, norm in told]
        alike = all(
            abs(factor - right) <= _DIFFERS * right for (factor, _), right in zip(told, expected, strict=True)
        )
        if alike and max(expected) - min(expected) > _DIFFERS:
            factors = ", ".join(f"{factor:.3g}" for factor, _ in told)
            raise UnavailableError(
                f"ranks have scaled their gradients by different factors ({factors}), to a norm of"
                f" {limit:.3g} each, as clip_grad_norm_ does where every rank holds only its own: use"
                " wire.clip_grad_norm_(max_norm)"
            )
    result: torch.Tensor = gathered
    return result
