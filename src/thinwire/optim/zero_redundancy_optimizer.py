"""Drop-in replacement for `torch.distributed.optim.zero_redundancy_optimizer`.

Differences from torch:

- Many parameters are sent at once, and frozen ones are not sent.
- Several dtypes, named parameters and channels_last work. Loading does not change your dictionary.
- Ranks are those of the process group. Ranks with different parameters raise instead of hanging.
- With a GradScaler, a rank whose gradients overflow still exchanges parameters.
- `state` and `defaults` are the local optimizer's, as schedulers expect.
"""

import enum
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer

from thinwire.amp.skipped_steps import wrapped_step
from thinwire.checkpoint.gather import collect
from thinwire.checkpoint.optimizer_state import (
    checked,
    joined,
    options_of,
    packed_groups,
    part_of,
    shard_of,
    whole_of,
)
from thinwire.codecs.checks import is_whole
from thinwire.engine.comm.agreement import agree_on
from thinwire.engine.comm.borrowed_group import run_abreast, run_blocking
from thinwire.engine.comm.process_group import group_or_world, outside, time_limit
from thinwire.engine.comm.rendezvous import StoreRendezvous
from thinwire.engine.pack import batches
from thinwire.errors import OptionError, UnavailableError
from thinwire.step.autograd import state_hooks
from thinwire.strategies.zero.assignment import Assignment, assign, in_runs
from thinwire.strategies.zero.overlap import Overlap, Usage
from thinwire.strategies.zero.parameters import as_views, in_turn, share

__all__ = ["ZeroRedundancyOptimizer"]

logger = logging.getLogger(__name__)

_TOPIC = "zero"


class _OverlapStatus(enum.IntEnum):
    """Stages of the set-up with DDP. One backward completes it, as owners do not depend on DDP's buckets."""

    UNINITIALIZED = 0
    DDP_HAS_REBUILT_BUCKETS = 1
    INITIALIZED = 2


class _OverlapInfo:
    """State of the hooks of `ddp_zero_hook`, kept with their optimizer."""

    def __init__(self) -> None:
        self.status = _OverlapStatus.UNINITIALIZED
        self.shard_buckets = False
        self.params_per_bucket: list[list[torch.Tensor]] = []
        self.overlap: Overlap | None = None
        self.usage: Usage | None = None


class _ZeROJoinHook(JoinHook):
    """Join hook that steps a rank without inputs while other ranks still train."""

    def __init__(self, zero: "ZeroRedundancyOptimizer") -> None:
        self.zero = zero

    def main_hook(self) -> None:
        self.zero.step()


class ZeroRedundancyOptimizer(Optimizer, Joinable):
    """Any optimizer, with its state in shards. Each rank keeps and updates its share of the parameters.

    After a step, every rank sends its updated parameters to all others. Optimizer state, which for Adam is
    twice the model, takes 1/W of the memory. A rank sends an additional (W-1)/W of the model per step.
    Gradients must be the same on all ranks, as under DDP. Paper: https://arxiv.org/abs/1910.02054.

    Args:
        params: Parameters, named parameters or groups of them, the same on every rank.
        optimizer_class: Class of the local optimizer, which gets this rank's share of the groups.
        process_group: Ranks that share the state. None is the whole world.
        parameters_as_bucket_view: Make the parameters views of flat buffers, which are sent without a copy.
        overlap_with_ddp: Step inside backward, with a hook of `ddp_zero_hook`. `step()` then does nothing.
        **defaults: Options of `optimizer_class`.

    Example::

        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-3)
        for batch in batches:
            optimizer.zero_grad()
            ddp(batch).backward()
            optimizer.step()
        optimizer.consolidate_state_dict(to=0)  # every rank
        if rank == 0:
            torch.save(optimizer.state_dict(), "optimizer.pt")  # torch.optim.AdamW can load it too
    """

    _step_supports_amp_scaling = True
    optim: Optimizer

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[Optimizer],
        process_group: Any | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        **defaults: Any,
    ) -> None:
        self.initialized = False
        self._overlap_with_ddp = overlap_with_ddp
        self._make_optimizer = partial(_local_optimizer, optimizer_class, defaults=defaults)
        self._has_state = False
        Optimizer.__init__(self, _listed(params), defaults)
        Joinable.__init__(self)
        self.process_group = _group_of(process_group)
        self.rank: int = self.process_group.rank()
        self.world_size: int = self.process_group.size()
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self._all_state_dicts: list[dict[str, Any]] = []
        self._traveling: set[int] = set()
        self._assign()
        self._make_local_optimizer()
        self._build_param_buckets()
        if overlap_with_ddp:
            self._overlap_info = _OverlapInfo()
        self.initialized = True

    @property
    def global_rank(self) -> int:
        """This rank in the whole world."""
        return dist.get_global_rank(self.process_group, self.rank)

    @property
    def state(self) -> "defaultdict[torch.Tensor, Any]":
        """The local optimizer's state, of the parameters that this rank owns."""
        return self.optim.state

    @state.setter
    def state(self, state: "defaultdict[torch.Tensor, Any]") -> None:
        if "optim" in self.__dict__:
            self.optim.state = state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Distribute more parameters over the ranks. Every rank must do so at the same point."""
        if self.initialized and self._overlap_with_ddp:
            raise UnavailableError(
                "add_param_group was called, but with overlap_with_ddp=True owners are fixed with the hook:"
                " pass all groups when the optimizer is made"
            )
        super().add_param_group(param_group)
        if not self.initialized:
            return
        self._assign()
        self.optim.add_param_group(self._partition_parameters()[self.rank][-1])
        self._sync_param_groups(self.optim.param_groups[-1:], self.param_groups[-1:])
        self._build_param_buckets()
        self._all_state_dicts = []  # outdated: without the new group

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, **kwargs: Any
    ) -> float | None:
        """Update this rank's parameters, send them to all ranks, and return the closure's loss.

        Other arguments are passed to the local optimizer's `step`. With `overlap_with_ddp` this does
        nothing, because the step was taken inside backward.
        """
        if self._overlap_with_ddp:
            if "found_inf" in vars(self):
                raise UnavailableError(
                    "a GradScaler was used, but with overlap_with_ddp=True the step is inside backward, on"
                    " scaled gradients: train in bf16 without one, or without overlap_with_ddp"
                )
            if closure is not None:
                raise UnavailableError(
                    "step(closure) was called, but with overlap_with_ddp=True the step is inside backward:"
                    " call the closure yourself, or make the optimizer without it"
                )
            return None
        loss = self._local_step(closure=closure, **kwargs)
        self._sync_params()
        return loss

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather all ranks' state on the CPU of rank `to` of the group, for its next `state_dict()`.

        Every rank must call this. Other ranks hold at most 32 MB of it at a time, or its largest tensor.
        """
        if not is_whole(to) or not 0 <= to < self.world_size:
            raise OptionError(
                f"to={to!r} is not a rank of the optimizer's group: it has 0 to {self.world_size - 1}"
            )
        self._sync_param_groups(self.param_groups, self.optim.param_groups)
        own = self.optim.state_dict()["state"]
        steps = collect(own, self.rank, self.world_size, to, self.join_device)
        states = run_blocking(steps, self.process_group)
        self._all_state_dicts = [
            {"state": state, "param_groups": packed_groups(groups)}
            for state, groups in zip(states, self._partition_parameters(), strict=False)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state of the last `consolidate_state_dict`, in the form of `optimizer_class`."""
        for hook in state_hooks(self, "before saving"):
            hook(self)
        if not self._all_state_dicts:
            raise UnavailableError(
                f"rank {self.rank} has only its own part of the optimizer's state: call"
                f" consolidate_state_dict(to={self.rank}) on every rank first, or save sharded_state_dict()"
            )
        state = whole_of(dict(enumerate(self._all_state_dicts)), self._assignment)
        whole = {"state": state, "param_groups": packed_groups(self.param_groups)}
        for changing in state_hooks(self, "after saving"):
            changed = changing(self, whole)
            whole = whole if changed is None else changed
        return whole

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's part of a whole state, which this class, torch's or `optimizer_class` saved.

        Every rank loads the same state. It may have been saved by a different number of ranks.
        """
        whole = dict(state_dict)
        for hook in state_hooks(self, "before loading"):
            changed = hook(self, whole)
            whole = whole if changed is None else changed
        part = part_of(checked(whole, self.param_groups), self._assignment[self.rank])
        self.optim.load_state_dict(part)
        self._sync_param_groups(self.optim.param_groups, self.param_groups)
        self._sync_param_groups(self.param_groups, self.optim.param_groups)
        self._all_state_dicts = []  # outdated
        self._has_state = True
        for done in state_hooks(self, "after loading"):
            done(self)

    def sharded_state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state, without communication.

        Use it with `torch.save` and a file for each rank, or with torch.distributed.checkpoint, where the
        keys of different ranks do not collide.

        Example::

            torch.save(optimizer.sharded_state_dict(), f"optimizer-{rank}.pt")
            optimizer.load_sharded_state_dict(torch.load(f"optimizer-{rank}.pt"))
        """
        self._sync_param_groups(self.param_groups, self.optim.param_groups)
        return shard_of(self.optim.state_dict(), self.param_groups, self._assignment, self.rank)

    def load_sharded_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Load this rank's `sharded_state_dict`, or, on another number of ranks, the list of all of them."""
        self.load_state_dict(joined(state_dict, self._assignment[self.rank]))

    def join_hook(self, **_kwargs: Any) -> JoinHook:
        """Return torch's `Join` hook, with which a rank without inputs still takes part in every step.

        The rank steps with its present gradients, so join DDP as well, or set them.
        """
        return _ZeROJoinHook(self)

    @property
    def join_device(self) -> torch.device:
        """The device of `Join`'s collectives."""
        return self._index_to_param[0].device

    @property
    def join_process_group(self) -> Any:
        """The process group of `Join`'s collectives."""
        return self.process_group

    def _assign(self, share_out: Callable[[list[list[int]], int], Assignment] = assign) -> None:
        """Assign parameters to owners. The result depends only on the groups, so it is equal on all ranks."""
        groups = self.param_groups
        self._index_to_param: list[torch.Tensor] = [each for group in groups for each in group["params"]]
        self._param_to_index = {each: index for index, each in enumerate(self._index_to_param)}
        sizes = [[each.numel() for each in group["params"]] for group in groups]
        self._assignment: Assignment = share_out(sizes, self.world_size)
        self._param_to_rank = {
            self._index_to_param[index]: rank
            for rank, owned in enumerate(self._assignment)
            for group in owned
            for index in group
        }

    def _make_local_optimizer(self) -> None:
        own = self._partition_parameters()[self.rank]
        self.optim = self._make_optimizer(own)
        self.defaults = self.optim.defaults
        self._sync_param_groups(self.optim.param_groups, self.param_groups)

    def _assign_for_overlap(self, shard_buckets: bool) -> None:
        """Assign owners as the overlap hook needs them, unless there is state already."""
        self._overlap_info.shard_buckets = shard_buckets
        if shard_buckets or self._has_state:  # equal on all ranks, even those that own no state
            return
        self._assign(in_runs)
        self._make_local_optimizer()

    def _partition_parameters(
        self, params_per_rank: list[list[torch.Tensor]] | None = None
    ) -> list[list[dict[str, Any]]]:
        """Return each rank's parameter groups."""
        if params_per_rank is not None:
            raise UnavailableError(
                "params_per_rank cannot be given: thinwire assigns parameters to ranks, balanced by size"
            )
        names = [name for group in self.param_groups for name in group.get("param_names", ())]
        return [
            [
                {
                    **options_of(group),
                    "params": [self._index_to_param[index] for index in own],
                    **({"param_names": [names[index] for index in own]} if names else {}),
                }
                for group, own in zip(self.param_groups, owned, strict=True)
            ]
            for owned in self._assignment
        ]

    def _local_step(
        self,
        gradients: list[torch.Tensor | None] | None = None,
        closure: Callable[[], float] | None = None,
        **kwargs: Any,
    ) -> float | None:
        """Update this rank's parameters only."""
        if gradients is not None:
            raise UnavailableError(
                "gradients cannot be given: the local optimizer uses each parameter's .grad"
            )
        Join.notify_join_context(self)
        if self._trainable() != self._is_trainable_mask:
            logger.warning(
                "the set of trainable parameters has changed: new ones are sent as well from now on"
            )
            self._build_param_buckets()
        self._sync_param_groups(self.param_groups, self.optim.param_groups)
        given = {} if closure is None else {"closure": closure}
        loss: float | None = wrapped_step(self, self.optim, **given, **kwargs)
        self._sync_param_groups(self.optim.param_groups, self.param_groups)
        return loss

    def _sync_params(self) -> None:
        """Send every owner's parameters to all ranks."""
        if self.world_size > 1:
            sent = in_turn(self._buckets)
            run_abreast((share(batch, owner, self.rank) for owner, batch in sent), self.process_group)

    @staticmethod
    def _sync_param_groups(
        src_param_groups: list[dict[Any, Any]], dst_param_groups: list[dict[Any, Any]]
    ) -> None:
        """Copy the options of parameter groups."""
        for source, destination in zip(src_param_groups, dst_param_groups, strict=True):
            destination.update(options_of(source))

    def _trainable(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._index_to_param]

    def _build_param_buckets(self) -> None:
        """Group the parameters that are sent together, after comparing them between ranks.

        A parameter that was trainable once is still sent when it is frozen. Its optimizer updates it as long
        as it has a gradient, which other ranks cannot detect.
        """
        self._is_trainable_mask = self._trainable()
        traveling = self._traveling | {index for index, moves in enumerate(self._is_trainable_mask) if moves}
        if self.initialized and traveling == self._traveling:
            return
        if self.world_size > 1:
            set_up = {
                "parameters_as_bucket_view": str(self.parameters_as_bucket_view),
                **_described(self.optim, self.param_groups, traveling, self.parameters_as_bucket_view),
            }
            agree_on(set_up, StoreRendezvous(self.process_group), time_limit(self.process_group), _TOPIC)
        self._traveling = traveling
        self._buckets: list[list[list[torch.Tensor]]] = []
        for owned in self._assignment:
            moving = [self._index_to_param[index] for group in owned for index in group if index in traveling]
            self._buckets.append(self._batched(moving))

    def _batched(self, parameters: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        if not self.parameters_as_bucket_view:
            return [[parameters[number] for number in batch] for batch in batches(parameters)]
        unlimited = sum(each.numel() * each.element_size() for each in parameters)
        return [
            [as_views([parameters[number] for number in batch])] for batch in batches(parameters, unlimited)
        ]


def _listed(params: Any) -> list[Any]:
    """Return parameters or groups as a list.

    Raises:
        OptionError: If there are none, a group has no 'params', or a parameter is not dense.
        TypeError: If they are not an iterable of parameters or of groups, as in torch.
    """
    if isinstance(params, torch.Tensor | set) or not isinstance(params, Iterable):
        raise TypeError(
            f"params is a {torch.typename(params)}: pass an ordered iterable of parameters, such as"
            " model.parameters(), or of parameter groups"
        )
    items = list(params)
    if not items:
        raise OptionError(
            "params is empty, so there is nothing to optimize; a generator gives its items once"
        )
    kinds = {_kind(each) for each in items}
    if len(kinds) > 1 or None in kinds:
        found = ", ".join(sorted({torch.typename(each) for each in items}))
        raise TypeError(f"params has items of {found}: pass parameters only, or groups (dicts) only")
    for group in items:
        if isinstance(group, dict) and "params" not in group:
            raise OptionError(f"a group has the keys {sorted(group)}: it needs 'params', its parameters")
        if isinstance(group, dict) and not isinstance(group["params"], torch.Tensor | set):
            group["params"] = list(group["params"])  # torch raises on sets, whose order differs by rank
    for tensor in _tensors_in(items):
        if tensor.layout != torch.strided:
            raise OptionError(
                f"a parameter is {tensor.layout}: only dense parameters can be sent to other ranks"
            )
    return items


def _kind(item: object) -> type | None:
    if isinstance(item, tuple):
        return tuple if len(item) == 2 and isinstance(item[1], torch.Tensor) else None
    return next((kind for kind in (torch.Tensor, dict) if isinstance(item, kind)), None)


def _tensors_in(items: list[Any]) -> Iterator[torch.Tensor]:
    for item in items:
        inner = item["params"] if isinstance(item, dict) else item
        several = [inner] if isinstance(inner, torch.Tensor) else inner
        yield from (each for each in several if isinstance(each, torch.Tensor))


def _group_of(process_group: Any | None) -> dist.ProcessGroup:
    """Return the given group, or the whole world for None. Raise OptionError if this rank is not in it."""
    group = group_or_world(process_group)
    if outside(group):
        raise OptionError(
            f"process_group={group!r} must be a process group that this rank is in, or None for the"
            " whole world"
        )
    return group


def _local_optimizer(
    optimizer_class: Any, groups: list[dict[str, Any]], defaults: dict[str, Any]
) -> Optimizer:
    """Return a new local optimizer. Groups may have no parameters, which torch's optimizers accept."""
    known = optimizer_class if isinstance(optimizer_class, type) else Optimizer
    if not callable(optimizer_class) or not issubclass(known, Optimizer):
        raise OptionError(
            f"optimizer_class={optimizer_class!r} must be a subclass of torch.optim.Optimizer, such as"
            " torch.optim.AdamW"
        )
    made = optimizer_class(groups, **defaults)
    if not isinstance(made, Optimizer):
        raise OptionError(
            f"optimizer_class={optimizer_class!r} made a {type(made).__name__}, no torch.optim.Optimizer"
        )
    return made


def _described(
    optim: Optimizer, groups: list[dict[str, Any]], sent: set[int], strided: bool
) -> dict[str, str]:
    """Describe an optimizer and its parameters as text, for comparison between ranks.

    Args:
        optim: The local optimizer.
        groups: Parameter groups of all ranks.
        sent: Indices of the parameters that are sent.
        strided: Whether strides must be equal too.
    """
    parameters = [parameter for group in groups for parameter in group["params"]]
    return {
        "optimizer": f"{type(optim).__module__}.{type(optim).__qualname__}",
        **{
            f"{key} of group {number}": repr(value)
            for number, group in enumerate(groups)
            for key, value in options_of(group).items()
            if isinstance(value, bool | int | float | str | tuple | None)
        },
        **{
            f"parameter {index}": f"{tuple(each.shape)} {each.dtype}"
            + (f" strides {each.stride()}" if strided else "")
            + ("" if index in sent else " frozen")
            for index, each in enumerate(parameters)
        },
    }
