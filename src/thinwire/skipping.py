"""Without a GradScaler: optimizers leave out the steps that overflowed."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from thinwire.bridge import Bridge


def skip(optimizers: Sequence[Optimizer], bridge: Bridge, ddp: DistributedDataParallel) -> None:
    """From now on, after a backward that overflowed, these find no gradients in their next step."""
    handles: list[Any] = []
    for optimizer in optimizers:
        one = _Skipping(bridge)
        handles += [
            optimizer.register_step_pre_hook(one.before),
            optimizer.register_step_post_hook(one.after),
        ]
    weakref.finalize(ddp, _remove, handles)


class _Skipping:
    """Hides gradients from one optimizer during a step that does not count."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """A step begins; where it has a closure, the backward that matters is still to come."""
        self._show()  # a step that raised has left some
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._around(args[1], optimizer), *args[2:]), kwargs
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._around(kwargs["closure"], optimizer)}
        self._hide(optimizer)
        return None

    def after(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self._show()

    def _around(self, closure: Callable[[], Any], optimizer: Optimizer) -> Callable[[], Any]:
        def looked_at() -> Any:
            self._show()
            loss = closure()
            self._hide(optimizer)
            return loss

        return looked_at

    def _hide(self, optimizer: Optimizer) -> None:
        if not self._bridge.overflowed:
            return
        held = [one for group in optimizer.param_groups for one in group["params"]]
        self._hidden = [(one, one.grad) for one in held if one.grad is not None]
        for parameter, _ in self._hidden:
            parameter.grad = None

    def _show(self) -> None:
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden = []


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
