"""When a training step is over: the optimizers' own hooks tell, so the training loop stays as it is."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer


class Rounds:
    """Calls `ended` after every step, once, and `begun` at the start of every forward.

    A step is over when all optimizers have stepped since the last backward. An optimizer that did not,
    because a GradScaler saw an overflow on this rank alone, is not waited for: the next forward ends the
    step, so that all ranks count the same. Forwards and backwards inside an optimizer's own step, in its
    closure, are part of that step.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizers: Sequence[Optimizer],
        begun: Callable[[], None],
        ended: Callable[[], None],
    ) -> None:
        self.open = False
        """Whether a backward has run whose step is not over."""
        self._begun, self._ended = begun, ended
        self._awaited = {id(optimizer) for optimizer in optimizers}
        self._stepped: set[int] = set()
        self._inside: set[int] = set()
        self._cut_short = False
        self._handles: list[Any] = [ddp.register_forward_pre_hook(self._forward)]
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._step_begins))
            self._handles.append(optimizer.register_step_post_hook(self._step_ends))
        # The optimizer may outlive the model.
        weakref.finalize(ddp, _remove, self._handles)

    def remove(self) -> None:
        """Stop listening."""
        _remove(self._handles)

    def backward(self) -> None:
        """Gradients are complete."""
        self.open, self._cut_short = True, False

    def end(self) -> None:
        """The step is over, whatever the optimizers did."""
        self.open = False
        self._stepped.clear()
        self._ended()

    def _forward(self, module: object, inputs: object) -> None:
        if self._inside or not torch.is_grad_enabled():
            return
        if self.open:
            self._cut_short = True
            self.end()
        self._begun()

    def _step_begins(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self._inside.add(id(optimizer))

    def _step_ends(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self._inside.discard(id(optimizer))
        self._stepped.add(id(optimizer))
        if self._stepped == self._awaited and not self._cut_short:
            self.end()


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
