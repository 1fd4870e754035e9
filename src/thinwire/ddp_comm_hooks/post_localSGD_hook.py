"""The names of `torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook`, on thinwire's engine.

What differs from torch's: `subgroup=None` works without CUDA, and with nodes of different sizes; a state of
`process_group=None` means the DDP model's own process group; a state can be pickled, without its groups.
"""

# DDP inspects a hook's annotations and refuses strings: no `from __future__ import annotations` here.

import logging
import weakref
from typing import Any

import torch
import torch.distributed as dist

from thinwire.averaging.gradients import Within
from thinwire.averaging.nodes import ranks_on_this_node
from thinwire.averaging.policy import check_whole
from thinwire.bridge import Bridge, check_bucket
from thinwire.ddp_comm_hooks._run import bridge_of, run_program
from thinwire.errors import OptionError
from thinwire.programs.allreduce import Exact
from thinwire.programs.memory import Memory

logger = logging.getLogger(__name__)

_GROUPS = ("process_group", "subgroup")
_nodes: "weakref.WeakKeyDictionary[Bridge, tuple[int, ...]]" = weakref.WeakKeyDictionary()


class PostLocalSGDState:
    """Options and step count of `post_localSGD_hook`.

    Args:
        process_group: Over which gradients are averaged at first; None: the DDP model's own.
        subgroup: Over which they are averaged later; None: this node's ranks of `process_group`. Ranks with
            the same GROUP_RANK, which torchrun sets, are on one node; without it, those of one host name.
        start_localSGD_iter: Steps with the mean of all ranks, before it becomes that of the subgroup.
        post_local_gradient_allreduce: Whether gradients are averaged at all afterwards; with False each rank
            keeps its own. Which converges faster differs from task to task.

    Example::

        state = PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=100)
        ddp.register_comm_hook(state, post_localSGD_hook)
    """

    __slots__ = [  # noqa: RUF023 - torch's order, and so that of a saved state
        "process_group",
        "subgroup",
        "start_localSGD_iter",
        "post_local_gradient_allreduce",
        "iter",
    ]

    def __init__(
        self,
        process_group: Any,
        subgroup: Any,
        start_localSGD_iter: int,  # noqa: N803 - torch's name
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        self.process_group = _checked("process_group", process_group, "the DDP model's own")
        self.subgroup = _checked("subgroup", subgroup, "the ranks on this node")
        why = "steps with the mean of all ranks; 0 has none"
        check_whole("start_localSGD_iter", start_localSGD_iter, 0, why)
        self.start_localSGD_iter = start_localSGD_iter
        if not isinstance(post_local_gradient_allreduce, bool):
            raise OptionError(
                f"post_local_gradient_allreduce={post_local_gradient_allreduce!r} must be True or False:"
                " whether gradients are averaged within the subgroup"
            )
        self.post_local_gradient_allreduce = post_local_gradient_allreduce
        self.iter = 0
        logger.info("Local SGD will start after %s steps.", self.start_localSGD_iter)

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the groups, which cannot be saved."""
        lost = [name for name in _GROUPS if getattr(self, name) is not None]
        if lost:
            logger.warning(
                "A saved PostLocalSGDState leaves out %s, since process groups cannot be saved: set it"
                " again after loading.",
                " and ".join(lost),
            )
        return {name: getattr(self, name) for name in self.__slots__ if name not in _GROUPS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """What was saved, over the default groups until others are set."""
        for name in _GROUPS:
            setattr(self, name, None)
        for name, value in state.items():
            setattr(self, name, value)

    def maybe_increase_iter(self, bucket: dist.GradBucket) -> None:
        """Count a step when its last bucket is handed over."""
        if bucket.is_last():
            self.iter += 1
            if self.iter == self.start_localSGD_iter:
                logger.info("Local SGD starts after %s steps.", self.iter)


def post_localSGD_hook(  # noqa: N802 - torch's name
    state: PostLocalSGDState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average gradients over all ranks at first, later within the subgroup only.

    From then on ranks drift apart unless parameters are averaged after optimizer steps: see
    `thinwire.model_averaging.averagers` and `thinwire.optim.PostLocalSGDOptimizer`.

    Example::

        state = PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=100)
        ddp.register_comm_hook(state, post_localSGD_hook)
        averager = PeriodicModelAverager(period=4, warmup_steps=100)
    """
    check_bucket(bucket)
    if state.iter < state.start_localSGD_iter:
        state.maybe_increase_iter(bucket)
        return run_program(Exact(), state.process_group, bucket)
    if not state.post_local_gradient_allreduce:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future
    if state.subgroup is not None:
        return run_program(Exact(), state.subgroup, bucket)
    bridge = bridge_of(Exact(), state.process_group, bucket)
    return bridge.run(Within(Exact(), _node_of(bridge)), bucket, Memory())


def _node_of(bridge: Bridge) -> tuple[int, ...]:
    """This node's ranks; the first call asks the others."""
    if bridge not in _nodes:
        _nodes[bridge] = ranks_on_this_node(bridge.communicator.meeting, bridge.communicator.limit)
    return _nodes[bridge]


def _checked(option: str, group: Any, default: str) -> Any:
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise OptionError(
            f"{option}={group!r} must be a process group that this rank is in, or None for {default}"
        )
    return group
