"""Detection of the end of training steps by optimizer hooks, with an unchanged training loop."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from thinwire.amp.skipped_steps import SkippedSteps
from thinwire.engine.futures import at_work
from thinwire.engine.pack import local_part
from thinwire.step.autograd import remove_handles
from thinwire.step.model import Model

_LONG_WITHOUT_A_STEP = 10
_CERTAIN = 2
"""Consecutive accumulated steps after which the loop is taken to accumulate, not to skip single steps."""


class Listener(Protocol):
    """A receiver of training-step events."""

    def begin(self) -> None:
        """React to the start of a forward pass with gradients enabled."""

    def end(self) -> None:
        """React to the end of a step."""

    def stepped_late(self) -> None:
        """React to an optimizer that has stepped after its training step had ended."""


class TrainingSteps:
    """The training steps of a model, each reported to `listener` once when it ends.

    A step ends when all optimizers have stepped since the last backward. An optimizer whose step a GradScaler
    skips, because of an overflow on this rank, counts as stepped. If the training loop itself skips an
    optimizer's step, the next forward ends the training step, so that all ranks count the same. Forwards and
    backwards in an optimizer's closure are part of its step.

    Micro-batches without `no_sync` are indistinguishable from skipped steps. Whether gradients are discarded
    or accumulated is known only after the forward, when other ranks may already wait for this one. So each
    micro-batch counts as a step, with a warning once the loop is seen to accumulate.
    """

    def __init__(self, model: Model, optimizers: Sequence[Optimizer], listener: Listener) -> None:
        self.open = False
        """Whether a backward has run whose step has not ended."""
        self._listener = listener
        self._awaited = {id(optimizer) for optimizer in optimizers}
        self._stepped: set[int] = set()
        self._stepping: set[int] = set()
        self._in_closure = False
        self._cut_short = False
        self._without = 0
        self._left: tuple[torch.Tensor, torch.Tensor] | None = None
        """A parameter and its gradient at the forward after a skipped step."""
        self._added = False
        """Whether a backward since the last step has accumulated into gradients that were already counted."""
        self._accumulated = 0
        self._model = model
        self._handles: list[Any] = [model.on_forward(self._forward)]
        for optimizer in optimizers:
            self._handles += [
                SkippedSteps(optimizer, self._step_skipped),
                optimizer.register_step_pre_hook(self._step_begins),
                optimizer.register_step_post_hook(self._step_ends),
            ]
        # The optimizer may outlive the model.
        model.on_gone(remove_handles, self._handles)

    def remove(self) -> None:
        """Remove all hooks."""
        remove_handles(self._handles)

    def backward(self) -> None:
        """Open a step, as a backward pass has completed its gradients."""
        self.open, self._cut_short = True, False
        if self._left is not None:
            parameter, gradient = self._left
            self._added = self._added or parameter.grad is gradient
            self._left = None

    def cut_short(self) -> None:
        """End the open step, if there is one, without waiting for its optimizers."""
        if self.open:
            self._cut_short = True
            self._end()

    def _end(self) -> None:
        self.open = False
        self._stepped.clear()
        self._stepping.clear()
        with at_work():
            self._listener.end()

    def _forward(self) -> None:
        # The loop on this rank skipped its optimizer step, say after a bad loss, and the other ranks have
        # ended theirs and may wait in an exchange. Every rank runs a forward next, so this rank ends the step
        # here, before its own forward. Waiting for the optimizer would deadlock.
        if self.open and not self._in_closure:
            self._without += not self._stepped
            self._left = (
                None
                if self._stepped or self._accumulated >= _CERTAIN
                else _some_gradient(self._model.parameters().values())
            )
            if self._without == _LONG_WITHOUT_A_STEP:
                warnings.warn(
                    f"in {_LONG_WITHOUT_A_STEP} training steps, none of the optimizers passed to attach has"
                    " stepped: if another optimizer has replaced them, pass that one to attach",
                    stacklevel=2,
                )
            self.cut_short()
        with at_work():
            self._listener.begin()

    def _step_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Wrap the user's closure, so that its forwards and backwards belong to this step."""
        if id(optimizer) in self._stepping:  # its previous step raised an exception, and has not ended
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
        self._stepping.discard(id(optimizer))
        if self._cut_short:
            self._without = 0
            self._listener.stepped_late()
        else:
            self._count(optimizer)

    def _step_skipped(self, optimizer: Optimizer) -> None:
        if not self._cut_short:
            self._count(optimizer)

    def _count(self, optimizer: Optimizer) -> None:
        self._without = 0
        self._stepped.add(id(optimizer))
        if self._stepped == self._awaited:
            self._check_accumulation()
            self._end()

    def _check_accumulation(self) -> None:
        """Warn once if consecutive optimizer steps use gradients of several counted backward passes."""
        if self._accumulated >= _CERTAIN:
            return
        self._accumulated, self._added = (self._accumulated + 1 if self._added else 0), False
        if self._accumulated == _CERTAIN:
            warnings.warn(
                "the optimizer steps with gradients of several backward passes, and each of those counts as a"
                " step, so models are averaged more often than their period says: put all micro-batches of a"
                " step but the last under `with ddp.no_sync():`",
                stacklevel=2,
            )


def _some_gradient(parameters: Iterable[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the smallest tensor among non-zero gradients, with its parameter."""
    held = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    return next(
        (pair for pair in sorted(held, key=lambda pair: pair[1].numel()) if local_part(pair[1]).any()), None
    )
