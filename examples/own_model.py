"""Your own model in the benchmark: `thinwire bench --model examples.own_model:build --links 100mbit`."""

from collections.abc import Callable

import torch
from torch import nn


class Denoiser(nn.Module):
    """A network whose forward takes a batch and returns the loss, as the benchmark expects."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return the mean squared error of the denoised rows."""
        clean, noisy = batch
        return nn.functional.mse_loss(self.layers(noisy), clean)


def build() -> tuple[nn.Module, Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]]:
    """Return the model and a function that makes the batch of a rank and a step, the same each time."""

    def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        clean = torch.randn(16, 1, generator=generator).cumsum(0).expand(16, 128)
        return clean, clean + torch.randn(16, 128, generator=generator)

    return Denoiser(), batch
