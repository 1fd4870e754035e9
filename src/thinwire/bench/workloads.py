"""What a benchmark trains: a small GPT on Python's own source text, a conv net, or the user's model."""

import importlib
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from thinwire.errors import OptionError

Batch = Callable[[int, int], Any]
"""The batch of a rank and a step: the same each time it is asked for."""


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


@dataclass(frozen=True)
class Workload:
    """A model whose forward takes a batch and returns the loss, and its data.

    Attributes:
        build: Makes the model; it is seeded, so that every rank has the same.
        batch: What a rank trains on in a step.
        held_out: Batches that are never trained on. None: `batch` of later steps.
        optimizer: Made anew for every contestant.
    """

    build: Callable[[], nn.Module]
    batch: Batch
    held_out: Batch | None = None
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = _adamw

    def model(self) -> nn.Module:
        """The same model on every rank, each time."""
        torch.manual_seed(0)
        return self.build()


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
        places = torch.arange(tokens.shape[1] - 1, device=tokens.device)
        logits = self.head(self.norm(self.blocks(self.token(tokens[:, :-1]) + self.place(places))))
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class ConvNet(nn.Module):
    """A small image classifier; GroupNorm, because BatchNorm's buffers would travel as well."""

    def __init__(self, width: int = 32, classes: int = 10) -> None:
        super().__init__()
        sizes = (3, width, 2 * width, 4 * width, 8 * width)
        stages = [
            nn.Sequential(nn.Conv2d(small, large, 3, 2, 1), nn.GroupNorm(8, large), nn.ReLU())
            for small, large in pairwise(sizes)
        ]
        self.stages, self.head = nn.Sequential(*stages), nn.Linear(8 * width, classes)

    def forward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """The loss of naming each image's class."""
        images, classes = batch
        return functional.cross_entropy(self.head(self.stages(images).mean((2, 3))), classes)


def _seeded(rank: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1_000_003 * step + rank)


@cache
def source_text() -> torch.Tensor:
    """The source of the standard library's top-level modules, as bytes: about 7 MB."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def _windows(begin: float, end: float, rank: int, step: int) -> torch.Tensor:
    """Eight windows of text from between two fractions of it."""
    text = source_text()
    low, high = int(begin * len(text)), int(end * len(text)) - 65
    starts = torch.randint(low, high, (8, 1), generator=_seeded(rank, step))
    return text[starts + torch.arange(65)].long()


def _images(noise_seed: int, rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ten patterns under heavy noise."""
    patterns = torch.randn(10, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    generator = _seeded(rank, step + noise_seed)
    classes = torch.randint(0, 10, (32,), generator=generator)
    return patterns[classes] + 4 * torch.randn(32, 3, 32, 32, generator=generator), classes


WORKLOADS = {
    "gpt-1m": Workload(partial(GPT, 128, 6), partial(_windows, 0, 0.95), partial(_windows, 0.95, 1)),
    "gpt-6m": Workload(GPT, partial(_windows, 0, 0.95), partial(_windows, 0.95, 1)),
    "conv": Workload(ConvNet, partial(_images, 0), partial(_images, 1_000_000)),
}


def find_workload(name: str) -> Workload:
    """A built-in workload, or `package.module:build` of the user's.

    `build()` returns a `Workload`, or a model and a batch function: `model(batch(rank, step))` is the loss.
    """
    if ":" not in name:
        if name not in WORKLOADS:
            raise OptionError(
                f"workload={name!r} is not one of {', '.join(WORKLOADS)}: or give --model module:build"
            )
        return WORKLOADS[name]
    build = find_object(name, "model")
    made = call_users(build, f"model={name!r}")
    if isinstance(made, Workload):
        return made
    if not (
        isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1])
    ):
        raise OptionError(
            f"model={name!r} returned a {type(made).__name__}: it must return (model, batch) where"
            " model(batch(rank, step)) is the loss, or a thinwire.bench.workloads.Workload"
        )
    return Workload(lambda: build()[0], made[1])


def find_object(name: str, option: str) -> Any:
    """What `package.module:attribute` names; modules beside the user are found too."""
    module_name, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module = call_users(partial(importlib.import_module, module_name), f"{option}={name!r}")
    if not hasattr(module, attribute):
        raise OptionError(f"{option}={name!r}: the module has no {attribute!r}; write package.module:name")
    return getattr(module, attribute)


def call_users(function: Callable[[], Any], what: str) -> Any:
    """Run a user's code: what it prints is no data of ours, and what it raises becomes one line."""
    try:
        with redirect_stdout(sys.stderr):
            return function()
    except OptionError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise OptionError(f"{what} does not work ({reason}): try it in Python first") from error
