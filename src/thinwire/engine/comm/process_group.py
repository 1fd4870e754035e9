"""The private calls of the engine: torch.distributed's groups, stores and time limits, futures, the profiler.

| name | purpose | since |
|---|---|---|
| `distributed_c10d._new_process_group_helper` | makes a group under a name of thinwire's choice | 2.6 |
| `distributed_c10d._world` | tables of groups, to hide one from torch's count of groups | 2.6 |
| `distributed_c10d._abort_process_group` | ends an accelerator's group without its other ranks | 2.6 |
| `distributed_c10d._get_process_group_store` | the store of a group | 2.6 |
| `ProcessGroup._device_types`, `_get_backend`, `Options._timeout` | a group's time limit and backend | 2.6 |
| `distributed_c10d.AllgatherOptions` | gathers on a group that torch.distributed does not know | 2.6 |
| `distributed_c10d._BackendWrapper` | the class of torchcomms' backends, compared by name | 2.13 |
| `distributed_c10d._ProcessGroupWrapper` | ends a group of torch 2.6 to 2.8, see `_backend_holders` | 2.6 |
| `Future._set_unwrap_func` | a future that raises any exception, with the text that DDP prints | 2.6 |
| `autograd.profiler._is_profiler_enabled` | whether a profiler runs: otherwise ranges cost nothing | 2.6 |

Since: the oldest inspected version that has it. The others are in 2.6, 2.9, 2.13 and 2.15. `private` reads
them. It raises UnavailableError with torch's version if a name is missing.

Differences between versions that matter here, read in their sources:

- Up to 2.13 the default group is bound to a device only by `init_process_group(device_id=...)`. In 2.15
  `nccl` is NCCL2, which always binds it, to the device of LOCAL_RANK unless told otherwise. So there every
  new group would be a split of the default group, on that device, without `_unsplit` and a device of its own.
- `Backend.abort` exists since 2.9; in 2.6 only NCCL's class has it. NCCL2's is survivable in 2.14.1 and
  2.15.0. That of XCCL in 2.15 ends the process, and that of torchcomms' own wrapper may.
- `Backend.get_error` raises in 2.13 unless the backend has one, as NCCL's does. In 2.15 it returns SUCCESS.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import profiler
from torch.distributed import distributed_c10d

from thinwire.errors import AttachError, OptionError
from thinwire.version import private

_CPU = torch.device("cpu")
_XCCL, _TORCHCOMMS = "xccl", "_BackendWrapper"
_CONNECT_POLL = 0.001


def new_group(
    parent: dist.ProcessGroup,
    members: Sequence[int],
    name: str,
    store: dist.Store,
    limit: timedelta,
    device: torch.device = _CPU,
) -> dist.ProcessGroup:
    """Make a process group over some ranks of `parent`. Other ranks need not call this.

    `dist.new_group` needs every rank of the world. With `use_local_synchronization` it takes the group's name
    from the number of groups alive in this process. Ranks that drop a model at different times, or that
    belong to different numbers of subgroups, would then wait for each other under different names. And a
    reused name would find the old group's addresses in the store. So the caller chooses the name.

    Args:
        parent: The group whose ranks, backend and device types are used.
        members: The ranks of `parent` that take part; each must call this.
        name: The group's name, used only once in the life of `store`.
        store: The store through which the members connect.
        limit: The time limit of the group's collectives.
        device: This rank's device. On an accelerator the group is bound to it, and is connected when this
            returns. Otherwise the first collective would connect it, inside backward, while collectives of
            DDP are in flight on another communicator.

    Returns:
        The process group.

    Raises:
        RuntimeError: A member did not connect in time.
    """
    global_ranks = dist.get_process_group_ranks(parent)
    ranks = [global_ranks[member] for member in members]
    backend = dist.get_backend(parent)
    full_name: Any = f"{parent.group_name}_{name}"  # newer torch types names
    accelerated = device.type != "cpu"
    # The caller runs this on a thread of its own, whose current device is the first one. What a backend
    # allocates or launches without naming a device would go there, on every rank of the node.
    entered = torch.get_device_module(device).device(device) if accelerated else contextlib.nullcontext()
    group: dist.ProcessGroup
    with entered, _unsplit():
        group, _ = private(distributed_c10d, "_new_process_group_helper")(
            len(ranks),
            ranks.index(global_ranks[parent.rank()]),
            ranks,
            dist.get_backend_config(parent) if backend == dist.Backend.UNDEFINED else backend,
            store,
            full_name,
            # thinwire polls the collectives of accelerators and names the missing ranks at its own limit.
            # NCCL's watchdog, which ends the process without naming any, must come later.
            timeout=2 * limit if accelerated else limit,
            device_id=device if accelerated else None,
            group_desc="thinwire",
        )
        _world().pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
        if accelerated:
            try:
                _first_collective(group, device, limit)
            except BaseException:
                HiddenGroup(group).destroy()
                raise
    return group


def _first_collective(group: dist.ProcessGroup, device: torch.device, limit: timedelta) -> None:
    """Run a collective, by which backends that connect on first use have connected.

    torch connects a group with a device at once only if its backend can be split. The host may not wait for
    the device without a limit here: a rank that died meanwhile would hang this one.
    """
    work = group.allreduce([torch.zeros(1, dtype=torch.float32, device=device)], dist.AllreduceOptions())
    deadline = time.monotonic() + limit.total_seconds()
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise RuntimeError(f"a first all-reduce did not end within {limit.total_seconds():g} s")
        time.sleep(_CONNECT_POLL)
    work.wait()  # raises if it failed


class _Bound:
    """The default group's device while groups are made, which other threads may do too."""

    lock = threading.Lock()
    making = 0
    device: torch.device | None = None


@contextlib.contextmanager
def _unsplit() -> Iterator[None]:
    """Make groups of their own, not by splitting the default group's communicator.

    If the default group is bound to a device, torch's helper makes new groups by ncclCommSplit, in which all
    ranks of the default group must take part. A group of some ranks would wait for the others for ever. And
    NCCL allows no split while collectives are in flight on the default group, as DDP's broadcasts may be.

    The helper has no option for it, so the default group is unbound meanwhile. Two threads may make groups at
    the same time: A unbinds, B finds it unbound, A binds, B must not unbind it for good. So the first one to
    come unbinds it, and the last one to leave binds it again.
    """
    world: Any = dist.group.WORLD
    with _Bound.lock:
        if _Bound.making == 0:
            _Bound.device = world.bound_device_id
            if _Bound.device is not None:
                world.bound_device_id = None
        _Bound.making += 1
    try:
        yield
    finally:
        with _Bound.lock:
            _Bound.making -= 1
            if _Bound.making == 0 and _Bound.device is not None:
                world.bound_device_id = _Bound.device


class HiddenGroup:
    """A process group that is hidden from torch.distributed's count of groups.

    The name of a user's `new_group(use_local_synchronization=True)` contains the number of groups alive in
    this process. thinwire's groups end when a model is collected, at a different time on every rank. If they
    were counted, that call would use a different name on every rank and hang.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        world = _world()
        self.group = group
        self.store = _store(group)
        self._entry, self._name = world.pg_map.pop(group), world.pg_names.pop(group)
        self._process = os.getpid()

    @property
    def usable(self) -> bool:
        """True while the group exists in this process, until the user destroys all groups."""
        group = getattr(self, "group", None)  # `destroy` drops it
        return os.getpid() == self._process and group in _world().pg_group_ranks

    def error(self) -> str | None:
        """Return the error that a backend of accelerators has reported, if it has one and can report it."""
        for backend in _abortable(self.group):
            with contextlib.suppress(RuntimeError, AttributeError):  # not every backend, nor torch 2.6
                error = backend.get_error()
                if error.name != "SUCCESS":
                    return f"the backend reported {error.name}"
        return None

    def abort(self) -> None:
        """Fail collectives in flight on accelerators, on this rank alone, if the backend can do so."""
        # Not only if `usable`: the user's dist.destroy_process_group() does not reach a hidden group, whose
        # destructor would then run NCCL's collective destroy.
        here = os.getpid() == self._process and hasattr(self, "group")
        for backend in _abortable(self.group) if here else ():
            with contextlib.suppress(RuntimeError):
                backend.abort()

    def destroy(self) -> None:
        """Destroy the group. Collectives still in flight on other ranks fail there, or time out.

        On accelerators the group is aborted instead. NCCL's destroy is collective: it waits for collectives
        in flight and for the peers of the node. But the garbage collector calls this, at a different time on
        every rank and on any thread, so that a rank would wait here for one that still trains, or has died.

        It does nothing in a forked process, such as a DataLoader's worker that collects a model. The
        backend's threads do not exist there, and its destructor would wait for them or crash.
        """
        if os.getpid() != self._process or not hasattr(self, "group"):
            return
        world = _world()
        holders = _backend_holders(self.group)
        self.abort()  # here, as torch's function would not reach a wrapped backend
        # The user's own dist.destroy_process_group() may have come first.
        if self.usable:
            aborts = bool(_abortable(self.group))
            end = private(distributed_c10d, "_abort_process_group") if aborts else dist.destroy_process_group
            world.pg_map[self.group], world.pg_names[self.group] = self._entry, self._name
            with contextlib.suppress(RuntimeError, ValueError):
                end(self.group)
        del self.group
        del holders  # the last references


def _abortable(group: dist.ProcessGroup) -> list[Any]:
    """Return the backends of a group's accelerators that can be aborted without ending the process."""
    found: dict[int, Any] = {}
    for device in private(group, "_device_types"):
        backend = private(group, "_get_backend")(device)
        # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps the backend in one that does not pass `abort` on.
        backend = getattr(backend, "wrapped_pg", backend)
        ends_process = backend.name() == _XCCL or type(backend).__name__ == _TORCHCOMMS
        on_host = device.type == "cpu" or backend.name() == dist.Backend.GLOO
        if not on_host and not ends_process and hasattr(backend, "abort"):
            found[id(backend)] = backend
    return list(found.values())


def _backend_holders(group: dist.ProcessGroup) -> list[object]:
    """Return objects to drop after `group`, so that its Gloo threads are joined without the GIL.

    In torch 2.6 the destructor of a group holds the GIL while it joins these threads. A thread that drops the
    last reference to a collective's tensor waits for the GIL, so both deadlock. torch's own wrapper of a
    backend releases the GIL in its destructor, in 2.6 as well. Since torch 2.9 (or earlier) every group does,
    and no holders are needed.
    """
    if torch_version() >= (2, 9) or not dist.is_gloo_available():
        return []
    wrapper = private(distributed_c10d, "_ProcessGroupWrapper")
    backends = [private(group, "_get_backend")(device) for device in private(group, "_device_types")]
    return [wrapper(held, held) for held in backends if isinstance(held, dist.ProcessGroupGloo)]


def torch_version() -> tuple[int, int]:
    """Return torch's version, as (2, 13)."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """Return the store of a process group; raise AttachError if torch.distributed does not know the group."""
    if group not in _world().pg_map:
        raise AttachError(
            f"the process group {group!r} is not one of torch.distributed's own, so thinwire cannot make a"
            " group of the same ranks: use torch.nn.parallel.DistributedDataParallel with the default process"
            " group, or with one that torch.distributed.new_group made. (torchft's DDP has a group of another"
            " kind, because its manager averages the gradients itself)"
        )
    return _store(group)


def global_ranks(group: Any) -> list[int]:
    """Return the ranks of a group's members in the whole job; their ranks in the group if it is unknown."""
    if group not in _world().pg_group_ranks:  # a group that torch.distributed did not make, as torchft's
        return list(range(group.size()))
    return dist.get_process_group_ranks(group)


def time_limit(group: dist.ProcessGroup) -> timedelta:
    """Return the time limit of this group's collectives: the least of its backends'.

    The Python class of a backend may have no options, as those of third parties. torch gives all backends of
    a group the same limit, so another backend's is taken, or torch's default.
    """
    backends = [private(group, "_get_backend")(device) for device in private(group, "_device_types")]
    options = [backend.options for backend in backends if hasattr(backend, "options")]
    limits = [timedelta(seconds=private(each, "_timeout").total_seconds()) for each in options]
    return min(limits, default=distributed_c10d.default_pg_timeout)


def unwrap_with(future: "torch.futures.Future[Any]", unwrap: Callable[[Any], object]) -> None:
    """Pass a future's value to `unwrap` in each wait, which raises the exceptions of `unwrap`."""
    private(future, "_set_unwrap_func")(unwrap)


def profiler_runs() -> bool:
    """Return whether torch's profiler is recording."""
    return bool(private(profiler, "_is_profiler_enabled"))


def _world() -> Any:
    """Return torch.distributed's tables of process groups."""
    return private(distributed_c10d, "_world")


def _store(group: dist.ProcessGroup) -> dist.Store:
    store: dist.Store = private(distributed_c10d, "_get_process_group_store")(group)
    return store


def on_gloo(group: dist.ProcessGroup) -> bool:
    """Return whether Gloo carries the group's CPU tensors."""
    known = _CPU in private(group, "_device_types")
    return known and private(group, "_get_backend")(_CPU).name() == dist.Backend.GLOO


def gather_options() -> Any:
    """Return the options of `ProcessGroup.allgather`, which torch.distributed does not export by name."""
    return private(distributed_c10d, "AllgatherOptions")()


def group_or_world(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the given group, or the whole world for None.

    On a rank outside the group, torch's placeholder for it is returned unchanged.

    Raises:
        OptionError: It is not a process group, or it is None and torch.distributed is not initialised.
    """
    group = dist.group.WORLD if process_group is None else process_group
    if group is None:
        raise OptionError(
            "process_group=None means the whole world, and there is none yet: call"
            " torch.distributed.init_process_group first"
        )
    if not isinstance(group, dist.ProcessGroup) and not outside(group):
        raise OptionError(
            f"process_group={group!r} must be a torch.distributed.ProcessGroup, or None for the whole world"
        )
    return group


def outside(group: object) -> bool:
    """Return True for torch's placeholder of a group that this rank is not in."""
    return bool(group == dist.GroupMember.NON_GROUP_MEMBER)
