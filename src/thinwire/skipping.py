"""Without a GradScaler: optimizers leave out the steps that overflowed."""

import weakref
from collections.abc import Sequence
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

    def before(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self.after(optimizer, args, kwargs)  # a step that raised has left some
        if not self._bridge.overflowed:
            return
        held = [one for group in optimizer.param_groups for one in group["params"]]
        self._hidden = [(one, one.grad) for one in held if one.grad is not None]
        for parameter, _ in self._hidden:
            parameter.grad = None

    def after(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden = []


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
