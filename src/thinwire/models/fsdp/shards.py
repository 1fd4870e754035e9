"""Agreement between the ranks of one replica, each of which holds a shard of the model."""

import contextlib
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from thinwire.engine.comm.agreement import SetUp, agree_on
from thinwire.engine.comm.group_communicator import GroupCommunicator
from thinwire.engine.comm.rendezvous import StoreRendezvous
from thinwire.engine.engine import Engine
from thinwire.engine.ops import AllGather, AllReduce, Collectives
from thinwire.engine.task import anew
from thinwire.errors import ThinwireError


class Shards:
    """Agreement among the ranks of one replica, on a process group of thinwire's own.

    Its few bytes are sent within the replica, so the wire's meter does not count them.

    Args:
        group: The ranks that hold the replica together.
        device: The device of the gradients.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._engine: Engine | None = None
        self._rendezvous: StoreRendezvous | None = None

    @property
    def rendezvous(self) -> StoreRendezvous:
        """Where the ranks of the replica report failures."""
        assert self._rendezvous is not None, "open() comes first"
        return self._rendezvous

    def open(self, set_up: SetUp, limit: timedelta | None = None) -> None:
        """Compare what must be equal for all shards, then make the process group. Collective.

        Args:
            set_up: What must be equal for all shards.
            limit: The time limit of a collective. None takes that of the group.

        Raises:
            MismatchError: Set-ups differ between ranks.
            WireError: A rank did not take part in time.
        """
        communicator = GroupCommunicator(self._group, limit, self._device)
        agree_on(set_up, communicator.rendezvous, communicator.limit)
        communicator.open()
        self._engine = Engine(communicator, device=self._device)
        self._rendezvous = communicator.rendezvous  # that of the new group

    def all_true(self, flag: torch.Tensor, step: int) -> torch.Tensor:
        """Return whether a scalar bool tensor is true on all ranks of the replica. Collective.

        A single shard may overflow. If only its rank skipped the step, shards would be of different steps.
        """
        if self._group.size() == 1:
            return flag
        return self._run(_all_true(flag), step, "the agreement on overflows")

    def gather(self, numbers: Sequence[int], step: int) -> list[list[int]]:
        """Return the numbers of all ranks of the replica, in the order of ranks. Collective."""
        own = torch.tensor(list(numbers), dtype=torch.int64, device=self._device)
        return self._run(_gathered(own), step, "the agreement within the replica").tolist()

    def _run(self, steps: Collectives[torch.Tensor], step: int, label: str) -> torch.Tensor:
        assert self._engine is not None, "open() comes first"
        return self._engine.run(steps, step=step, label=label)

    def fail(self, error: ThinwireError) -> None:
        """Report a failure of this rank's wire to the other shards, which would wait for this one."""
        if self._engine is not None:
            with contextlib.suppress(ThinwireError):
                self._engine.fail(anew(error))  # the caller raises `error`, whose frames refer to the model

    def close(self) -> None:
        """Leave the process group."""
        if self._engine is not None:
            self._engine.close()


def _all_true(flag: torch.Tensor) -> Collectives[torch.Tensor]:
    false = flag.logical_not().to(torch.int32).reshape(1)
    total: torch.Tensor = yield AllReduce(false)
    return (total == 0).reshape(())


def _gathered(own: torch.Tensor) -> Collectives[torch.Tensor]:
    rows: torch.Tensor = yield AllGather(own)
    return rows
