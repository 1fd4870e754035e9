"""Agreement between the ranks of one replica, each of which holds a shard of the model."""

import contextlib
from datetime import timedelta

import torch
import torch.distributed as dist

from thinwire.ddp.step import StepOwner
from thinwire.engine.agreement import SetUp, agree_on
from thinwire.engine.engine import Engine
from thinwire.engine.group_communicator import GroupCommunicator
from thinwire.engine.ops import AllReduce, Steps
from thinwire.errors import ThinwireError


class Shards:
    """Agreement among the ranks of one replica, on a process group of thinwire's own.

    Its few bytes are sent within the replica, so the wire's meter does not count them.

    Args:
        group: The ranks that hold the replica together.
        limit: The time limit of a collective. None takes that of the group.
        device: The device of the gradients.
    """

    def __init__(self, group: dist.ProcessGroup, limit: timedelta | None, device: torch.device) -> None:
        self._communicator = GroupCommunicator(group, limit)
        self._device = device
        self._engine: Engine | None = None

    def compare(self, set_up: SetUp) -> None:
        """Compare what must be equal for all shards, then make the process group. Collective."""
        communicator = self._communicator
        agree_on(set_up, communicator.meeting, communicator.limit)
        communicator.open()
        self._engine = Engine(communicator, device=self._device)

    def all_true(self, flag: torch.Tensor, step: int) -> torch.Tensor:
        """Return whether a scalar bool tensor is true on all ranks of the replica. Collective.

        A single shard may overflow. If only its rank skipped the step, shards would be of different steps.
        """
        if self._communicator.size == 1:
            return flag
        assert self._engine is not None, "compare() comes first"
        agreement = "the agreement on overflows"
        agreed = self._engine.submit(_all_true(flag), step=step, label=agreement, last=True, instead=flag)
        self._engine.guard()
        self._engine.settle()
        result: torch.Tensor = agreed.wait()
        return result

    def fail(self, error: ThinwireError) -> None:
        """Report a failure of this rank's wire to the other shards, which would wait for this one."""
        if self._engine is not None:
            with contextlib.suppress(ThinwireError):
                self._engine.fail(error)

    def close(self) -> None:
        """Leave the process group."""
        if self._engine is not None:
            self._engine.close()


def _all_true(flag: torch.Tensor) -> Steps[torch.Tensor]:
    false = flag.logical_not().to(torch.int32).reshape(1)
    total: torch.Tensor = yield AllReduce(false)
    return (total == 0).reshape(())


class ShardSteps(StepOwner):
    """The steps of an FSDP2 model. A failure on one shard's wire is reported to the other shards."""

    shards: Shards | None = None

    def _settle(self) -> None:
        try:
            super()._settle()
        except ThinwireError as error:
            if self.shards is not None:
                self.shards.fail(error)
            raise
