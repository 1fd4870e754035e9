"""torchft: DiLoCo among replicas that come and go, over torchft's manager, lighthouse and process groups."""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from thinwire.amp.skipped_steps import SkippedSteps
from thinwire.codecs.checks import check_whole
from thinwire.engine.comm.agreement import SetUp, set_up_of
from thinwire.engine.meter import Meter
from thinwire.errors import AttachError, OptionError, UnavailableError
from thinwire.models.fsdp.internals import is_sharded
from thinwire.models.fsdp.model import ShardedModel
from thinwire.models.fsdp.shards import Shards
from thinwire.models.local import LocalModel
from thinwire.programs.description import described
from thinwire.programs.rules import Rules, check_used, checked_rules, exceptions_of
from thinwire.step.options import optimizers_of
from thinwire.strategies.averaging.policy import Averaging
from thinwire.strategies.live.averager import LiveAverager
from thinwire.strategies.live.replica import Replica
from thinwire.strategies.live.status import OneRank, ReplicaRanks
from thinwire.strategies.live.wire import LiveWire

try:
    from torchft import Manager
except ImportError as error:
    raise UnavailableError(
        f"thinwire.integrations.torchft needs torchft ({error}): pip install torchft-nightly"
    ) from error

from thinwire.integrations.torchft_manager import ManagerMembership, make_manager
from thinwire.integrations.torchft_transport import KEY

__all__ = ["ManagerMembership", "attach", "make_manager"]

_RANK_LIMITS = 4
"""The limits that a rank waits for its replica's other ranks, which may be receiving a state."""


def attach(
    manager: Manager,
    model: nn.Module,
    program: Averaging,
    *,
    optimizer: Optimizer | Sequence[Optimizer],
    rules: Rules = (),
    share_optimizer: bool = True,
    check_every: int = 0,
) -> LiveWire:
    """Average the model with those of the other replicas, whichever are there. Call it on every rank.

    The model's first forward waits for the quorum. A replica that joins a running job receives anchors, outer
    optimizer and step of a live peer there. From then on models are exchanged after the optimizer's steps, as
    `program` says. A replica that dies costs the others at most one exchange. What an exchange has computed
    is used only if the quorum commits it.

    Args:
        manager: A manager with a synchronous quorum, as `make_manager` makes it.
        model: The module itself, without DDP. A replica of several ranks is sharded by FSDP2, and each rank
            exchanges its shards with the same rank of the other replicas.
        program: `DiLoCo(...)`, `SparseLoCo(...)`, or another configuration with an outer optimizer, without
            `overlap`, `warmup_steps` and `within`.
        optimizer: The optimizer, or all of them, that step the model.
        rules: Other programs for some parameters, as for `thinwire.attach`.
        share_optimizer: Whether a replica that joins receives the state of a live peer's optimizer too, which
            may be twice the size of the model.
        check_every: Compare the anchors' bits across replicas every `check_every` exchanges. A replica that
            differs from most receives their state. 0: never.

    Returns:
        The wire. Keep it for `finalize`, `stats` and `state_dict`.

    Raises:
        OptionError: The configuration or another option is not valid here.
        AttachError: The model is a DDP model, or the manager has a wire already.
        UnavailableError: The manager's set-up is not supported.

    Example::

        manager = thinwire.integrations.torchft.make_manager(min_replicas=2)
        wire = thinwire.integrations.torchft.attach(manager, model, DiLoCo(period=32), optimizer=optimizer)
        while wire.step < steps:
            ...  # train as on one device
        wire.finalize()
    """
    membership = ManagerMembership(manager)
    handle = _handle(model, membership)
    optimizers = _validated(model, program, optimizer)
    check_whole("check_every", check_every, 0, "0 never compares the replicas")
    parameters, shapes = handle.parameters(), handle.shapes()
    chosen = checked_rules(rules)
    check_used(chosen, shapes)
    set_up = set_up_of(
        parameters,
        described(program),
        rules=described(chosen),
        check_every=check_every,
        ranks=membership.ranks,
        # With different ones, a quorum between them would commit on some replicas, and not on others.
        min_replicas=membership.minimum,
    )
    frozen = [f"parameter {name}" for name, one in parameters.items() if not one.requires_grad]
    set_up |= {subject: f"{set_up[subject]} frozen" for subject in frozen}
    replica = Replica(model, optimizers, program, set_up=set_up, share_optimizer=share_optimizer)
    loop = program.outer_loop
    assert loop is not None, "validated above"
    exceptions, meter = exceptions_of(chosen, loop.program, shapes), Meter()
    averager = LiveAverager(
        membership,
        replica,
        exceptions,
        meter=meter,
        check_every=check_every,
        ranks=_ranks(handle, set_up, membership),
    )
    manager.register_state_dict_fn(KEY, replica.receive, replica.donate)
    _observe(handle, optimizers, averager)
    return LiveWire(replica, averager, meter, (manager.state_dict, manager.load_state_dict))


def _handle(model: nn.Module, membership: ManagerMembership) -> LocalModel:
    """Return the model's handle, after checking that the manager has the same ranks."""
    if isinstance(model, DistributedDataParallel):
        raise AttachError(
            "the model is wrapped in DDP, whose ranks would all send the whole model: give the module itself,"
            " for replicas of one process; for replicas of several, shard it with fully_shard(module,"
            " mesh=mesh, reshard_after_forward=False), and give make_manager(shards=mesh)"
        )
    if not any(map(is_sharded, model.modules())):
        if membership.ranks > 1:
            raise UnavailableError(
                f"the manager's replica has {membership.ranks} ranks, and the model is whole on each of them:"
                " shard it with fully_shard(model, mesh=mesh), or run one process per replica"
            )
        return LocalModel(model, membership.group)
    sharded = ShardedModel(model, membership.group)
    mesh = sharded.mesh
    if (mesh.size(), mesh.get_local_rank()) != (membership.ranks, membership.own_rank):
        raise OptionError(
            f"the model is sharded over {mesh.size()} ranks, of which this is number {mesh.get_local_rank()},"
            f" and the manager's replica has {membership.ranks} ranks, of which this is number"
            f" {membership.own_rank}: give make_manager(shards=mesh) the mesh of fully_shard"
        )
    return sharded


def _ranks(handle: LocalModel, set_up: SetUp, membership: ManagerMembership) -> ReplicaRanks:
    """Return the ranks of this replica, after comparing their set-ups. Collective among them."""
    if not isinstance(handle, ShardedModel):
        return OneRank()
    shards = Shards(handle.shard_group, handle.device)
    shards.open(set_up, _RANK_LIMITS * membership.limit)
    handle.on_gone(shards.close)
    return shards


def _validated(
    model: nn.Module, config: object, optimizer: Optimizer | Sequence[Optimizer]
) -> list[Optimizer]:
    """Return the optimizers, after validating the arguments of `attach`."""
    loop = config.outer_loop if isinstance(config, Averaging) else None
    if not isinstance(config, Averaging) or loop is None:
        raise OptionError(
            f"program={config!r} has no outer optimizer, whose state replicas share: give DiLoCo(...). Plain"
            " averages are DiLoCo(period, outer=partial(torch.optim.SGD, lr=1))"
        )
    refused = {
        "overlap": (loop.overlap, 0, "an exchange in flight could not be committed or dropped as a whole"),
        "warmup_steps": (config.warmup_steps, 0, "gradients are not exchanged among replicas"),
        "within": (config.within, None, "replicas are all alike"),
    }
    for name, (value, allowed, reason) in refused.items():
        if value != allowed:
            raise OptionError(f"{name}={value!r} is not supported with torchft, since {reason}: leave it out")
    if config.optimizer_state == "mean":
        raise OptionError('optimizer_state="mean" is not supported with torchft: use "local" or "reset"')
    trained = {name: one.shape for name, one in model.named_parameters() if one.requires_grad}
    config.check(trained, 1)
    return optimizers_of(optimizer, dict(model.named_parameters()))


def _observe(model: LocalModel, optimizers: Sequence[Optimizer], averager: LiveAverager) -> None:
    """Join with the model's first forward, and count a step when all optimizers have stepped."""
    stepped: set[int] = set()

    def count(one: Optimizer, *_: Any) -> None:
        stepped.add(id(one))
        if len(stepped) == len(optimizers):
            stepped.clear()
            averager.step_ended()

    model.on_forward(averager.join)
    for one in optimizers:
        one.register_step_post_hook(count)
        SkippedSteps(one, count)
