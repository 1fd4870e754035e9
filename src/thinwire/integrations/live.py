"""A wire among live replicas, which join and leave while a job runs, on any service that agrees on them."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from thinwire.engine.comm.agreement import SetUp
from thinwire.engine.comm.borrowed_group import BorrowedGroup
from thinwire.engine.comm.rendezvous import StoreRendezvous
from thinwire.engine.engine import Engine
from thinwire.engine.meter import Meter
from thinwire.errors import OptionError, UnavailableError
from thinwire.models.local.model import ReplicaModel
from thinwire.models.local.reducer import ReplicaReducer
from thinwire.monitors.auditor import Auditor
from thinwire.programs.memory import Memory
from thinwire.programs.rules import Rules
from thinwire.step.connection import Connection
from thinwire.step.runner import AttachedRun
from thinwire.step.strategy import Context
from thinwire.strategies.averaging.handover import LiveState
from thinwire.strategies.averaging.handshake import ReplicaRanks
from thinwire.strategies.averaging.membership import Contribute
from thinwire.strategies.averaging.policy import Averaging
from thinwire.strategies.averaging.quorum import LiveReplicas
from thinwire.strategies.averaging.quorum_service import QuorumService
from thinwire.strategies.averaging.replica import Replica
from thinwire.strategies.schedule import StagePlan
from thinwire.wire import Wire


def check_live(model: torch.nn.Module, program: object) -> None:
    """Raise OptionError if live replicas cannot run a program.

    Args:
        model: The module.
        program: The configuration given by the user.
    """
    loop = program.outer_loop if isinstance(program, Averaging) else None
    if not isinstance(program, Averaging) or loop is None:
        raise OptionError(
            f"program={program!r} has no outer optimizer, whose state replicas share: pass DiLoCo(...). Plain"
            " averages are DiLoCo(period, outer=partial(torch.optim.SGD, lr=1))"
        )
    unsupported = {
        "overlap": (loop.overlap, 0, "an exchange in flight could not be committed or dropped as a whole"),
        "warmup_steps": (program.warmup_steps, 0, "gradients are not exchanged among replicas"),
        "within": (program.within, None, "replicas are all alike"),
    }
    for name, (value, allowed, reason) in unsupported.items():
        if value != allowed:
            raise OptionError(f"{name}={value!r} is not supported with torchft, since {reason}: leave it out")
    if program.optimizer_state == "mean":
        raise OptionError('optimizer_state="mean" is not supported with torchft: use "local" or "reset"')
    trained = {name: held.shape for name, held in model.named_parameters() if held.requires_grad}
    program.check(trained, 1)


def attach_live(
    service: QuorumService,
    model: ReplicaModel,
    program: Averaging,
    *,
    optimizers: Sequence[Optimizer],
    set_up: SetUp,
    rules: Rules = (),
    share_optimizer: bool = True,
    check_every: int = 0,
    ranks: ReplicaRanks | None = None,
) -> tuple[Wire, LiveState]:
    """Average a model with those of the live replicas from now on.

    Args:
        service: The service that agrees on the replicas of each exchange.
        model: The handle of a module that this rank trains, whole or a shard of it.
        program: The configuration, after `check_live`.
        optimizers: The optimizers that step the model.
        set_up: The values that must be equal on all replicas.
        rules: Other programs for some parameters, after validation.
        share_optimizer: Whether newcomers receive the optimizers' state too.
        check_every: Exchanges between two comparisons of the anchors' bits. 0: never.
        ranks: The ranks of this replica. None: this process alone.

    Returns:
        The wire, and the state whose `donate` and `receive` the service calls for newcomers.
    """
    meter = Meter()
    reducer = ReplicaReducer(model, _OneRankConnection(set_up=set_up, limit=service.limit, meter=meter))
    made: list[LiveReplicas] = []

    def join_service(replica: Replica, contribute: Contribute) -> LiveReplicas:
        if made:
            raise UnavailableError(
                "live replicas cannot swap programs: restart all of them with the other one"
            )
        state = LiveState(replica, reducer.steps, set_up=set_up, share_optimizer=share_optimizer)
        options: dict[str, Any] = {"meter": meter, "check_every": check_every, "ranks": ranks}
        made.append(LiveReplicas(service, state, contribute, **options))
        return made[0]

    references = [weakref.ref(optimizer) for optimizer in optimizers]
    context = Context(
        reducer=reducer,
        memory=Memory(),
        rules=rules,
        auditor=Auditor(0, None, "warn", 1),
        check_every=0,
        optimizers=lambda: [held for reference in references if (held := reference()) is not None],
        scaler="auto",
        membership=join_service,
    )
    runner = AttachedRun(context, StagePlan(program))
    runner.start()
    return Wire(runner), made[0].state


class _OneRank:
    """A process group of this process alone. Live replicas meet elsewhere."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


@dataclass(frozen=True, kw_only=True)
class _OneRankConnection(Connection):
    """A connection to no other rank: set-ups are compared in the handshake before each exchange."""

    def open(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        also_compare: Callable[[], None] = lambda: None,
    ) -> tuple[Any, Engine]:
        """Return a communicator of one rank, with a store of its own, and its engine."""
        assert self.limit is not None
        alone: Any = _OneRank()
        communicator = BorrowedGroup(alone, self.limit)
        communicator.rendezvous = StoreRendezvous(alone, self.limit, dist.HashStore())
        return communicator, Engine(communicator, device=device, meter=self.meter)
