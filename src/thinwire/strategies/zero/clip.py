"""Clipping of gradients that only their owners hold, and detection of other changes to them."""

from collections.abc import Iterable, Mapping

import torch

from thinwire.engine.ops import AllGather, Collectives
from thinwire.step.autograd import version_of


def norm_of(gradients: Iterable[torch.Tensor], kind: float) -> torch.Tensor:
    """Return the total norm of this rank's own gradients."""
    held = [gradient.detach() for gradient in gradients if gradient.numel()]
    norms = [torch.linalg.vector_norm(gradient, kind).float() for gradient in held]
    if not norms:
        return torch.zeros((), dtype=torch.float32, device="cpu")
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), kind)
    return total


def total_norm(own: torch.Tensor, kind: float) -> Collectives[torch.Tensor]:
    """Return the total norm of all ranks' gradients, given each rank's own."""
    norms = yield AllGather(own.reshape(1))
    total: torch.Tensor = torch.linalg.vector_norm(norms.flatten(), kind)
    return total


class Versions:
    """Addresses and version counters of gradients, to detect later changes.

    torch counts every in-place change of a tensor, except those through `.data` and those of
    `GradScaler.unscale_`, which are the same on all ranks.
    """

    def __init__(self) -> None:
        self._before: dict[str, tuple[int, int]] | None = None

    def remember(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Record the gradients as they are now."""
        self._before = _versions(gradients)

    def changed(self, gradients: Mapping[str, torch.Tensor]) -> bool:
        """Return whether a gradient was changed, replaced or added since `remember`. Forget the record."""
        before, self._before = self._before, None
        return before is not None and not _versions(gradients).items() <= before.items()


def _versions(gradients: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, int]]:
    return {name: (gradient.data_ptr(), version_of(gradient)) for name, gradient in gradients.items()}
