"""The engine and the steps of a module that each rank trains on its own."""

from datetime import timedelta

import torch

from thinwire.amp.loss_scale import Scales
from thinwire.ddp.reducer import PlainEvents
from thinwire.ddp.regroup import Regroup
from thinwire.ddp.step import StepOwner
from thinwire.engine.agreement import SetUp, agree_on
from thinwire.engine.engine import Engine
from thinwire.engine.group_communicator import GroupCommunicator
from thinwire.engine.meter import Meter, StepTrace
from thinwire.replicas.model import ReplicaModel


class LocalSteps(StepOwner):
    """The steps of a module that each rank trains on its own. Each ends with its optimizers."""

    def advance(self) -> None:
        """Count a step, and record that it has sent no gradients."""
        self._engine.meter.add(StepTrace(self.count, 0, 1).finish(0.0, timed=True))
        super().advance()


class ReplicaReducer:
    """The engine and the steps of a module that each rank trains on its own. It reduces no gradients.

    The constructor is collective: the ranks compare set-ups, then make thinwire's process group.

    Args:
        model: The module's handle.
        set_up: What must be equal on all ranks.
        limit: The time limit of a collective. None takes that of the group.
        meter: Where steps are recorded.
        scales: The GradScaler of the model's loss.

    Raises:
        MismatchError: Set-ups differ between ranks.
        WireError: A rank did not take part in time.
    """

    def __init__(
        self,
        model: ReplicaModel,
        set_up: SetUp,
        *,
        limit: timedelta | None = None,
        meter: Meter | None = None,
        scales: Scales | None = None,
    ) -> None:
        self.model = model
        self.communicator = GroupCommunicator(model.group, limit)
        agree_on(set_up, self.communicator.meeting, self.communicator.limit)
        self.communicator.open()
        self.engine = Engine(self.communicator, device=model.device, meter=meter)
        self.steps: StepOwner = LocalSteps(self.engine, model, scales or Scales(), PlainEvents())
        self.regroup = Regroup()
        model.on_gone(self.engine.close)

    def agree_finite(self, finite: torch.Tensor) -> torch.Tensor:
        """Return `finite`: no means of gradients are exchanged."""
        return finite

    def settled(self, committed: bool) -> None:
        """Do nothing: no backward is settled here."""
