"""Skipping of overflowed steps without a GradScaler."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer


def skip_overflows(optimizers: Sequence[Optimizer], overflowed: Callable[[], bool]) -> list[Any]:
    """Hide gradients from the next step of these optimizers after a backward that overflowed.

    Args:
        optimizers: The optimizers whose steps to skip.
        overflowed: Returns whether the latest backward overflowed.

    Returns:
        Handles that remove the hooks.
    """
    handles: list[Any] = []
    for optimizer in optimizers:
        one = _Skipping(overflowed)
        handles += [
            optimizer.register_step_pre_hook(one.before),
            optimizer.register_step_post_hook(one.after),
        ]
    return handles


class _Skipping:
    """Step hooks that hide gradients from one optimizer during a step that overflowed."""

    def __init__(self, overflowed: Callable[[], bool]) -> None:
        self._overflowed = overflowed
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Hide gradients before a step; with a closure, after the backward that it runs."""
        self._show()  # a step that raised may have left some hidden
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._around(args[1], optimizer), *args[2:]), kwargs
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._around(kwargs["closure"], optimizer)}
        self._hide(optimizer)
        return None

    def after(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """Restore the gradients after a step."""
        self._show()

    def _around(self, closure: Callable[[], Any], optimizer: Optimizer) -> Callable[[], Any]:
        def checked() -> Any:
            self._show()
            loss = closure()
            self._hide(optimizer)
            return loss

        return checked

    def _hide(self, optimizer: Optimizer) -> None:
        if not self._overflowed():
            return
        held = [one for group in optimizer.param_groups for one in group["params"]]
        self._hidden = [(one, one.grad) for one in held if one.grad is not None]
        for parameter, _ in self._hidden:
            parameter.grad = None

    def _show(self) -> None:
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden = []
