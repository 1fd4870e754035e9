"""The small model that episodes train, and its data."""

import time
from collections.abc import Callable
from random import Random

import torch
from torch import nn

WIDTH, HIDDEN = 12, 28


class Model(nn.Module):
    """A few thousand parameters in several buckets; one layer is left out when asked.

    `trap` is called in the middle of backward; `sleeper` decides where backward takes its time.
    """

    def __init__(self, *, normed: bool, sleepiness: float, sleeper: Random) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, HIDDEN)
        self.norm = nn.BatchNorm1d(HIDDEN) if normed else nn.Identity()
        self.sometimes = nn.Linear(HIDDEN, HIDDEN)
        self.middle = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.last = nn.Linear(HIDDEN, 4)
        self.trap: Callable[[], None] | None = None
        self._sleepiness, self._sleeper = sleepiness, sleeper

    def forward(self, x: torch.Tensor, use_all: bool) -> torch.Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        if use_all:
            x = x + torch.tanh(self.sometimes(x))
        for number, layer in enumerate(self.middle):
            x = torch.tanh(layer(x))
            if x.requires_grad:
                x.register_hook(self._sleep if number != 1 else self._spring)
        result: torch.Tensor = self.last(x)
        return result

    def _sleep(self, gradient: torch.Tensor) -> None:
        if self._sleeper.random() < self._sleepiness:
            time.sleep(self._sleeper.random() * 0.02)

    def _spring(self, gradient: torch.Tensor) -> None:
        self._sleep(gradient)
        if self.trap is not None:
            self.trap()


def data(rank: int, step: int, part: int) -> torch.Tensor:
    """Different on every rank, step and micro-batch, the same in every run."""
    seed = 1_000_000 + 1000 * step + 10 * rank + part
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))


def uses_all(rank: int, step: int, part: int) -> bool:
    """Whether a micro-batch runs the layer that is sometimes left out; now and then no rank does."""
    return Random(f"{rank if step % 3 else 0} {step} {part}").random() < 0.5


def flat(model: nn.Module) -> torch.Tensor:
    """All parameters, as a copy."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
