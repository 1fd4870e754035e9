"""Hierarchical averaging, often among neighbours and rarely among all ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from thinwire.codecs.checks import check_whole, is_whole
from thinwire.errors import OptionError
from thinwire.strategies.averaging.groups import Groups, check_groups
from thinwire.strategies.averaging.policy import Average, Averaging, check_size


@dataclass(frozen=True, repr=False)
class Hierarchical(Averaging):
    """Local training, with models averaged in groups that widen as periods grow.

    After a step that several periods divide, only the widest of their groups averages.

    Args:
        levels: Groups by period, both in rising order. `{4: 2, 16: 8}` averages two neighbours every 4 steps
            and eight every 16. If a size does not divide the number of ranks, the last group is smaller. A
            group can also be `"node"`, lists of ranks, or this rank's process group, as in `within`. The last
            level must be all ranks, given as their number or as None.
        warmup_steps: Steps at the start in which all gradients are exchanged. This option and those below are
            common to all averaged models, and described in `Averaging`.
        within: Ranks whose gradients are averaged in every step after the warm-up.
        gradients: The program for gradients in steps that exchange them.
        buffers: How buffers are treated when models are averaged: `"mean"`, `"rank0"` or `"local"`.
        optimizer_state: How the optimizer's state is treated then: `"local"`, `"mean"` or `"reset"`.

    Raises:
        OptionError: An option has a wrong type or value, or levels do not rise.

    Lin et al., as for `LocalSGD`; Castiglia, Das, Patterson: Multi-Level Local SGD,
    https://arxiv.org/abs/2007.13819.

    Example::

        levels = {4: "node", 32: None}
        wire = thinwire.attach(ddp, thinwire.Hierarchical(levels), optimizer=optimizer)
    """

    levels: Mapping[int, Groups]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.levels, Mapping) or not self.levels:
            raise OptionError(
                f"levels={self.levels!r} must map periods to groups, at least one: as in {{4: 2, 16: None}}"
            )
        for period in self.levels:
            check_whole("period", period, 1, f"steps from one average to the next, in levels={self.levels!r}")
        checked = {
            period: check_groups(f"levels[{period}]", groups) for period, groups in self.levels.items()
        }
        sizes = [groups for groups in checked.values() if is_whole(groups)]
        for one, other in [*pairwise(checked), *pairwise(sizes)]:
            if other <= one:
                raise OptionError(
                    f"levels={self.levels!r}: {other} after {one} does not rise; list wider groups later,"
                    " with longer periods"
                )
        if None in list(checked.values())[:-1]:
            raise OptionError(f"levels={self.levels!r}: None, all ranks, can only be the last level")
        object.__setattr__(self, "levels", checked)

    def check(self, shapes: Mapping[str, torch.Size], world_size: int) -> None:
        """Raise OptionError if a level has too many ranks, or the last level does not have all ranks."""
        super().check(shapes, world_size)
        for period, groups in self.levels.items():
            check_size(f"levels[{period}]", groups, world_size)
        last = list(self.levels.values())[-1]
        if last is not None and last != world_size:
            raise OptionError(
                f"the last level of {self.levels!r} is {last!r}: it must be all {world_size} ranks, or groups"
                " would never be averaged with each other; pass None"
            )

    def groups(self) -> Sequence[Groups]:
        """Return the groups of all levels except the last, which is all ranks."""
        return list(self.levels.values())[:-1]

    def due(self, step: int) -> Sequence[Average]:
        """Return the average due after a step, of the whole model among the widest group that is due."""
        periods = list(self.levels)
        for period in reversed(periods):
            if step % period == 0:
                return [Average(among=None if period == periods[-1] else self.levels[period])]
        return []
