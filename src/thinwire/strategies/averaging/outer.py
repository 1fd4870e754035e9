"""The default outer optimizer of averaged models, and the rule that sets its options."""

import math
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch

Tuning: TypeAlias = Callable[[int], dict[str, float]]
"""A function from the number of ranks to options of the outer optimizer's parameter groups."""

_RATE = 0.8
NESTEROV = partial(torch.optim.SGD, lr=_RATE, momentum=0.5, nesterov=True)
"""The outer optimizer for up to four ranks. `tuned_for` sets its options for any number."""


def tuned_for(world_size: int) -> dict[str, float]:
    """Return the outer optimizer's learning rate and momentum for a number of ranks.

    Adam divides a gradient by its root mean square. A rank's own gradient is noisier than the mean over W
    ranks, by a factor of up to sqrt(W), so that each local step moves the model by that much less than a step
    of DDP. An outer optimizer with lr / (1 - momentum) of about sqrt(W) compensates for this. For two and
    four ranks 1.6 was good at low and at tuned learning rates (docs/design/decisions.md).

    >>> tuned_for(2), tuned_for(16)
    ({'lr': 0.8, 'momentum': 0.5}, {'lr': 0.8, 'momentum': 0.75})
    """
    return {"lr": _RATE, "momentum": 1 - 1 / max(2.0, math.sqrt(world_size))}
