"""torchft: DiLoCo among replicas that come and go, over torchft's manager, lighthouse and process groups."""

import json
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from thinwire.amp.skipped_steps import SkippedSteps
from thinwire.codecs.checks import check_whole
from thinwire.engine.agreement import set_up_of
from thinwire.engine.meter import Meter
from thinwire.errors import AttachError, OptionError, UnavailableError, WireError
from thinwire.options import optimizers_of
from thinwire.programs.naming import described
from thinwire.programs.program import check_fit
from thinwire.programs.rules import Rules, check_used, checked_rules, exceptions_of
from thinwire.replicas.model import ReplicaModel
from thinwire.strategies.averaging.policy import Averaging
from thinwire.strategies.live.averager import LiveAverager
from thinwire.strategies.live.replica import Replica
from thinwire.strategies.live.roll_call import hashed
from thinwire.strategies.live.wire import LiveWire

try:
    from torchft import Manager, ProcessGroupGloo
    from torchft.checkpointing import HTTPTransport
    from torchft.manager import WorldSizeMode
except ImportError as error:
    raise UnavailableError(
        f"thinwire.integrations.torchft needs torchft ({error}): pip install torchft-nightly"
    ) from error

_KEY = "thinwire"


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
    """Average the model with those of the other replicas, whichever are there. Call it on every replica.

    The model's first forward waits for the quorum. A replica that joins a running job receives anchors, outer
    optimizer and step of a live peer there. From then on models are exchanged after the optimizer's steps, as
    `program` says. A replica that dies costs the others at most one exchange. What an exchange has computed
    is used only if the quorum commits it.

    Args:
        manager: A manager with a synchronous quorum and one process per replica, as `make_manager` makes it.
        model: The module itself, without DDP.
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
    optimizers = _validated(model, program, optimizer)
    check_whole("check_every", check_every, 0, "0 never compares the replicas")
    parameters = dict(model.named_parameters())
    shapes = {name: one.shape for name, one in parameters.items()}
    chosen = checked_rules(rules)
    check_used(chosen, shapes)
    set_up = set_up_of(parameters, described(program), rules=described(chosen), check_every=check_every)
    texts = {key: value if isinstance(value, str) else value.full for key, value in set_up.items()}
    replica = Replica(
        model, optimizers, program, set_up=hashed(sorted(texts.items())), share_optimizer=share_optimizer
    )
    loop = program.outer_loop
    assert loop is not None, "validated above"
    exceptions, meter = exceptions_of(chosen, loop.program, shapes), Meter()
    averager = LiveAverager(membership, replica, exceptions, meter=meter, check_every=check_every)
    manager.register_state_dict_fn(_KEY, replica.receive, replica.donate)
    _observe(ReplicaModel(model, membership.group), optimizers, averager)
    return LiveWire(replica, averager, meter, (manager.state_dict, manager.load_state_dict))


def make_manager(
    *,
    min_replicas: int,
    lighthouse: str | None = None,
    name: str | None = None,
    host: str | None = None,
    timeout: timedelta | float = 60.0,
    quorum_timeout: timedelta | float = 3600.0,
    connect_timeout: timedelta | float = 10.0,
) -> Manager:
    """Return a manager of torchft for a replica of one process, on Gloo.

    Args:
        min_replicas: The number of replicas that an exchange needs to be committed.
        lighthouse: The address of the lighthouse, as `"http://host:29510"`. None takes it from the variable
            TORCHFT_LIGHTHOUSE.
        name: The replica's name in logs, the same after each restart. None: host and process.
        host: The name or address by which other replicas reach this host. None: its name.
        timeout: Seconds after which a collective, or the transfer of a state to a replica that joins, fails.
            A stalled replica holds the others up for so long.
        quorum_timeout: Seconds to wait for enough replicas. It must exceed the time between two exchanges,
            because a replica that joins waits for the next one.
        connect_timeout: Seconds to wait for the lighthouse.

    Raises:
        WireError: There is no lighthouse.
        OptionError: An option is not valid.
    """
    check_whole("min_replicas", min_replicas, 1, "replicas that an exchange needs")
    address = lighthouse or os.environ.get("TORCHFT_LIGHTHOUSE")
    if not address:
        raise WireError(
            "there is no lighthouse: give its address, as lighthouse='http://host:29510', or set"
            " TORCHFT_LIGHTHOUSE. Start one on a host that all replicas reach, with"
            f" `torchft_lighthouse --min_replicas {min_replicas}`"
        )
    limit, host = _time(timeout), host or socket.gethostname()
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    try:
        manager = Manager(
            pg=_GlooAt(host, limit),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=min_replicas,
            use_async_quorum=False,
            timeout=limit,
            quorum_timeout=_time(quorum_timeout),
            connect_timeout=_time(connect_timeout),
            rank=0,
            world_size=1,
            store_addr="localhost",
            store_port=store.port,
            lighthouse_addr=address,
            hostname=host,
            checkpoint_transport=_TransportAt(host, limit),
            replica_id=name or f"{socket.gethostname()}-{os.getpid()}",
        )
    except RuntimeError as error:
        raise WireError(
            f"the lighthouse at {address} does not answer: start one on a host that all replicas reach, with"
            f" `torchft_lighthouse --min_replicas {min_replicas}`, and check the address. (torchft said:"
            f" {str(error).partition(chr(10))[0]})"
        ) from error
    manager.thinwire_store = store  # it must live as long as the manager
    return manager


class _GlooAt(ProcessGroupGloo):
    """A group whose store is at an address of the caller's choice. torchft takes the host's name."""

    def __init__(self, host: str, limit: timedelta) -> None:
        super().__init__(timeout=limit)
        self._host = host

    def get_reconfigure_handle(self) -> str:
        """Return what the other replicas need to connect."""
        handle = json.loads(super().get_reconfigure_handle())
        handle["store"] = f"{self._host}:{handle['store'].rpartition(':')[2]}"
        return json.dumps(handle)


class _TransportAt(HTTPTransport):
    """A transport of states from an address of the caller's choice. torchft takes the host's name."""

    def __init__(self, host: str, limit: timedelta) -> None:
        self._host = host  # before the constructor, which logs the address
        super().__init__(timeout=limit, num_chunks=0)

    def address(self) -> str:
        """Return the address that a replica reads a state from."""
        port = urlsplit(super().address()).port
        return f"http://{self._host}:{port}/checkpoint/"


class ManagerMembership:
    """torchft's manager as thinwire's membership.

    Args:
        manager: The manager.

    Raises:
        UnavailableError: The manager's set-up is not supported.
        AttachError: The manager has a wire already.
    """

    def __init__(self, manager: Manager) -> None:
        if manager._use_async_quorum:
            raise UnavailableError(
                "the manager computes its quorum asynchronously, and a replica would train on parameters that"
                " are replaced meanwhile: give Manager(use_async_quorum=False), or use make_manager"
            )
        if manager._replica_world_size_mode != WorldSizeMode.DYNAMIC:
            raise UnavailableError(
                f"world_size_mode={manager._replica_world_size_mode} keeps spare replicas, which thinwire"
                " does not: leave world_size_mode out"
            )
        if manager._group_world_size != 1:
            raise UnavailableError(
                f"the manager's replica has {manager._group_world_size} processes, and thinwire supports one:"
                " run one process per replica"
            )
        if _KEY in manager._user_state_dicts:
            raise AttachError("this manager has a wire already: make a manager for each model")
        self.manager = manager
        self.group = manager._pg
        self.limit: timedelta = manager._timeout
        self.patience: timedelta = manager._quorum_timeout
        self.name: str = manager._replica_id or f"{socket.gethostname()}-{os.getpid()}"

    @property
    def rank(self) -> int:
        """This replica's place in the quorum."""
        rank: int | None = self.manager.participating_rank()
        return 0 if rank is None else rank

    @property
    def size(self) -> int:
        """The number of replicas in the quorum."""
        return max(1, int(self.manager.num_participants()))

    @property
    def minimum(self) -> int:
        """The manager's min_replica_size."""
        return int(self.manager._min_replica_size)

    @property
    def position(self) -> int:
        """The manager's step."""
        return int(self.manager.current_step())

    @property
    def error(self) -> str | None:
        """The manager's error in this quorum, or None."""
        found = self.manager.errored()
        return None if found is None else str(found.original_exception)

    def begin(self) -> None:
        """Wait for the quorum. The manager gives this replica a live peer's state if it is behind."""
        try:
            self.manager.start_quorum()
        except (TimeoutError, RuntimeError) as error:
            raise WireError(
                f"there was no quorum within {self.patience.total_seconds():g} s: too few replicas are there,"
                " or the lighthouse is gone. Start more replicas, or lower the lighthouse's --min_replicas."
                " If exchanges are farther apart than that, raise quorum_timeout. If the lighthouse was"
                f" restarted, give Manager(quorum_retries=...). (torchft said: {error})"
            ) from error

    def vote(self, error: Exception | None) -> bool:
        """Report an error, and return whether the manager commits."""
        if error is not None:
            self.manager.report_error(error)
        try:
            return bool(self.manager.should_commit())
        except RuntimeError as failure:
            raise WireError(
                f"exchanges fail again and again ({failure}): the log tells why. Start more replicas, lower"
                " min_replica_size, or leave out max_retries"
            ) from failure

    def fall_behind(self) -> None:
        """Set the manager's step back, so that it asks for a live peer's state."""
        self.manager.load_state_dict({**self.manager.state_dict(), "step": 0})

    def abort(self) -> None:
        """Close the connections of the quorum's process group."""
        self.group.abort()


def _validated(
    model: nn.Module, config: object, optimizer: Optimizer | Sequence[Optimizer]
) -> list[Optimizer]:
    """Return the optimizers, after validating the arguments of `attach`."""
    if isinstance(model, DistributedDataParallel):
        raise AttachError("the model is wrapped in DDP: give the module itself, which torchft's replicas own")
    loop = config.outer_loop if isinstance(config, Averaging) else None
    if not isinstance(config, Averaging) or loop is None:
        raise OptionError(
            f"program={config!r} has no outer optimizer, whose state replicas share: give DiLoCo(...). Plain"
            " averages are DiLoCo(period, outer=partial(torch.optim.SGD, lr=1))"
        )
    refused = {
        "overlap": (loop.overlap, 0, "an exchange in flight could not be committed or dropped as a whole"),
        "warmup_steps": (config.warmup_steps, 0, "gradients are not exchanged among replicas"),
        "within": (config.within, None, "each replica is one process"),
    }
    for name, (value, allowed, reason) in refused.items():
        if value != allowed:
            raise OptionError(f"{name}={value!r} is not supported with torchft, since {reason}: leave it out")
    if config.optimizer_state == "mean":
        raise OptionError('optimizer_state="mean" is not supported with torchft: use "local" or "reset"')
    trained = {name: one.shape for name, one in model.named_parameters() if one.requires_grad}
    check_fit(config, trained, 1)
    return optimizers_of(optimizer, dict(model.named_parameters()))


def _observe(model: ReplicaModel, optimizers: Sequence[Optimizer], averager: LiveAverager) -> None:
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


def _time(seconds: timedelta | float) -> timedelta:
    return seconds if isinstance(seconds, timedelta) else timedelta(seconds=seconds)
