"""The steps that a GradScaler skips on the rank whose gradients overflow, while other ranks wait for it."""

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from thinwire.amp.internals import SUPPORTS_SCALING, progress_of, supports_scaling


class SkippedSteps:
    """A monitor of one optimizer, which calls `skipped` when a GradScaler is about to skip its step.

    A GradScaler does not call `step` where gradients overflowed, so no step hook runs. The other ranks, which
    wait to average, would wait until this one's next forward. If the training loop has a collective of its
    own before that, they would deadlock.

    Optimizers that handle scales themselves (fused ones) are always called, and need no monitor. For the
    others, the scaler reads `_step_supports_amp_scaling`. This class sets that attribute to a false value
    that inspects the scaler when it is read. The scaler itself still unscales and skips the step, so wrappers
    of `step` work as without thinwire.

    Args:
        optimizer: The optimizer to watch.
        skipped: Called with the optimizer before a step is skipped.
    """

    def __init__(self, optimizer: Optimizer, skipped: Callable[[Optimizer], None]) -> None:
        self._optimizer = optimizer
        self._skipped = skipped
        self._answer: _No | None = None
        if not supports_scaling(optimizer):
            known = vars(optimizer).get(SUPPORTS_SCALING)
            self._answer = known if isinstance(known, _No) else _No(optimizer)
            self._answer.listeners.append(skipped)
            setattr(optimizer, SUPPORTS_SCALING, self._answer)

    def remove(self) -> None:
        """Stop monitoring, and restore the optimizer."""
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.listeners.remove(self._skipped)
            if not answer.listeners:
                delattr(self._optimizer, SUPPORTS_SCALING)


class _No:
    """A false value that calls its listeners if the GradScaler that reads it has found an overflow."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.listeners: list[Callable[[Optimizer], None]] = []
        self._optimizer = weakref.ref(optimizer)

    def __bool__(self) -> bool:
        caller, optimizer = sys._getframe(1), self._optimizer()
        scaler = caller.f_locals.get("self")
        in_step = caller.f_code.co_name == "step" and caller.f_locals.get("optimizer") is optimizer
        if optimizer is not None and in_step and isinstance(scaler, GradScaler):
            state = progress_of(scaler, optimizer)
            if state is None or state["stage"] is OptState.READY:
                scaler.unscale_(optimizer)  # the scaler would do so next, and does it only once
                state = progress_of(scaler, optimizer)
            if state and sum(found.item() for found in state["found_inf_per_device"].values()):
                for listener in list(self.listeners):
                    listener(optimizer)
        return False


def wrapped_step(wrapper: torch.optim.Optimizer, optim: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the wrapped optimizer's step, unless a GradScaler found non-finite gradients.

    A wrapper that communicates sets `_step_supports_amp_scaling`. GradScaler then calls its `step` on every
    rank, with `found_inf` set. Otherwise it would skip the call on ranks whose gradients overflow, and the
    other ranks would wait for them.

    Args:
        wrapper: The wrapping optimizer, on which GradScaler sets `grad_scale` and `found_inf`.
        optim: The wrapped optimizer.
        *args: Passed to its `step`.
        **kwargs: Passed to its `step`.

    Returns:
        The result of its `step`; None if it was skipped.
    """
    if "found_inf" not in wrapper.__dict__:
        return optim.step(*args, **kwargs)
    scale, found = wrapper.__dict__["grad_scale"], wrapper.__dict__["found_inf"]
    if supports_scaling(optim):
        optim.grad_scale, optim.found_inf = scale, found
        try:
            return optim.step(*args, **kwargs)
        finally:
            del optim.grad_scale, optim.found_inf
    if scale is not None:
        _unscale(wrapper, scale)
    return None if found else optim.step(*args, **kwargs)


@torch.no_grad()
def _unscale(optimizer: Optimizer, scale: torch.Tensor) -> None:
    """Divide all gradients by a GradScaler's scale, with its own arithmetic."""
    inverse = scale.double().reciprocal().float()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(inverse.to(parameter.grad.device))
