"""The set-up of all reducers: ranks compare what must be equal, then make thinwire's process group."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from thinwire.amp.loss_scale import Scales
from thinwire.engine.comm.agreement import SetUp, agree_on
from thinwire.engine.comm.group_communicator import GroupCommunicator
from thinwire.engine.engine import Engine
from thinwire.engine.meter import Meter


@dataclass(frozen=True, kw_only=True)
class Connection:
    """The options with which a reducer connects to the other ranks.

    Attributes:
        set_up: What must be equal on all ranks.
        limit: The time limit of a collective. None takes that of the group.
        meter: Where steps are recorded. None keeps a record of its own.
        scales: The GradScaler that determines the scale of residuals.
    """

    set_up: SetUp
    limit: timedelta | None = None
    meter: Meter | None = None
    scales: Scales = field(default_factory=Scales)

    def open(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        also_compare: Callable[[], None] = lambda: None,
    ) -> tuple[GroupCommunicator, Engine]:
        """Compare set-ups, then make thinwire's process group and its engine. Collective.

        Args:
            group: The ranks to average over.
            device: The device of the model.
            also_compare: A further comparison, before process groups are made.

        Raises:
            MismatchError: Set-ups differ between ranks.
            WireError: A rank did not take part in time.
        """
        communicator = GroupCommunicator(group, self.limit)
        agree_on(self.set_up, communicator.rendezvous, communicator.limit)
        also_compare()
        communicator.open()
        return communicator, Engine(communicator, device=device, meter=self.meter)
