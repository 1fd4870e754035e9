"""Averages in flight, with their fragment and the step at which they are applied."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from thinwire.monitors.audit import Findings


@dataclass(eq=False)
class InFlight:
    """An average that was started, to be applied at step `due` of averaging."""

    fragment: int
    due: int
    ranks: tuple[int, ...]
    means: Callable[[], dict[str, torch.Tensor]]
    findings: Findings | None = None


def keep(flight: InFlight) -> None:
    """Wait for the means, and keep them until they are due."""
    means = flight.means()
    flight.means = lambda: means


def kept(fragment: int, due: int, ranks: tuple[int, ...], means: dict[str, torch.Tensor]) -> InFlight:
    """Return an average whose means have arrived."""
    return InFlight(fragment, due, ranks, lambda: means)
