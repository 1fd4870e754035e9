"""What the benchmarks train: a small GPT and a plain MLP, on data made from a seed."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """One transformer layer, norm first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend, then think."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = qkv
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        thought: torch.Tensor = self.down(functional.gelu(self.up(self.norm_2(x))))
        return x + thought


class GPT(nn.Module):
    """A language model over bytes."""

    def __init__(self, width: int = 256, layers: int = 8, heads: int = 4, length: int = 64) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss of predicting each next byte."""
        places = torch.arange(tokens.shape[1] - 1)
        logits = self.head(self.norm(self.blocks(self.token(tokens[:, :-1]) + self.place(places))))
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class MLP(nn.Module):
    """Few operations for each parameter, so that communication weighs heavily."""

    def __init__(self, width: int = 512, layers: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(module for _ in range(layers) for module in (nn.Linear(width, width), nn.Tanh()))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss to minimise."""
        result: torch.Tensor = self.layers(x).square().mean()
        return result


@dataclass(frozen=True)
class Workload:
    """A model whose forward returns its loss, and a batch for each rank and step."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, int], torch.Tensor]

    def model(self) -> nn.Module:
        """The same model on every rank."""
        torch.manual_seed(0)
        return self.build()


def _seeded(rank: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1_000_003 * step + rank)


def _text(rank: int, step: int) -> torch.Tensor:
    """Sequences that count up by a random stride: something a language model can learn quickly."""
    generator = _seeded(rank, step)
    start, stride = torch.randint(0, 256, (2, 8, 1), generator=generator)
    text: torch.Tensor = (start + stride % 7 * torch.arange(65)) % 256
    return text


WORKLOADS = {
    "gpt": Workload(GPT, _text),
    "mlp": Workload(MLP, lambda rank, step: torch.randn(64, 512, generator=_seeded(rank, step))),
}
