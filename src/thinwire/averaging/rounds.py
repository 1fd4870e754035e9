"""When a training step is over: the optimizers' own hooks tell, so the training loop stays as it is."""

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from thinwire.averaging.scaler import Scaled

_LONG_WITHOUT_A_STEP = 10


class Listener(Protocol):
    """Who is told."""

    def begin(self) -> None:
        """A forward that trains begins."""

    def end(self) -> None:
        """A step is over."""

    def stepped_late(self) -> None:
        """An optimizer has stepped after its step was over."""


class Rounds:
    """Tells `listener` of every step's end, once.

    A step is over when all optimizers have stepped since the last backward; a GradScaler that finds an
    overflow on this rank has them skip, and they count as stepped. Where the training loop itself leaves out
    a step, the next forward ends it, so that all ranks count the same. Forwards and backwards in an
    optimizer's closure are part of its step.
    """

    def __init__(
        self, ddp: DistributedDataParallel, optimizers: Sequence[Optimizer], listener: Listener
    ) -> None:
        self.open = False
        """Whether a backward has run whose step is not over."""
        self._listener = listener
        self._awaited = {id(optimizer) for optimizer in optimizers}
        self._stepped: set[int] = set()
        self._stepping: set[int] = set()
        self._in_closure = False
        self._cut_short = False
        self._without = 0
        self._handles: list[Any] = [ddp.register_forward_pre_hook(self._forward)]
        for optimizer in optimizers:
            scaled = Scaled(optimizer)
            self._handles += [
                scaled,
                optimizer.register_step_pre_hook(self._step_begins),
                optimizer.register_step_post_hook(self._step_ends),
            ]
        # The optimizer may outlive the model.
        weakref.finalize(ddp, _remove, self._handles)

    def remove(self) -> None:
        """Stop listening."""
        _remove(self._handles)

    def backward(self) -> None:
        """Gradients are complete."""
        self.open, self._cut_short = True, False

    def cut_short(self) -> None:
        """End the step that is open, if one is, without its optimizers."""
        if self.open:
            self._cut_short = True
            self._end()

    def _end(self) -> None:
        self.open = False
        self._stepped.clear()
        self._stepping.clear()
        self._listener.end()

    def _forward(self, module: object, inputs: object) -> None:
        if not torch.is_grad_enabled():
            return
        if self.open and not self._in_closure:
            self._without += not self._stepped
            if self._without == _LONG_WITHOUT_A_STEP:
                warnings.warn(
                    f"in {_LONG_WITHOUT_A_STEP} training steps, none of the optimizers given to attach has"
                    " stepped: if another one has taken their place, attach with that one",
                    stacklevel=2,
                )
            self.cut_short()
        self._listener.begin()

    def _step_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Put a closure of ours around the user's: what it runs belongs to this step."""
        if id(optimizer) in self._stepping:  # its last step has raised
            self.cut_short()
        self._stepping.add(id(optimizer))
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._marked(args[1]), *args[2:]), kwargs
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._marked(kwargs["closure"])}
        return None

    def _marked(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def marked() -> Any:
            self._in_closure = True
            try:
                return closure()
            finally:
                self._in_closure = False

        return marked

    def _step_ends(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self._without = 0
        self._stepping.discard(id(optimizer))
        if self._cut_short:
            self._listener.stepped_late()
            return
        self._stepped.add(id(optimizer))
        if self._stepped == self._awaited:
            self._end()


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
