"""The engine and the steps of a module that each rank trains on its own."""

import logging

import torch

from thinwire.engine.meter import StepTrace
from thinwire.models.ddp.reducer import PlainEvents
from thinwire.models.local.model import ReplicaModel
from thinwire.step.connection import Connection
from thinwire.step.layout import BucketLayout
from thinwire.step.transaction import StepTransaction

logger = logging.getLogger("thinwire")


class LocalSteps(StepTransaction):
    """The steps of a module that each rank trains on its own. Each ends with its optimizers."""

    def overflow(self) -> None:
        """Record that an optimizer skips its step, because gradients are non-finite on this rank."""
        if not self.overflowed:
            logger.info("step %d overflowed on this rank, which alone skips it", self.count)
        self.overflowed = True

    def advance(self) -> None:
        """Count a step, and record that it has sent no gradients."""
        self._engine.meter.add(StepTrace(self.count, 0, 1).finish(0.0, timed=True))
        if self.overflowed:
            self._engine.meter.overflowed()
            self.overflowed = False
        super().advance()


class ReplicaReducer:
    """The engine and the steps of a module that each rank trains on its own. It reduces no gradients.

    The constructor is collective: the ranks compare set-ups, then make thinwire's process group.

    Args:
        model: The module's handle.
        connection: How to connect to the other ranks.

    Raises:
        MismatchError: Set-ups differ between ranks.
        WireError: A rank did not take part in time.
    """

    def __init__(self, model: ReplicaModel, connection: Connection) -> None:
        self.model = model
        self.communicator, self.engine = connection.open(model.group, model.device)
        steps = LocalSteps(self.engine, model, connection.scales, PlainEvents())
        # No backward is settled here, so gradients are checked when an optimizer steps.
        steps.skipping.checks_every_step, steps.skipping.on_overflow = True, steps.overflow
        self.steps: StepTransaction = steps
        self.layout = BucketLayout()
        model.on_gone(self.engine.close)

    def agree_finite(self, finite: torch.Tensor) -> torch.Tensor:
        """Return `finite`: no means of gradients are exchanged."""
        return finite

    def settled(self, committed: bool) -> None:
        """Do nothing: no backward is settled here."""
