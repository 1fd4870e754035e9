"""DiLoCo among live replicas, over torchft's manager, lighthouse and process groups."""

from collections.abc import Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from thinwire.codecs.checks import check_whole
from thinwire.engine.comm.agreement import SetUp, set_up_of
from thinwire.errors import AttachError, OptionError, UnavailableError
from thinwire.integrations.live import attach_live, check_live
from thinwire.models.fsdp.internals import is_sharded
from thinwire.models.fsdp.model import ShardedModel
from thinwire.models.fsdp.shards import Shards
from thinwire.models.local import LocalModel
from thinwire.programs.description import described
from thinwire.programs.rules import Rules, check_used, checked_rules
from thinwire.step.options import optimizers_of
from thinwire.strategies.averaging.handshake import OneRank, ReplicaRanks
from thinwire.strategies.averaging.policy import Averaging
from thinwire.wire import Wire

try:
    from torchft import Manager
except ImportError as error:
    raise UnavailableError(
        f"thinwire.integrations.torchft needs torchft ({error}): pip install torchft-nightly"
    ) from error

from thinwire.integrations.torchft_manager import ManagerQuorum, make_manager
from thinwire.integrations.torchft_transport import KEY

__all__ = ["ManagerQuorum", "attach", "make_manager"]

_RANK_LIMITS = 4
"""How many time limits a rank waits for its replica's other ranks, which may be receiving a state."""


def attach(
    manager: Manager,
    model: nn.Module,
    program: Averaging,
    *,
    optimizer: Optimizer | Sequence[Optimizer],
    rules: Rules = (),
    share_optimizer: bool = True,
    check_every: int = 0,
) -> Wire:
    """Average the model among the replicas in the current quorum. Call it on every rank.

    The model's first forward waits for the quorum. There a replica that joins a running job receives the
    anchors, outer optimizer and step of a live peer. From then on models are exchanged after the optimizer's
    steps, as `program` configures. The results of an exchange are applied only if the quorum commits it. A
    failed exchange is discarded and training continues from the local parameters. A replica that dies costs
    the others at most one exchange.

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
            differs from most receives a peer's state. 0: never.

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
    service = ManagerQuorum(manager)
    handle = _handle(model, service)
    check_live(model, program)
    optimizers = optimizers_of(optimizer, dict(model.named_parameters()))
    check_whole("check_every", check_every, 0, "0 never compares the replicas")
    parameters, chosen = handle.parameters(), checked_rules(rules)
    check_used(chosen, handle.shapes())
    set_up = set_up_of(
        parameters,
        described(program),
        rules=described(chosen),
        check_every=check_every,
        ranks=service.ranks,
        # With different ones, a quorum between them would commit on some replicas, and not on others.
        min_replicas=service.minimum,
    )
    frozen = [f"parameter {name}" for name, held in parameters.items() if not held.requires_grad]
    set_up |= {subject: f"{set_up[subject]} frozen" for subject in frozen}
    wire, state = attach_live(
        service,
        handle,
        program,
        optimizers=optimizers,
        set_up=set_up,
        rules=chosen,
        share_optimizer=share_optimizer,
        check_every=check_every,
        ranks=_ranks(handle, set_up, service),
    )
    manager.register_state_dict_fn(KEY, state.receive, state.donate)
    return wire


def _handle(model: nn.Module, service: ManagerQuorum) -> LocalModel:
    """Return the model's handle, after checking that the manager has the same ranks."""
    if isinstance(model, DistributedDataParallel):
        raise AttachError(
            "the model is wrapped in DDP, whose ranks would all send the whole model: pass the module itself"
            " for replicas of one process; for replicas of several, shard it with fully_shard(module,"
            " mesh=mesh, reshard_after_forward=False), and pass make_manager(shards=mesh)"
        )
    if not any(map(is_sharded, model.modules())):
        if service.ranks > 1:
            raise UnavailableError(
                f"the manager's replica has {service.ranks} ranks, and the model is whole on each of them:"
                " shard it with fully_shard(model, mesh=mesh), or run one process per replica"
            )
        return LocalModel(model, service.group)
    sharded = ShardedModel(model, service.group)
    mesh = sharded.mesh
    if (mesh.size(), mesh.get_local_rank()) != (service.ranks, service.own_rank):
        raise OptionError(
            f"the model is sharded over {mesh.size()} ranks, of which this is number {mesh.get_local_rank()},"
            f" and the manager's replica has {service.ranks} ranks, of which this is number"
            f" {service.own_rank}: pass the mesh of fully_shard, as make_manager(shards=mesh)"
        )
    return sharded


def _ranks(handle: LocalModel, set_up: SetUp, service: ManagerQuorum) -> ReplicaRanks:
    """Return the ranks of this replica, after comparing their set-ups. Collective among them."""
    if not isinstance(handle, ShardedModel):
        return OneRank()
    shards = Shards(handle.shard_group, handle.device)
    shards.open(set_up, _RANK_LIMITS * service.limit)
    handle.on_gone(shards.close)
    return shards
