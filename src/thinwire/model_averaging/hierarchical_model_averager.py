"""Drop-in replacement for `torch.distributed.algorithms.model_averaging.hierarchical_model_averager`.

Ranks that are close to each other average often, and all ranks rarely (https://arxiv.org/abs/2010.12998).
With `OrderedDict([(4, 8), (16, 16)])` every 8 consecutive ranks average each 4 steps, and all 16 each 16
steps. Put the ranks of a node next to each other, as torchrun does, and the slow network carries only the
longest period.

For new code, `thinwire.attach(ddp, thinwire.Hierarchical({4: "node", 16: None}), optimizer=optimizer)` finds
the nodes itself and can compress the traffic between them.

Differences from torch:

- Groups of consecutive ranks are built on any backend, and within a process group that is not the world.
- A hierarchy whose periods or sizes decrease raises. torch accepts it and never runs part of it.
- Ranks that give different hierarchies raise `MismatchError` on all of them.
- Parameters are averaged in place, and may be unused on some ranks.

Performance:
    Each average sends the parameters once, within its group. On the slow links between groups that is 1 /
    period of plain DDP's bytes, with the period of the last level.

Safety:
    The constructor is collective. It compares the hierarchy across ranks, then builds process groups. A
    time-out names the rank that did not call it.
"""

import logging
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist

from thinwire.codecs.checks import check_whole
from thinwire.engine.comm.agreement import agree_on
from thinwire.engine.comm.group_communicator import GroupCommunicator
from thinwire.engine.comm.process_group import outside
from thinwire.errors import OptionError
from thinwire.model_averaging.averagers import PERIOD, WARM_UP, ModelAverager
from thinwire.model_averaging.utils import average_parameters_or_parameter_groups

logger = logging.getLogger(__name__)


class HierarchicalModelAverager(ModelAverager):
    """An averager with short periods for few ranks and long ones for many (https://arxiv.org/abs/2010.12998).

    At a step that several periods divide, the longest of them applies. Steps are counted from step 0, not
    from the end of the warm-up. The constructor is collective over `process_group`.

    Args:
        period_group_size_dict: Maps each period, in steps, to the number of consecutive ranks that average
            together. Periods must increase from entry to entry and sizes must not decrease. Each size must
            divide the last one, which is the size of `process_group`. (torch accepts a decreasing hierarchy
            and never runs part of it.)
        warmup_steps: Steps before the first average.
        process_group: All ranks that take part. None is the whole world.

    Raises:
        OptionError: If the periods and sizes are no hierarchy of the group's ranks.
        MismatchError: If ranks give different hierarchies.

    Example::

        levels = OrderedDict([(4, 8), (16, 16)])  # 8 ranks every 4 steps, all 16 every 16 steps
        averager = HierarchicalModelAverager(period_group_size_dict=levels, warmup_steps=100)
        for batch in batches:
            optimizer.zero_grad()
            model(batch).backward()
            optimizer.step()
            averager.average_parameters(model.parameters())
    """

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int] | None = None,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(process_group)
        if outside(self.process_group):
            raise OptionError(
                f"process_group={self.process_group!r} is one that this rank is not in: only its ranks can"
                " make the averager"
            )
        levels = _checked(period_group_size_dict, self.process_group.size())
        check_whole("warmup_steps", warmup_steps, 0, WARM_UP)
        self.warmup_steps = warmup_steps
        self._periods = list(levels)
        if self._periods[-1] == 1:
            warnings.warn(
                "period_group_size_dict has no period but 1, so parameters are averaged after every step,"
                " which sends no less than averaging gradients does: use DistributedDataParallel alone, or"
                " longer periods",
                stacklevel=2,
            )
        self.period_process_group_dict = _groups(levels, self.process_group)

    def _find_process_group(self) -> dist.ProcessGroup | None:
        """Return the group that averages at this step, or None."""
        due = [period for period in self._periods if self.step % period == 0]
        return self.period_process_group_dict[due[-1]] if due else None

    def average_parameters(
        self, params: Iterable[torch.nn.Parameter] | Iterable[dict[str, torch.nn.Parameter]]
    ) -> None:
        """Average parameters if the warm-up is over and a period divides the step count, then count the step.

        Args:
            params: A model's parameters or an optimizer's `param_groups`, all of them on every rank.
        """
        group = self._find_process_group() if self.step >= self.warmup_steps else None
        if group is not None:
            average_parameters_or_parameter_groups(params, group)
        self.step += 1


def _checked(given: Mapping[int, int] | None, ranks: int) -> dict[int, int]:
    """Return group sizes by period. Raise OptionError if they are no hierarchy of `ranks` ranks."""
    name = "period_group_size_dict"
    if not given or not isinstance(given, Mapping):
        raise OptionError(
            f"{name}={given!r} must map periods to group sizes: the last size is that of the whole group,"
            f" as in {{4: {ranks}}}"
        )
    levels = dict(given)
    for period, size in levels.items():
        check_whole(f"a period of {name}", period, 1, PERIOD)
        check_whole(f"a size of {name}", size, 1, "how many ranks average together")
    periods, sizes = list(levels), list(levels.values())
    if sizes[-1] != ranks:
        raise OptionError(
            f"{name}={levels} ends in groups of {sizes[-1]}, but process_group has {ranks} ranks: the"
            " last level must average over all of them"
        )
    misfit = [size for size in sizes if ranks % size]
    if misfit:
        raise OptionError(
            f"{name}={levels} has groups of {misfit[0]}, which do not divide the {ranks} ranks: choose"
            " divisors"
        )
    if periods != sorted(periods) or sizes != sorted(sizes):
        raise OptionError(
            f"{name}={levels} must rise in periods, and its sizes must not fall: larger groups average less"
            " often; pass short periods first, as in an OrderedDict"
        )
    return levels


def _groups(levels: dict[int, int], whole: dist.ProcessGroup) -> "OrderedDict[int, dist.ProcessGroup]":
    """Return this rank's group of consecutive ranks on each level. The last is the whole group."""
    communicator = GroupCommunicator(whole)
    if len(levels) > 1:
        set_up = {f"ranks that average every {period} steps": str(size) for period, size in levels.items()}
        agree_on(set_up, communicator.rendezvous, communicator.limit, topic="hierarchy")
    groups: OrderedDict[int, dist.ProcessGroup] = OrderedDict()
    for period, size in levels.items():
        logger.info("Every %s steps %s ranks average parameters, unless more do at that step.", period, size)
        first = communicator.rank - communicator.rank % size
        if size == communicator.size:
            groups[period] = whole
        elif whole is dist.group.WORLD:  # as torch makes them, so that dist.get_pg_count() is the same
            groups[period], _ = dist.new_subgroups(size, timeout=communicator.limit)
        else:  # torch.distributed would need all ranks of the world here
            groups[period] = communicator.subgroup(range(first, first + size))
    return groups
