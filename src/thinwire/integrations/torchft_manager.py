"""torchft's manager: how it is made for replicas of one or several ranks, and its use as a quorum service."""

import contextlib
import json
import logging
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from thinwire.codecs.checks import check_whole
from thinwire.errors import AttachError, StateError, ThinwireError, UnavailableError, WireError
from thinwire.step.options import duration_of

try:
    from torchft import Manager, ProcessGroupGloo
    from torchft.manager import WorldSizeMode
except ImportError as error:
    raise UnavailableError(
        f"thinwire.integrations.torchft needs torchft ({error}): pip install torchft-nightly"
    ) from error

from thinwire.integrations.torchft_transport import KEY, StateTransport, in_url, reachable_host, store_at

logger = logging.getLogger("thinwire")

_BETWEEN_RETRIES = 2.0
"""Seconds between two attempts to reach a lighthouse."""
_CONNECT_LIMIT = timedelta(seconds=10)
"""The longest time that a lighthouse may take to answer at first."""
_FIRST_NOTICE = 30.0
"""Seconds of waiting for a quorum before the first log of it."""
_NO_QUORUM = (
    "fewer replicas ask for one than the lighthouse's --min_replicas or half of the live ones, or the"
    " lighthouse does not respond"
)
_VOTE_LIMITS = 4
"""How many time limits a rank waits for the votes of its replica's other ranks: they may connect, receive a
state and wait for a collective, each for up to one limit."""


def make_manager(
    *,
    min_replicas: int,
    lighthouse: str | None = None,
    shards: DeviceMesh | dist.ProcessGroup | None = None,
    name: str | None = None,
    host: str | None = None,
    timeout: timedelta | float = 60.0,
    quorum_timeout: timedelta | float = 3600.0,
) -> Manager:
    """Return a manager of torchft on Gloo. Call it on every rank of a replica.

    A lighthouse that stops responding is asked again every two seconds, until `quorum_timeout`.

    Args:
        min_replicas: The number of replicas that an exchange needs to be committed, the same on all
            replicas. Fewer replicas continue to train without exchanges if the lighthouse has
            `--min_replicas 1`. With a higher number there, they wait for a quorum instead.
        lighthouse: The address of the lighthouse, as `"http://host:29510"`. None takes it from the variable
            TORCHFT_LIGHTHOUSE.
        shards: The ranks of this replica, each of which holds a shard of its model, as the mesh passed to
            `fully_shard` or its process group. None: this process holds the whole model.
        name: The replica's name in logs, the same after each restart. None: host and process.
        host: The name or address by which other replicas reach this host. States and stores are served there
            only. None: the address from which this host reaches the lighthouse, which is the loopback
            address for a lighthouse at `localhost`.
        timeout: Seconds after which a collective, or the transfer of a state to a newcomer, fails. A stalled
            replica delays the others by that much. The lighthouse must respond within it, and within ten
            seconds.
        quorum_timeout: Seconds to wait for enough replicas. For a newcomer it limits all attempts together.
            It must exceed the time between two exchanges, because a newcomer waits for the next one. A wait
            is logged after 30 seconds, then after each doubling.

    Raises:
        WireError: There is no lighthouse.
        OptionError: An option is not valid, or `host` is not an address of this host.
    """
    check_whole("min_replicas", min_replicas, 1, "replicas that an exchange needs")
    address = lighthouse or os.environ.get("TORCHFT_LIGHTHOUSE")
    if not address:
        raise WireError(
            "there is no lighthouse: pass its address, as lighthouse='http://host:29510', or set"
            " TORCHFT_LIGHTHOUSE. Start one on a host that all replicas reach, with"
            " `torchft_lighthouse --min_replicas 1`"
        )
    group = shards.get_group() if isinstance(shards, DeviceMesh) else shards
    limit, patience = duration_of("timeout", timeout), duration_of("quorum_timeout", quorum_timeout)
    host = reachable_host(host, address)
    options = {
        "pg": _GlooAt(host, limit),
        "load_state_dict": None,
        "state_dict": None,
        "min_replica_size": min_replicas,
        "use_async_quorum": False,
        "timeout": limit,
        "quorum_timeout": patience,
        "connect_timeout": min(limit, _CONNECT_LIMIT),
        "rank": 0 if group is None else group.rank(),
        "world_size": 1 if group is None else group.size(),
        "lighthouse_addr": address,
        "hostname": in_url(host),
        "checkpoint_transport": StateTransport(host, limit),
        # torchft gives up at the first broken connection to the lighthouse, and raises only after its whole
        # quorum timeout (an hour). A replica that was cut off for a moment would be lost.
        "quorum_retries": int(patience.total_seconds() / _BETWEEN_RETRIES),
    }
    if options["rank"]:
        return _later_manager(group, options)
    return _first_manager(group, options, name or f"{socket.gethostname()}-{os.getpid()}")


def _first_manager(group: dist.ProcessGroup | None, options: dict[str, Any], name: str) -> Manager:
    """Return the manager of a replica's first rank, and send its address to the other ranks."""
    # With one process, no other needs the store.
    host = "localhost" if group is None or group.size() == 1 else options["hostname"].strip("[]")
    store = store_at(host)
    address = _ManagerAddress(host, store.port, name)
    try:
        manager = Manager(**options, store_addr=host, store_port=store.port, replica_id=name)
    except RuntimeError as error:
        address.error = (
            f"the lighthouse at {options['lighthouse_addr']} does not answer: start one on a host that all"
            " replicas reach, with `torchft_lighthouse --min_replicas 1`, and check the address. torchft's"
            f" error: {str(error).partition(chr(10))[0]}"
        )
        raise WireError(address.error) from error
    finally:
        _from_first(group, address)
    manager.thinwire_store = store  # it must live as long as the manager
    return manager


def _later_manager(group: dist.ProcessGroup | None, options: dict[str, Any]) -> Manager:
    """Return the manager of another rank of a replica, once the first rank has made its own."""
    address = _from_first(group)
    if address.error is not None:
        raise WireError(address.error)
    return Manager(**options, store_addr=address.host, store_port=address.port, replica_id=address.name)


@dataclass
class _ManagerAddress:
    """The message of a replica's first rank to the others.

    Attributes:
        host: The host of the store that the replica's managers share.
        port: Its port.
        name: The replica's name.
        error: The reason why the first rank could not make a manager, or None.
    """

    host: str
    port: int
    name: str
    error: str | None = None


def _from_first(group: dist.ProcessGroup | None, own: _ManagerAddress | None = None) -> Any:
    """Return the message of a replica's first rank. Collective among its ranks."""
    messages: list[_ManagerAddress | None] = [own]
    if group is not None and group.size() > 1:
        dist.broadcast_object_list(messages, group_src=0, group=group)
    return messages[0]


class _GlooAt(ProcessGroupGloo):
    """A group whose store listens on one address. torchft's listens on all interfaces."""

    def __init__(self, host: str, limit: timedelta) -> None:
        super().__init__(timeout=limit)
        self._host = in_url(host)
        self._rendezvous_store = store_at(host)

    def get_reconfigure_handle(self) -> str:
        """Return the connection data for the other replicas."""
        handle = json.loads(super().get_reconfigure_handle())
        handle["store"] = f"{self._host}:{handle['store'].rpartition(':')[2]}"
        return json.dumps(handle)


class ManagerQuorum:
    """torchft's manager as a quorum service (`QuorumService`).

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
                " are replaced meanwhile: pass Manager(use_async_quorum=False), or use make_manager"
            )
        if manager._replica_world_size_mode != WorldSizeMode.DYNAMIC:
            raise UnavailableError(
                f"world_size_mode={manager._replica_world_size_mode} keeps spare replicas, which thinwire"
                " does not: leave world_size_mode out"
            )
        if KEY in manager._user_state_dicts:
            raise AttachError("this manager has a wire already: make a manager for each model")
        if not isinstance(manager._checkpoint_transport, StateTransport):
            logger.warning(
                "this manager's %s may run code that a peer sends: use make_manager, which does not",
                type(manager._checkpoint_transport).__name__,
            )
        self.manager = manager
        self.group = manager._pg
        self.limit: timedelta = manager._timeout
        self.patience: timedelta = manager._quorum_timeout
        self.name: str = manager._replica_id or f"{socket.gethostname()}-{os.getpid()}"

    @property
    def own_rank(self) -> int:
        """The number of this rank in its replica."""
        return int(self.manager._group_rank)

    @property
    def ranks(self) -> int:
        """The number of ranks of this replica."""
        return int(self.manager._group_world_size)

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
        """The failure of the manager in this quorum, or None."""
        found = self.manager.errored()
        return None if found is None else str(found.original_exception)

    def begin(self, limit: timedelta) -> None:
        """Wait for the quorum. The manager loads a live peer's state into this replica if it is behind."""
        try:
            with _waiting(limit):
                self.manager.start_quorum(timeout=limit)
        except ThinwireError:
            raise  # from `LiveState.receive`
        except (TimeoutError, RuntimeError) as error:
            self.manager._quorum_future = None  # or the next start_quorum would raise the same error at once
            raise WireError(
                f"there was no quorum within {self.patience.total_seconds():g} s: {_NO_QUORUM}. Start more"
                " replicas. Or start the lighthouse with --min_replicas 1, so that fewer than min_replicas"
                " continue to train. If exchanges are farther apart than that, raise quorum_timeout. If the"
                f" lighthouse was restarted, pass Manager(quorum_retries=...). torchft's error: {error}"
            ) from error
        failure = self.manager.errored()
        if failure is not None and isinstance(failure.original_exception, StateError):
            raise failure.original_exception  # the peer would send the same again

    def vote(self, error: Exception | None) -> bool:
        """Report an error, and return whether the manager commits."""
        if error is not None:
            self.manager.report_error(error)
        try:
            return bool(self.manager.should_commit(timeout=_VOTE_LIMITS * self.limit))
        except TimeoutError as failure:
            raise WireError(
                f"another rank of this replica did not vote on the exchange within"
                f" {_VOTE_LIMITS * self.limit.total_seconds():g} s: restart all ranks of this replica"
            ) from failure
        except RuntimeError as failure:
            raise WireError(
                f"too many consecutive exchanges failed ({failure}); see the log for each cause. Start more"
                " replicas, lower min_replicas, or leave out max_retries"
            ) from failure

    def fall_behind(self) -> None:
        """Set the manager's step back, so that it asks for a live peer's state."""
        self.manager.load_state_dict({**self.manager.state_dict(), "step": 0})

    def abort(self) -> None:
        """Close the connections of the quorum's process group."""
        self.group.abort()

    def state_dict(self) -> dict[str, int]:
        """Return the manager's step and its number of committed batches."""
        state: dict[str, int] = self.manager.state_dict()
        return state

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from the saved counts of a manager."""
        self.manager.load_state_dict(state)


@contextlib.contextmanager
def _waiting(limit: timedelta) -> Iterator[None]:
    """Log that this replica waits for a quorum, after half a minute and after each doubling."""
    ended = threading.Event()

    def log() -> None:
        waited, pause = 0.0, _FIRST_NOTICE
        while not ended.wait(pause):
            waited += pause
            pause = waited
            logger.warning(
                "this replica has waited %.0f s for a quorum, and waits up to %.0f s: %s",
                waited,
                limit.total_seconds(),
                _NO_QUORUM,
            )

    threading.Thread(target=log, name="thinwire_waiting", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
