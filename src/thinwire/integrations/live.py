"""A wire among live replicas, which join and leave while a job runs, on any service that agrees on them."""

import weakref
from collections.abc import Sequence
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
from thinwire.models.local import LocalModel
from thinwire.programs.rules import Rules
from thinwire.step.runner import AttachedRun, Connection
from thinwire.step.strategy import Context
from thinwire.strategies.averaging.handover import LiveState
from thinwire.strategies.averaging.handshake import ReplicaRanks
from thinwire.strategies.averaging.membership import Contribute
from thinwire.strategies.averaging.policy import Averaging
from thinwire.strategies.averaging.quorum import LiveReplicas
from thinwire.strategies.averaging.quorum_service import QuorumService
from thinwire.strategies.averaging.replica import Replica
from thinwire.strategies.schedule import stages_of
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
    model: LocalModel,
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
    meter, made = Meter(), list[LiveReplicas]()

    def join_service(replica: Replica, contribute: Contribute, context: Context) -> LiveReplicas:
        if made:
            raise UnavailableError(
                "live replicas cannot swap programs: restart all of them with the other one"
            )
        state = LiveState(replica, context.steps, set_up=set_up, share_optimizer=share_optimizer)
        options: dict[str, Any] = {"meter": meter, "check_every": check_every, "ranks": ranks}
        made.append(LiveReplicas(service, state, contribute, **options))
        return made[0]

    references = [weakref.ref(optimizer) for optimizer in optimizers]
    run = AttachedRun(
        model,
        _connection(service, model.device, meter),
        stages_of(program),
        rules=rules,
        optimizers=lambda: [held for reference in references if (held := reference()) is not None],
        membership=join_service,
    )
    run.start()
    return Wire(run), made[0].state


class _OneRank:
    """A process group of this process alone. Live replicas meet elsewhere."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def _connection(service: QuorumService, device: torch.device, meter: Meter) -> Connection:
    """Return a communicator of one rank, with a store of its own, and its engine.

    Set-ups are compared in the handshake before each exchange.
    """
    alone: Any = _OneRank()
    communicator: Any = BorrowedGroup(alone, service.limit)
    communicator.rendezvous = StoreRendezvous(alone, service.limit, dist.HashStore())
    return Connection(communicator, Engine(communicator, device=device, meter=meter))
