"""Workloads: the GPT of `thinwire bench`, a smaller one, and an MLP with little computation per byte."""

from dataclasses import replace
from functools import partial

import torch
from torch import nn

from thinwire.tools.bench.workloads import GPT, Workload
from thinwire.tools.bench.workloads import WORKLOADS as BUILT_IN


class MLP(nn.Module):
    """A model with few operations per parameter, in which communication dominates."""

    def __init__(self, width: int = 512, layers: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(module for _ in range(layers) for module in (nn.Linear(width, width), nn.Tanh()))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch."""
        result: torch.Tensor = self.layers(x).square().mean()
        return result


def _noise(rank: int, step: int) -> torch.Tensor:
    return torch.randn(64, 512, generator=torch.Generator().manual_seed(1_000_003 * step + rank))


WORKLOADS = {"gpt": BUILT_IN["gpt-6m"], "mlp": Workload(MLP, _noise)}


def small_gpt() -> Workload:
    """Return a GPT of a quarter of a million parameters, which trains thousands of steps on a desktop."""
    return replace(BUILT_IN["gpt-1m"], build=partial(GPT, 64, 4))
