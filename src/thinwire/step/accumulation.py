"""Detection of training loops that accumulate gradients without `no_sync`, and exchange them repeatedly."""

import logging
import weakref

import torch
from torch.optim import LBFGS, Optimizer

from thinwire.step.model import Model
from thinwire.step.skip_overflows import Skipping

logger = logging.getLogger("thinwire")

_CERTAIN = 3
"""Optimizer steps in a row, from the first on, that must use accumulated gradients before the warning."""


class Accumulation:
    """A monitor of the first optimizer steps, which warns if all of them use several exchanged backwards.

    It ends without a warning at the first sign of another pattern: a step after a single backward, a second
    optimizer in the process (a GAN exchanges a discriminator's gradients in the generator's backward too), or
    an optimizer that runs backward in its closure.

    Args:
        model: The attached model.
        skipping: The model's optimizers, whose steps it reports.
    """

    def __init__(self, model: Model, skipping: Skipping) -> None:
        self._model, self._skipping = model, skipping
        self._optimizer: weakref.ref[Optimizer] | None = None
        self._latest: tuple[torch.Tensor, torch.Tensor] | None = None
        """A parameter and its gradient after the latest backward since a step."""
        self._backwards = self._steps = 0
        self._added = False
        """Whether a backward since the last step has added to gradients that had been exchanged."""
        self.watching = True
        skipping.on_step = self._before_step

    def backward(self) -> None:
        """React to a settled backward, whose gradients are written."""
        self._backwards += 1
        if self._latest is not None:
            parameter, gradient = self._latest
            self._added = self._added or parameter.grad is gradient  # zero_grad() would have dropped it
        parameters = self._model.parameters().values()
        held = [(each, each.grad) for each in parameters if each.grad is not None]
        self._latest = min(held, key=lambda pair: pair[0].numel(), default=None)

    def stop(self) -> None:
        """Stop for good."""
        self.watching, self._latest, self._skipping.on_step = False, None, None

    def _before_step(self, optimizer: Optimizer, own: bool) -> None:
        only = own and (self._optimizer is None or self._optimizer() is optimizer)
        if not only or isinstance(optimizer, LBFGS) or (self._backwards and not self._added):
            self.stop()
            return
        self._optimizer = weakref.ref(optimizer)
        if not self._backwards:  # as where a checkpoint's loading creates an optimizer's state
            return
        self._steps += 1
        if self._steps == _CERTAIN:
            logger.warning(
                "each of the first %d optimizer steps used gradients of %d backward passes, and all of these"
                " exchanged gradients: put all micro-batches of a step but the last under `with"
                " ddp.no_sync():` (FSDP2: model.set_requires_gradient_sync(False)), to send %d times less",
                self._steps,
                self._backwards,
                self._backwards,
            )
            self.stop()
        self._backwards, self._latest, self._added = 0, None, False
