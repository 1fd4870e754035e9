"""Drop-in replacement for `torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook`.

Post-local SGD (https://arxiv.org/abs/1808.07217) averages gradients over all ranks for the first
`start_localSGD_iter` steps. After that it averages them within a node only, where the network is fast, or not
at all. From then on the nodes must be synchronised by an averager of `thinwire.model_averaging.averagers`, or
by `thinwire.optim.PostLocalSGDOptimizer`, which calls one after every step.

For new code, `thinwire.attach(ddp, thinwire.LocalSGD(period=8), optimizer=optimizer)` does both in one line,
with codecs, byte counts and resuming. `thinwire.Hierarchical` averages often within nodes and rarely among
all ranks.

Differences from torch:

- `subgroup=None` works without CUDA and with nodes of different sizes. torch asks CUDA for the size of a
  node.
- `process_group=None` means the DDP model's own process group. torch takes the whole world.
- A state can be pickled, without its groups, and `torch.load` accepts it by default. torch's cannot be
  pickled while it has groups.

Performance:
    Before `start_localSGD_iter` a step sends as much as plain DDP. After it a step sends nothing between
    nodes. The averager adds one exchange of all parameters per period, so the mean is 1 / period of plain
    DDP's bytes.

Safety:
    Replicas of different nodes diverge by design between two averages. Choose `warmup_steps` of the averager
    equal to `start_localSGD_iter`, so that every step is covered by one of the two averages.
"""

# DDP inspects a hook's annotations and rejects strings: no `from __future__ import annotations` here.

import logging
import weakref
from typing import Any

import torch
import torch.distributed as dist

from thinwire.codecs.checks import check_whole
from thinwire.ddp_comm_hooks._hook import for_ddp, run_of, run_program
from thinwire.errors import OptionError
from thinwire.models.ddp.model import check_bucket, thinwire_hook
from thinwire.programs.across_nodes import Within
from thinwire.programs.allreduce import Exact
from thinwire.programs.memory import Memory
from thinwire.programs.program import Programs
from thinwire.step.runner import AttachedRun, Choice
from thinwire.strategies.averaging.groups import ranks_on_this_node

logger = logging.getLogger(__name__)

_GROUPS = ("process_group", "subgroup")
_nodes: "weakref.WeakKeyDictionary[AttachedRun, tuple[int, ...]]" = weakref.WeakKeyDictionary()


class PostLocalSGDState:
    """Options and step count of `post_localSGD_hook`.

    Args:
        process_group: Group that averages gradients at first. None is the DDP model's own.
        subgroup: Group that averages them later. None is this node's ranks of `process_group`. These have the
            same GROUP_RANK, which torchrun sets, or else the same host name.
        start_localSGD_iter: Steps with the mean of all ranks, before the mean of the subgroup replaces it.
        post_local_gradient_allreduce: True averages gradients within the subgroup afterwards. False keeps
            gradients local. Which of the two converges faster depends on the task.

    Raises:
        OptionError: If an option has the wrong type or `start_localSGD_iter` is negative.

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
        """Return all attributes except the groups, which cannot be saved."""
        lost = [name for name in _GROUPS if getattr(self, name) is not None]
        if lost:
            logger.warning(
                "A saved PostLocalSGDState leaves out %s, since process groups cannot be saved: set it"
                " again after loading.",
                " and ".join(lost),
            )
        return {name: getattr(self, name) for name in self.__slots__ if name not in _GROUPS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a saved state, with the default groups until others are set."""
        for name in _GROUPS:
            setattr(self, name, None)
        for name, value in state.items():
            setattr(self, name, value)

    def maybe_increase_iter(self, bucket: dist.GradBucket) -> None:
        """Count a step when its last bucket arrives."""
        if bucket.is_last():
            self.iter += 1
            if self.iter == self.start_localSGD_iter:
                logger.info("Local SGD starts after %s steps.", self.iter)


torch.serialization.add_safe_globals([PostLocalSGDState])  # so that torch.load accepts one by default


@for_ddp
def post_localSGD_hook(  # noqa: N802 - torch's name
    state: PostLocalSGDState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average gradients over all ranks at first, later within the subgroup only.

    From then on replicas diverge unless parameters are averaged after optimizer steps. See
    `thinwire.model_averaging.averagers` and `thinwire.optim.PostLocalSGDOptimizer`.

    Args:
        state: Options and step count.
        bucket: Gradients, passed by DDP.

    Returns:
        A future of the averaged gradients.

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
    run = run_of(Exact(), state.process_group, bucket)
    return thinwire_hook(run, bucket, Choice(Programs(Within(Exact(), _node_of(run))), Memory()))


def _node_of(run: AttachedRun) -> tuple[int, ...]:
    """Return this node's ranks. The first call is collective."""
    if run not in _nodes:
        _nodes[run] = ranks_on_this_node(run.communicator.rendezvous, run.communicator.limit)
    return _nodes[run]


def _checked(option: str, group: Any, default: str) -> Any:
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise OptionError(
            f"{option}={group!r} must be a process group that this rank is in, or None for {default}"
        )
    return group
