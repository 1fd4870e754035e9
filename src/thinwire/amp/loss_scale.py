"""The GradScaler of a model's loss, and its present scale.

A residual has the scale of the gradients it came from, and a GradScaler changes that scale. Scalers are not
registered anywhere. Unless the user gives one, it is identified as the scaler that calls `step` of an
optimizer that holds this model's parameters.
"""

import gc
import json
import logging
import sys
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal, TypeAlias

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from thinwire.amp.internals import (
    forget_steps_since_change,
    progress_of,
    scale_tensor,
    steps_since_change,
)
from thinwire.errors import UnavailableError

logger = logging.getLogger("thinwire")

ScalerOption: TypeAlias = GradScaler | Literal["auto"] | None
"""The scaler of a model's loss, or None if it has none, or "auto" for the one that steps its optimizer."""


def living_scalers() -> list[GradScaler]:
    """Return all scalers in use in this process, except those that gc.freeze() hides."""
    kinds = [thing for thing in gc.get_objects() if issubclass(type(thing), GradScaler)]
    return [scaler for scaler in kinds if scale_of(scaler) is not None]


def scale_of(scaler: GradScaler | None) -> torch.Tensor | None:
    """Return a copy of a scaler's scale, which the host does not read.

    Returns:
        A scalar tensor; None if the scaler is disabled or has not scaled anything yet. It is a copy, because
        GradScaler.update() changes its own in place.
    """
    scale = None if scaler is None or not scaler.is_enabled() else scale_tensor(scaler)
    return None if scale is None else scale.detach().reshape(()).clone()


@dataclass(frozen=True)
class Units:
    """The scale of the current gradients, as far as it is known."""

    scales: tuple[torch.Tensor | None, ...] = ()
    """Scales to convert residuals to, one after another; empty while the scaler is not known."""
    relabelled: bool = False
    """Whether residuals were labelled with the scale of another scaler."""


def check_no_scaler(instead: str) -> None:
    """Raise UnavailableError if a GradScaler is in use. It would unscale after the step inside backward."""
    if living_scalers():
        raise UnavailableError(
            "a GradScaler is in use, but the step is inside backward, before it could unscale gradients:"
            f" train in bf16 without one, or {instead}"
        )


class Scales:
    """The scale of one model's loss, from the given scaler or the one that steps the model's optimizer.

    Before the first step, and after that scaler was dropped, the only scaler in use in the process is taken.
    Where there are several, or gc.freeze() may hide one, residuals are left as they are.
    """

    def __init__(self, scaler: ScalerOption = "auto") -> None:
        self.named = not isinstance(scaler, str)
        """Whether the user passed `scaler`, be it a scaler or None."""
        self._scaler = weakref.ref(scaler) if isinstance(scaler, GradScaler) else None
        self._seen = self.named
        self._searched = self._hidden = False
        self._exchanged = False
        """Whether gradients were exchanged since the optimizer's last step."""
        self._new: Units | None = None

    def watch(self, parameters: Collection[int]) -> list[Any]:
        """Detect from now on which scaler steps optimizers of these parameters.

        Args:
            parameters: The `id` of each parameter.

        Returns:
            Handles that end the detection.
        """
        if self.named:
            return []

        def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if self._exchanged and holds_any(optimizer, parameters):
                self._stepped_by(_calling_scaler(sys._getframe()), optimizer)

        return [register_optimizer_step_pre_hook(torch.compiler.disable(before_step))]

    def _stepped_by(self, scaler: GradScaler | None, optimizer: Optimizer) -> None:
        """Adopt the scaler that steps an optimizer. Gradients and the step's residuals have its scale."""
        held, self._exchanged = None if self._scaler is None else self._scaler(), False
        if scaler is None and held is not None and progress_of(held, optimizer) is not None:
            scaler = held  # it has unscaled these gradients, and the loop calls optimizer.step() itself
        scale = scale_of(scaler)
        scaler = None if scale is None else scaler
        if scaler is not held or not self._seen:
            self._new = Units((scale,), relabelled=scaler is not held)
        self._scaler = None if scaler is None else weakref.ref(scaler)
        self._seen, self._hidden = True, False

    def units(self, after_overflow: bool) -> Units:
        """Return the scale of the gradients of a backward that has just begun.

        Args:
            after_overflow: Whether the latest step was rolled back.
        """
        scale = self._now(after_overflow)
        self._exchanged = True
        if self._hidden:
            return Units()
        new, self._new = self._new, None
        return Units((scale,)) if new is None else Units((*new.scales, scale), new.relabelled)

    def _now(self, after_overflow: bool) -> torch.Tensor | None:
        scaler = None if self._scaler is None else self._scaler()
        gone = self._scaler is not None and scaler is None
        if gone or (not self._seen and (after_overflow or not self._searched)):
            scaler = self._search(after_overflow)
        return scale_of(scaler)

    def _search(self, after_overflow: bool) -> GradScaler | None:
        """Return the only scaler in the process, until one is detected to step this model."""
        self._searched, self._seen, found = True, False, living_scalers()
        if len(found) > 1 and after_overflow:
            logger.warning(
                "%d GradScalers are in use: pass this model's own, as in attach(..., scaler=scaler), so that"
                " residuals follow its scale",
                len(found),
            )
        self._hidden = len(found) > 1 or (not found and gc.get_freeze_count() > 0)
        scaler = found[0] if len(found) == 1 else None
        self._scaler = None if scaler is None else weakref.ref(scaler)
        return scaler

    def standing(self) -> tuple[float, int] | None:
        """Return the scale and the number of steps since it last changed; None without a scaler."""
        scale, scaler = self._now(False), None if self._scaler is None else self._scaler()
        if scale is None or scaler is None:
            return None
        return float(scale.item()), steps_since_change(scaler)

    def share(self, gather: Callable[[str], list[str]]) -> None:
        """Synchronise all ranks' scalers after ranks have trained separately.

        Args:
            gather: Returns all ranks' texts, given this rank's.
        """
        standings = [json.loads(text) for text in gather(json.dumps(self.standing()))]
        self.bring_together([tuple(standing) if standing else None for standing in standings])

    def bring_together(self, standings: Sequence[tuple[float, int] | None]) -> None:
        """Set this rank's scaler to the smallest of all ranks' scales, if they differ.

        Otherwise gradients of different scales would be averaged, now or as soon as one scaler changes.

        Args:
            standings: The result of `standing` on each rank.
        """
        scaler = None if self._scaler is None else self._scaler()
        known = [standing for standing in standings if standing is not None]
        if scaler is None or len(known) < len(standings) or len(set(known)) == 1:
            return
        scaler.update(min(scale for scale, _ in known))
        forget_steps_since_change(scaler)


def holds_any(optimizer: Optimizer, parameters: Collection[int]) -> bool:
    """Return whether an optimizer holds any of the parameters with these `id`s."""
    return any(id(held) in parameters for group in optimizer.param_groups for held in group["params"])


def _calling_scaler(frame: FrameType | None) -> GradScaler | None:
    """Return the scaler whose `step` is on the call stack, if any. The optimizer gets no reference to it."""
    while frame is not None:
        if frame.f_code.co_name == "step":
            caller = frame.f_locals.get("self")
            if isinstance(caller, GradScaler):
                return caller
        frame = frame.f_back
    return None
