"""Which GradScaler scales this model's loss, and by how much now.

A residual is in the units of the gradients it came from, and a scaler changes those.
"""

import gc
import logging
import weakref
from collections.abc import Sequence

import torch
from torch.amp import GradScaler

logger = logging.getLogger("thinwire")


def living_scalers() -> list[GradScaler]:
    """All that are in use in this process: they tell nobody, so they are looked for among all objects."""
    kinds = [thing for thing in gc.get_objects() if issubclass(type(thing), GradScaler)]
    return [scaler for scaler in kinds if scaler.is_enabled() and scaler._scale is not None]


class Scales:
    """The scale of one model's loss: of the scaler that was named, or of the only one there is."""

    def __init__(self, scaler: GradScaler | None = None) -> None:
        self._scaler: weakref.ref[GradScaler] | None = None if scaler is None else weakref.ref(scaler)
        self._looked = False

    def now(self, after_overflow: bool) -> float | None:
        """The scale of the gradients at hand; None without a scaler.

        It is looked for once, and again after an overflow, which is when a scale matters.
        """
        scaler = None if self._scaler is None else self._scaler()
        gone = self._scaler is not None and scaler is None
        if scaler is None and (after_overflow or gone or not self._looked):
            self._looked = True
            found = living_scalers()
            if len(found) > 1:
                logger.warning(
                    "%d GradScalers are in use: give this model's own, attach(..., scaler=scaler), so that"
                    " residuals follow its scale",
                    len(found),
                )
            scaler = found[0] if len(found) == 1 else None
            self._scaler = None if scaler is None else weakref.ref(scaler)
        if scaler is None or not scaler.is_enabled() or scaler._scale is None:
            return None
        scale: torch.Tensor = scaler._scale
        return float(scale.item())

    def standing(self) -> tuple[float, int] | None:
        """The scale, and the steps since it last changed; None without a scaler."""
        scale, scaler = self.now(False), None if self._scaler is None else self._scaler()
        return None if scale is None or scaler is None else (scale, scaler._get_growth_tracker())

    def bring_together(self, standings: Sequence[tuple[float, int] | None]) -> None:
        """Where ranks have trained apart, so have their scalers: all go on with the least of their scales.

        Otherwise the mean would be of gradients in different units, or would be before long.
        """
        scaler = None if self._scaler is None else self._scaler()
        told = [one for one in standings if one is not None]
        if scaler is None or len(told) < len(standings) or len(set(told)) == 1:
            return
        scaler.update(min(scale for scale, _ in told))
        tracker = scaler._growth_tracker
        if tracker is not None:
            tracker.fill_(0)
