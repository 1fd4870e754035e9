"""The names of `torch.distributed.algorithms.model_averaging.averagers`."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from thinwire.averaging.policy import check_whole
from thinwire.model_averaging._groups import group_or_world
from thinwire.model_averaging.utils import average_parameters_or_parameter_groups

__all__ = ["ModelAverager", "PeriodicModelAverager"]

PERIOD = "steps from one averaging to the next; try 4"
WARM_UP = "steps before the first averaging; 0 begins at once"


class ModelAverager(ABC):
    """What all averagers have: a group and a count of steps; a subclass decides when to average.

    Args:
        process_group: Over which to average; None: the whole world.

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
        """Called after each optimizer step, on every rank: average if it is time, and count the step."""
        raise NotImplementedError


class PeriodicModelAverager(ModelAverager):
    """Averages parameters every `period` steps, counted from the end of the warm-up.

    Between two averagings ranks drift apart, so a longer period sends less and converges less well. With
    `post_localSGD_hook` it makes post-local SGD (https://arxiv.org/abs/1808.07217): let `warmup_steps` be
    the hook's `start_localSGD_iter`.

    Args:
        period: Steps from one averaging to the next. 1 warns: DDP alone does the same for the same bytes.
        warmup_steps: Steps before the first averaging.
        process_group: Over which to average; None: the whole world.

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
        """Count a step; average before that, if the warm-up is over and a whole number of periods past it.

        Args:
            params: A model's parameters, or an optimizer's `param_groups`: all of them, on every rank.
        """
        past = self.step - self.warmup_steps
        if past >= 0 and past % self.period == 0:
            average_parameters_or_parameter_groups(params, self.process_group)
        self.step += 1
