"""Points of a run at which models are exchanged, compared across ranks before any mean is used.

Ranks that take different numbers of steps would otherwise mix one rank's pseudo-gradients with another's
parameters. Both have the same shapes, so no backend could detect it.
"""

from collections import defaultdict
from dataclasses import dataclass

import torch

from thinwire.engine.comm.rendezvous import ranks_text
from thinwire.engine.ops import AllGather, Collectives
from thinwire.errors import MismatchError

_WHOLE, _DIVERGED = -1, -2
"""Placeholders for a fragment in headers: whole models, and whole models that this rank has changed."""


@dataclass(frozen=True)
class ExchangeId:
    """An exchange by the step that it follows and its fragment, which is None for whole models."""

    step: int
    fragment: int | None

    def __str__(self) -> str:
        if self.fragment is None:
            return f"synchronising models (finalize or swap) after step {self.step}"
        return f"averaging fragment {self.fragment} after step {self.step}"


def gather_points(own: ExchangeId, ranks: tuple[int, ...], device: torch.device) -> Collectives[torch.Tensor]:
    """Gather the points of these ranks, 8 bytes each, and compare them on CPU.

    On an accelerator the comparison would block the host until the slowest rank arrives. There the caller
    compares the result later, when it uses the means.

    Raises:
        MismatchError: Ranks are at different points.
    """
    fragment = _WHOLE if own.fragment is None else own.fragment
    header = torch.tensor([own.step, fragment], dtype=torch.int32, device=device)
    gathered: torch.Tensor = yield AllGather(header)
    if device.type == "cpu":
        compare_points(gathered, ranks)
    return gathered


def gather_diverged(step: int, diverged: bool, device: torch.device) -> Collectives[torch.Tensor]:
    """Gather whether ranks have changed their models since the last average, in the form of points.

    Every rank must take part. Ranks with different numbers of steps are then detected, and all ranks make the
    same decision whether to synchronise models.
    """
    kind = _DIVERGED if diverged else _WHOLE
    gathered: torch.Tensor = yield AllGather(torch.tensor([step, kind], dtype=torch.int32, device=device))
    return gathered


def any_diverged(gathered: torch.Tensor) -> bool:
    """Return whether any rank has changed its model, from the result of `gather_diverged`."""
    return bool((gathered[:, 1] == _DIVERGED).any())


def compare_points(gathered: torch.Tensor, ranks: tuple[int, ...]) -> None:
    """Raise the same MismatchError on all of these ranks if their points differ."""
    points: dict[ExchangeId, list[int]] = defaultdict(list)
    for rank, (step, fragment) in zip(ranks, gathered.tolist(), strict=True):
        points[ExchangeId(step, None if fragment < 0 else fragment)].append(rank)
    if len(points) > 1:
        sides = "; ".join(f"{ranks_text(members)} {point}" for point, members in points.items())
        raise MismatchError(
            f"ranks are at different exchanges of models: {sides}. Every rank must take the same number"
            " of steps: give all ranks the same number of batches (DistributedSampler, drop_last), and resume"
            " from the last checkpoint"
        )
