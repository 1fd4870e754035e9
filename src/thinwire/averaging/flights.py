"""Averages under way: what they are of, when they are used, and what audits of them find."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from thinwire.averaging.policy import Averaging
from thinwire.programs.audit import Findings
from thinwire.programs.auditor import Auditor
from thinwire.programs.program import Program
from thinwire.wire.meter import MODELS


@dataclass(frozen=True)
class Models:
    """Audits of what models are exchanged by: who looks, and who changes the program if need be."""

    auditor: Auditor
    fall_back: Callable[[Program], Any]

    def begin(self, number: int) -> Findings | None:
        """An exchange begins."""
        return self.auditor.begin(number)

    def conclude(self, findings: Findings | None, step: int) -> Averaging | None:
        """An exchange is over: the way of averaging from now on, if it is another."""
        program = self.auditor.conclude(findings, step, MODELS)
        return None if program is None else self.fall_back(program)


@dataclass(eq=False)
class InFlight:
    """An average that was started, and the step at which it is used."""

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
    """One whose means have arrived."""
    return InFlight(fragment, due, ranks, lambda: means)
