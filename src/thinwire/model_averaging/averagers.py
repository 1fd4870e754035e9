"""Drop-in replacement for `torch.distributed.algorithms.model_averaging.averagers`.

An averager counts optimizer steps and averages a model's parameters over a process group when they are due.
The training loop calls `average_parameters` after every `optimizer.step()`, on every rank. Between two
averages each rank trains alone and sends nothing.

`PeriodicModelAverager` averages every `period` steps. For groups of different sizes and periods see
`thinwire.model_averaging.hierarchical_model_averager`. To derive your own, subclass `ModelAverager`.

For new code, `thinwire.attach(ddp, thinwire.LocalSGD(period=8), optimizer=optimizer)` needs no call in the
loop, can compress its exchanges, and resumes bit by bit.

Differences from torch:

- Parameters are averaged in place. torch re-binds `p.data`, which loses views and memory formats.
- Parameters without a gradient on some ranks are handled, because ranks first agree on which are averaged. In
    torch the process aborts.
- With nothing to average, nothing is sent. torch raises.

Performance:
    One average sends the parameters once: plain DDP's bytes of one step, every `period` steps. The copy
    that is sent takes as much memory as the parameters.

Safety:
    Results are bit-identical to torch's. Ranks must call the averager equally often. One that stops early
    makes the others wait for the time limit of the process group.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from thinwire.codecs.checks import check_whole
from thinwire.engine.comm.process_group import group_or_world
from thinwire.model_averaging.utils import average_parameters_or_parameter_groups

__all__ = ["ModelAverager", "PeriodicModelAverager"]

PERIOD = "steps from one averaging to the next; try 4"
WARM_UP = "steps before the first averaging; 0 begins at once"


class ModelAverager(ABC):
    """Base class of averagers: a process group and a step count. A subclass decides when to average.

    Args:
        process_group: Group to average over. None is the whole world.

    Example::

        class Once(ModelAverager):
            def average_parameters(self, params):
                if self.step == 0:
                    average_parameters_or_parameter_groups(params, self.process_group)
                self.step += 1
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.process_group = group_or_world(process_group)
        self.step = 0

    @abstractmethod
    def average_parameters(self, params: Any) -> None:
        """Average parameters if they are due, and count the step.

        The training loop calls this after each optimizer step, on every rank.

        Args:
            params: A model's parameters or an optimizer's `param_groups`, all of them on every rank.
        """
        raise NotImplementedError


class PeriodicModelAverager(ModelAverager):
    """An averager that averages parameters every `period` steps, counted from the end of the warm-up.

    Between two averages replicas diverge, so a longer period sends less and converges less well. With
    `post_localSGD_hook` this is post-local SGD (https://arxiv.org/abs/1808.07217). Set `warmup_steps` to the
    hook's `start_localSGD_iter` then.

    Args:
        period: Steps from one average to the next. 1 warns, because DDP alone does the same for the same
            bytes.
        warmup_steps: Steps before the first average.
        process_group: Group to average over. None is the whole world.

    Raises:
        OptionError: If `period` is below 1 or `warmup_steps` is negative.

    Example::

        averager = PeriodicModelAverager(period=4, warmup_steps=100)
        for batch in batches:
            optimizer.zero_grad()
            model(batch).backward()
            optimizer.step()
            averager.average_parameters(model.parameters())
    """

    def __init__(
        self, period: int, warmup_steps: int = 0, process_group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(process_group)
        check_whole("warmup_steps", warmup_steps, 0, WARM_UP)
        check_whole("period", period, 1, PERIOD)
        self.warmup_steps = warmup_steps
        self.period = period
        if period == 1:
            warnings.warn(
                "period=1 averages parameters after every step, which sends no less than averaging gradients"
                " does: use DistributedDataParallel alone, or a longer period",
                stacklevel=2,
            )

    def average_parameters(
        self, params: Iterable[torch.nn.Parameter] | Iterable[dict[str, torch.nn.Parameter]]
    ) -> None:
        """Average parameters if a whole number of periods has passed since the warm-up, then count the step.

        Args:
            params: A model's parameters or an optimizer's `param_groups`, all of them on every rank.
        """
        past = self.step - self.warmup_steps
        if past >= 0 and past % self.period == 0:
            average_parameters_or_parameter_groups(params, self.process_group)
        self.step += 1
