"""A GradScaler calls `step` on every rank, also on one whose gradients overflow."""

from typing import Any

import torch
from torch.optim import Optimizer

_SUPPORTS = "_step_supports_amp_scaling"
_TOLD = ("found_inf", "grad_scale")
"""What a GradScaler leaves on such an optimizer while it calls `step`, and takes away afterwards."""


class Scaled:
    """Takes over a GradScaler's unscaling and skipping for an optimizer, until it is removed.

    A GradScaler leaves out the call of `step` where gradients overflowed, so that nobody could tell that the
    step is over; the other ranks, who wait to average, would wait until this one's next forward. For
    optimizers that say they can do it themselves (fused ones can) it always calls `step` and says what it
    found. Others do it here: gradients are unscaled before their step, and hidden from it to skip it.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer: Any = optimizer
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._told: dict[str, Any] = {}
        self._handles: list[Any] = []
        if not getattr(optimizer, _SUPPORTS, False):
            setattr(optimizer, _SUPPORTS, True)
            self._handles = [
                optimizer.register_step_pre_hook(self._before),
                optimizer.register_step_post_hook(self._after),
            ]

    def remove(self) -> None:
        """Leave the optimizer as it was."""
        if self._handles:
            delattr(self._optimizer, _SUPPORTS)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before(self, optimizer: Any, args: object, kwargs: object) -> None:
        self._after(optimizer, args, kwargs)  # a step that raised has left something
        # torch's own optimizers refuse what they are not fused for.
        self._told = {name: vars(optimizer).pop(name) for name in _TOLD if name in vars(optimizer)}
        if not self._told:
            return
        found, scale = (self._told[name] for name in _TOLD)
        held = [one for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
        if found.item():
            self._hidden = [(parameter, parameter.grad) for parameter in held]
            for parameter in held:
                parameter.grad = None
        elif scale is not None:
            unscale(optimizer, scale)

    def _after(self, optimizer: object, args: object, kwargs: object) -> None:
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        vars(optimizer).update(self._told)
        self._hidden, self._told = [], {}


@torch.no_grad()
def unscale(optimizer: Optimizer, scale: torch.Tensor) -> None:
    """Divide all gradients by a GradScaler's scale, with its own arithmetic."""
    inverse = scale.double().reciprocal().float()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(inverse.to(parameter.grad.device))
