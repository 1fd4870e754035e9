"""The ranks that average models with each other, and the engine of their exchanges."""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from thinwire.engine.comm.group_communicator import GroupCommunicator
from thinwire.engine.engine import Engine
from thinwire.engine.meter import MODELS, Meter
from thinwire.engine.ops import Collectives, among
from thinwire.programs.memory import Memory
from thinwire.programs.program import NO_EXCEPTIONS, Program
from thinwire.step.transaction import StepTransaction
from thinwire.strategies.averaging.exchange import Members, ModelExchange, packed
from thinwire.strategies.averaging.exchange_id import (
    ExchangeId,
    any_diverged,
    compare_points,
    gather_diverged,
)
from thinwire.strategies.averaging.groups import members_of
from thinwire.strategies.averaging.policy import Average, Averaging


class AveragingGroup:
    """Exchanges among all ranks, or among some of them, on a separate process group.

    Constructing one is collective.
    """

    def __init__(
        self,
        config: Averaging,
        group: dist.ProcessGroup,
        communicator: GroupCommunicator,
        steps: StepTransaction,
        meter: Meter,
        device: torch.device,
    ) -> None:
        self.everyone = tuple(range(communicator.size))
        self.communicator = communicator
        self.engine = Engine(communicator, device=device, meter=meter, purpose=MODELS)
        self.neighbours = members_of(config.within, communicator, group)
        """The ranks whose gradients are averaged with this one's in every step."""
        self._members = {groups: members_of(groups, communicator, group) for groups in config.groups()}
        self._steps = steps
        self._device = device

    def of(self, average: Average) -> tuple[int, ...]:
        """Return the ranks that take part in an average."""
        return self.everyone if average.among is None else self._members[average.among]

    def exchange(
        self,
        point: ExchangeId,
        tensors: Mapping[str, torch.Tensor],
        program: Program,
        memory: Memory,
        ranks: tuple[int, ...],
        window: int,
        exceptions: Mapping[str, Program] = NO_EXCEPTIONS,
    ) -> ModelExchange:
        """Start to average named tensors among some ranks, and return the exchange in flight."""
        members = Members(ranks, self.communicator.rank, self.communicator.size)
        work = packed(tensors, program, exceptions, members, window)
        complex_names = {name for name, tensor in tensors.items() if tensor.is_complex()}
        return ModelExchange(self.engine, point, work, complex_names, memory, members)

    def any_diverged(self, own: bool) -> bool:
        """Return whether any rank has changed its model since the last average. Collective.

        Args:
            own: Whether this rank has changed its model.

        Raises:
            MismatchError: Ranks have taken different numbers of steps.
        """
        steps = gather_diverged(self._steps.count, own, self._device)
        gathered = self.run(steps, self.everyone, "the comparison of steps")
        compare_points(gathered, self.engine.world_ranks(self.everyone))
        return any_diverged(gathered)

    def run(self, steps: Collectives[torch.Tensor], ranks: tuple[int, ...], label: str) -> torch.Tensor:
        """Run a single program among some ranks, and return its result."""
        job = steps if ranks == self.everyone else among(ranks, steps)
        return self.engine.run(job, step=self._steps.count, label=label)

    def close(self) -> None:
        """Leave the process group."""
        self.engine.close()
