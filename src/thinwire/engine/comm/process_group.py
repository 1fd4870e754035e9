"""The private calls of the engine: torch.distributed's groups, stores and time limits, futures, the profiler.

| name | purpose | since |
|---|---|---|
| `distributed_c10d._new_process_group_helper` | makes a group under a name of thinwire's choice | 2.6 |
| `distributed_c10d._world` | tables of groups, to hide one from torch's count of groups | 2.6 |
| `distributed_c10d._get_process_group_store` | the store of a group | 2.6 |
| `ProcessGroup._device_types`, `_get_backend`, `Options._timeout` | a group's time limit and backend | 2.6 |
| `distributed_c10d.AllgatherOptions` | gathers on a group that torch.distributed does not know | 2.6 |
| `distributed_c10d._ProcessGroupWrapper` | ends a group of torch 2.6 to 2.8, see `_backend_holders` | 2.6 |
| `Future._set_unwrap_func` | a future that raises any exception, with the text that DDP prints | 2.6 |
| `autograd.profiler._is_profiler_enabled` | whether a profiler runs: otherwise ranges cost nothing | 2.6 |

Since: the oldest inspected version that has it. All are in 2.6, 2.9, 2.13 and 2.15. `private` reads them. It
raises UnavailableError with torch's version if a name is missing.
"""

import contextlib
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import profiler
from torch.distributed import distributed_c10d

from thinwire.errors import AttachError, OptionError
from thinwire.version import private


def new_group(
    parent: dist.ProcessGroup, members: Sequence[int], name: str, store: dist.Store, limit: timedelta
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

    Returns:
        The process group.
    """
    global_ranks = dist.get_process_group_ranks(parent)
    ranks = [global_ranks[member] for member in members]
    backend = dist.get_backend(parent)
    full_name: Any = f"{parent.group_name}_{name}"  # newer torch types names
    group: dist.ProcessGroup
    group, _ = private(distributed_c10d, "_new_process_group_helper")(
        len(ranks),
        ranks.index(global_ranks[parent.rank()]),
        ranks,
        dist.get_backend_config(parent) if backend == dist.Backend.UNDEFINED else backend,
        store,
        full_name,
        timeout=limit,
        group_desc="thinwire",
    )
    _world().pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


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

    def destroy(self) -> None:
        """Destroy the group. Collectives still in flight on other ranks fail there.

        It does nothing in a forked process, such as a DataLoader's worker that collects a model. The
        backend's threads do not exist there, and its destructor would wait for them or crash.
        """
        if os.getpid() != self._process or not hasattr(self, "group"):
            return
        world = _world()
        holders = _backend_holders(self.group)
        # The user's own dist.destroy_process_group() may have come first.
        if self.usable:
            world.pg_map[self.group], world.pg_names[self.group] = self._entry, self._name
            with contextlib.suppress(RuntimeError, ValueError):
                dist.destroy_process_group(self.group)
        del self.group
        del holders  # the last references


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
    """Return the time limit of this group's collectives."""
    device = private(group, "_device_types")[0]
    options = private(group, "_get_backend")(device).options
    return timedelta(seconds=private(options, "_timeout").total_seconds())


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
    cpu = torch.device("cpu")
    known = cpu in private(group, "_device_types")
    return known and private(group, "_get_backend")(cpu).name() == dist.Backend.GLOO


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
