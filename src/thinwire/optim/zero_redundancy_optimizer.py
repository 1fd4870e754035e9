"""The name of `torch.distributed.optim.zero_redundancy_optimizer`.

What differs from torch's: parameters travel many at a time, so a step takes few round trips; parameters of
several dtypes, named parameters and channels_last are fine; loading leaves your dictionary and its tensors
alone; ranks are those of the process group throughout; ranks with different parameters raise on every rank
instead of hanging; frozen parameters do not travel; with a GradScaler, a rank whose gradients overflow still
exchanges parameters with the others; `state` and `defaults` are the local optimizer's, as schedulers expect.
"""

import enum
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer

from thinwire.codecs.codec import is_whole
from thinwire.errors import OptionError, UnavailableError
from thinwire.optim._given import described, group_given, listed, local_optimizer
from thinwire.optim._scaled import wrapped_step
from thinwire.set_ups import agree_on
from thinwire.sharding.assignment import Assignment, assign, in_runs
from thinwire.sharding.collect import collect
from thinwire.sharding.overlap import Overlap
from thinwire.sharding.parameters import as_views, batches, in_turn, share
from thinwire.sharding.state import checked, joined, options_of, packed_groups, part_of, shard_of, whole_of
from thinwire.wire.agree import Meeting
from thinwire.wire.blocking import run_abreast, run_blocking
from thinwire.wire.communicator import time_limit

__all__ = ["ZeroRedundancyOptimizer"]

logger = logging.getLogger(__name__)

_TOPIC = "zero"


class _OverlapStatus(enum.IntEnum):
    """How far the overlap with DDP is set up. Owners do not depend on DDP's buckets, so one backward does."""

    UNINITIALIZED = 0
    DDP_HAS_REBUILT_BUCKETS = 1
    INITIALIZED = 2


class _OverlapInfo:
    """What the hooks of `ddp_zero_hook` keep with their optimizer."""

    def __init__(self) -> None:
        self.status = _OverlapStatus.UNINITIALIZED
        self.shard_buckets = False
        self.params_per_bucket: list[list[torch.Tensor]] = []
        self.overlap: Overlap | None = None


class _ZeROJoinHook(JoinHook):
    """What a rank that has run out of inputs does while others still train: step along."""

    def __init__(self, zero: "ZeroRedundancyOptimizer") -> None:
        self.zero = zero

    def main_hook(self) -> None:
        self.zero.step()


class ZeroRedundancyOptimizer(Optimizer, Joinable):
    """Any optimizer with its state spread over the ranks: each keeps and updates its share of parameters.

    After a step, every rank sends the parameters that it has updated to all others. Optimizer state, twice
    the model for Adam, so takes 1/W of the memory; a rank sends (W-1)/W of the model more per step. Gradients
    must be the same on all ranks, as under DDP. Paper: https://arxiv.org/abs/1910.02054.

    Args:
        params: Parameters, named parameters or groups of them; the same on every rank.
        optimizer_class: Makes the local optimizer, from this rank's share of the groups.
        process_group: Over which to spread; None: the whole world.
        parameters_as_bucket_view: Make the parameters views of flat buffers, which are sent without a copy.
        overlap_with_ddp: Step inside backward, by a hook made by `ddp_zero_hook`; `step()` then does nothing.
        **defaults: The options of `optimizer_class`.

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
        self._optimizer_class, self._options = optimizer_class, defaults
        self._has_state = False
        Optimizer.__init__(self, listed(params), defaults)
        Joinable.__init__(self)
        self.process_group = group_given(process_group)
        self.rank: int = self.process_group.rank()
        self.world_size: int = self.process_group.size()
        self.global_rank: int = dist.get_global_rank(self.process_group, self.rank)
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
    def state(self) -> "defaultdict[torch.Tensor, Any]":
        """The local optimizer's: that of the parameters which this rank owns."""
        return self.optim.state

    @state.setter
    def state(self, state: "defaultdict[torch.Tensor, Any]") -> None:
        if "optim" in self.__dict__:
            self.optim.state = state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Spread more parameters over the ranks; every rank must do so at the same point."""
        if self.initialized and self._overlap_with_ddp:
            raise UnavailableError(
                "add_param_group was called, but with overlap_with_ddp=True owners are fixed with the hook:"
                " give all groups when the optimizer is made"
            )
        super().add_param_group(param_group)
        if not self.initialized:
            return
        self._assign()
        self.optim.add_param_group(self._partition_parameters()[self.rank][-1])
        self._sync_param_groups(self.optim.param_groups[-1:], self.param_groups[-1:])
        self._build_param_buckets()
        self._all_state_dicts = []  # it lacks the new group

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, **kwargs: Any
    ) -> float | None:
        """Update this rank's parameters, and bring all ranks' to all; returns the closure's loss.

        What else is given goes to the local optimizer's `step`. With `overlap_with_ddp` it was all done
        inside backward.
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
        """Bring all ranks' state to the CPU of rank `to` of the group, for its next `state_dict()`.

        Every rank must call this. On the way other ranks hold 32 MB of it, or its largest tensor.
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
        """The whole state, as of the last `consolidate_state_dict`, in the form of `optimizer_class`."""
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        if not self._all_state_dicts:
            raise UnavailableError(
                f"rank {self.rank} has only its own part of the optimizer's state: call"
                f" consolidate_state_dict(to={self.rank}) on every rank first, or save sharded_state_dict()"
            )
        state = whole_of(dict(enumerate(self._all_state_dicts)), self._assignment)
        whole = {"state": state, "param_groups": packed_groups(self.param_groups)}
        for changing in self._optimizer_state_dict_post_hooks.values():
            changed = changing(self, whole)
            whole = whole if changed is None else changed
        return whole

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take this rank's part of a whole state: of this class, of torch's or of the local optimizer's own.

        Every rank loads the same; a different number of ranks may have saved it.
        """
        whole = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, whole)
            whole = whole if changed is None else changed
        part = part_of(checked(whole, self.param_groups), self._assignment[self.rank])
        self.optim.load_state_dict(part)
        self._sync_param_groups(self.optim.param_groups, self.param_groups)
        self._sync_param_groups(self.param_groups, self.optim.param_groups)
        self._all_state_dicts = []  # of before
        self._has_state = True
        for done in self._optimizer_load_state_dict_post_hooks.values():
            done(self)

    def sharded_state_dict(self) -> dict[str, Any]:
        """This rank's part alone: no communication, tensors and plain values.

        For `torch.save` to a file of each rank's own, or for torch.distributed.checkpoint, where keys of
        different ranks do not collide.

        Example::

            torch.save(optimizer.sharded_state_dict(), f"optimizer-{rank}.pt")
            optimizer.load_sharded_state_dict(torch.load(f"optimizer-{rank}.pt"))
        """
        self._sync_param_groups(self.param_groups, self.optim.param_groups)
        return shard_of(self.optim.state_dict(), self.param_groups, self._assignment, self.rank)

    def load_sharded_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Take back what `sharded_state_dict` gave; with another number of ranks, from the list of all."""
        self.load_state_dict(joined(state_dict, self._assignment[self.rank]))

    def join_hook(self, **_kwargs: Any) -> JoinHook:
        """For torch's `Join`: a rank without inputs goes on with its share of every step.

        It steps with the gradients that it has: join DDP as well, or set them.
        """
        return _ZeROJoinHook(self)

    @property
    def join_device(self) -> torch.device:
        """Where collectives of `Join` are."""
        return self._index_to_param[0].device

    @property
    def join_process_group(self) -> Any:
        """Over which `Join` talks."""
        return self.process_group

    def _assign(self, share_out: Callable[[list[list[int]], int], Assignment] = assign) -> None:
        """Who owns what; a pure function of the groups, and the same for all as long as those are."""
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
        self.optim = local_optimizer(self._optimizer_class, own, self._options)
        self.defaults = self.optim.defaults
        self._sync_param_groups(self.optim.param_groups, self.param_groups)

    def _assign_for_overlap(self, shard_buckets: bool) -> None:
        """Owners as the hook wants them, before there is any state."""
        self._overlap_info.shard_buckets = shard_buckets
        if shard_buckets or self._has_state:  # the same on all ranks, whether or not they own some of it
            return
        self._assign(in_runs)
        self._make_local_optimizer()

    def _partition_parameters(
        self, params_per_rank: list[list[torch.Tensor]] | None = None
    ) -> list[list[dict[str, Any]]]:
        """Each rank's parameter groups."""
        if params_per_rank is not None:
            raise UnavailableError(
                "params_per_rank cannot be given: thinwire shares out parameters itself, balanced by size"
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
                "gradients cannot be given: the local optimizer takes each parameter's .grad"
            )
        Join.notify_join_context(self)
        if self._trainable() != self._is_trainable_mask:
            logger.warning(
                "other parameters are trainable than before: the new ones are sent as well from now on"
            )
            self._build_param_buckets()
        self._sync_param_groups(self.param_groups, self.optim.param_groups)
        given = {} if closure is None else {"closure": closure}
        loss: float | None = wrapped_step(self, self.optim, **given, **kwargs)
        self._sync_param_groups(self.optim.param_groups, self.param_groups)
        return loss

    def _sync_params(self) -> None:
        """Bring every owner's parameters to all ranks."""
        if self.world_size > 1:
            sent = in_turn(self._buckets)
            run_abreast((share(batch, owner, self.rank) for owner, batch in sent), self.process_group)

    @staticmethod
    def _sync_param_groups(
        src_param_groups: list[dict[Any, Any]], dst_param_groups: list[dict[Any, Any]]
    ) -> None:
        """Copy the groups' options."""
        for source, destination in zip(src_param_groups, dst_param_groups, strict=True):
            destination.update(options_of(source))

    def _trainable(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._index_to_param]

    def _build_param_buckets(self) -> None:
        """What is sent together, once the ranks have agreed that they have the same.

        A parameter that was trainable once goes on being sent when it is frozen: an optimizer updates it as
        long as it has a gradient, and whether it has is not known elsewhere.
        """
        self._is_trainable_mask = self._trainable()
        traveling = self._traveling | {index for index, moves in enumerate(self._is_trainable_mask) if moves}
        if self.initialized and traveling == self._traveling:
            return
        if self.world_size > 1:
            set_up = {
                "parameters_as_bucket_view": str(self.parameters_as_bucket_view),
                **described(self.optim, self.param_groups, traveling, self.parameters_as_bucket_view),
            }
            agree_on(set_up, Meeting(self.process_group), time_limit(self.process_group), _TOPIC)
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
