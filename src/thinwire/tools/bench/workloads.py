"""The workloads of a benchmark: a small GPT on Python's own source text, a conv net, or the user's model.

`sleep-1m` has the gradients of the small GPT without its computing, for what a machine with spare cores sees.
"""

import importlib
import os
import signal
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from thinwire.errors import OptionError

_ENDED_BY_SIGNAL = {128 + number for number in (signal.SIGTERM, signal.SIGHUP)}
"""Exit codes of the command line after a signal. Any other exit is one of the user's code."""

Batch = Callable[[int, int], Any]
"""A function from a rank and a step to a batch. Equal arguments must return equal batches."""


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


@dataclass(frozen=True)
class Workload:
    """A model whose forward takes a batch and returns the loss, and its data.

    Attributes:
        build: Makes the model. It is called with a fixed seed, so that all ranks get the same model.
        batch: Returns the batch of a rank in a step.
        held_out: Returns batches that are not trained on. None to use `batch` of later steps.
        optimizer: Makes an optimizer for each contestant.
        seed: The seed with which the model is made.
    """

    build: Callable[[], nn.Module]
    batch: Batch
    held_out: Batch | None = None
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = _adamw
    seed: int = 0

    def model(self) -> nn.Module:
        """Make the model with a fixed seed, equal on every rank and in every call."""
        torch.manual_seed(self.seed)
        return self.build()

    def with_seed(self, seed: int, steps: int) -> "Workload":
        """Return the workload with another model and other batches.

        Args:
            seed: The seed. 0 changes nothing.
            steps: The number of steps of a run, so that no two seeds share a batch.
        """
        return replace(self, seed=seed, batch=lambda rank, step: self.batch(rank, step + seed * steps))


class Block(nn.Module):
    """One transformer layer, norm first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply attention, then the feed-forward layer."""
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
        """Return the loss of predicting each next byte."""
        places = torch.arange(tokens.shape[1] - 1, device=tokens.device)
        logits = self.head(self.norm(self.blocks(self.token(tokens[:, :-1]) + self.place(places))))
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class ConvNet(nn.Module):
    """A small image classifier. It uses GroupNorm, because DDP would also send BatchNorm's buffers."""

    def __init__(self, width: int = 32, classes: int = 10) -> None:
        super().__init__()
        sizes = (3, width, 2 * width, 4 * width, 8 * width)
        stages = [
            nn.Sequential(nn.Conv2d(small, large, 3, 2, 1), nn.GroupNorm(8, large), nn.ReLU())
            for small, large in pairwise(sizes)
        ]
        self.stages, self.head = nn.Sequential(*stages), nn.Linear(8 * width, classes)

    def forward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return the loss of predicting each image's class."""
        images, classes = batch
        return functional.cross_entropy(self.head(self.stages(images).mean((2, 3))), classes)


class _Pause(torch.autograd.Function):
    """Sleeps in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        """Return the number unchanged."""
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Sleep, then return the gradient unchanged."""
        time.sleep(ctx.seconds)
        return gradients[0], None


class Sleeper(nn.Module):
    """The parameters of a GPT, whose gradients take their time but no processor.

    So cores are free, as on a machine with more cores than ranks, or where a GPU computes. Backward computes
    the gradient of a least-squares loss for each parameter, and sleeps before those of the next layer.

    Args:
        forward_seconds: The time of forward.
        backward_seconds: The time of backward.
    """

    def __init__(self, forward_seconds: float = 0.025, backward_seconds: float = 0.045) -> None:
        super().__init__()
        gpt = GPT(128, 6)
        self.stages = nn.ModuleList([gpt.token, gpt.place, *gpt.blocks, gpt.norm, gpt.head])
        self.forward_seconds, self.backward_seconds = forward_seconds, backward_seconds

    def forward(self, target: torch.Tensor) -> torch.Tensor:
        """Return the mean squared distance of all parameters from a number."""
        time.sleep(self.forward_seconds)
        total = target.new_zeros((), requires_grad=True)
        for stage in self.stages:
            seconds = self.backward_seconds / len(self.stages)
            total = _Pause.apply(total, seconds)  # type: ignore[no-untyped-call]
            for parameter in stage.parameters():
                total = total + (parameter - target).square().mean()
        return total


def _targets(rank: int, step: int) -> torch.Tensor:
    """Return the number that the parameters of `Sleeper` shall have, with noise of this rank and step."""
    return 0.5 + 0.1 * torch.randn((), generator=_seeded(rank, step))


def _seeded(rank: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1_000_003 * step + rank)


@cache
def source_text() -> torch.Tensor:
    """Return the source of the standard library's top-level modules as bytes, about 7 MB."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def _windows(begin: float, end: float, rank: int, step: int) -> torch.Tensor:
    """Return eight random windows of the text between two fractions of its length."""
    text = source_text()
    low, high = int(begin * len(text)), int(end * len(text)) - 65
    starts = torch.randint(low, high, (8, 1), generator=_seeded(rank, step))
    return text[starts + torch.arange(65)].long()


def _images(noise_seed: int, rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 32 images, each one of ten patterns with heavy noise, and their classes."""
    patterns = torch.randn(10, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    generator = _seeded(rank, step + noise_seed)
    classes = torch.randint(0, 10, (32,), generator=generator)
    return patterns[classes] + 4 * torch.randn(32, 3, 32, 32, generator=generator), classes


WORKLOADS = {
    "gpt-1m": Workload(partial(GPT, 128, 6), partial(_windows, 0, 0.95), partial(_windows, 0.95, 1)),
    "gpt-6m": Workload(GPT, partial(_windows, 0, 0.95), partial(_windows, 0.95, 1)),
    "sleep-1m": Workload(Sleeper, _targets),
    "conv": Workload(ConvNet, partial(_images, 0), partial(_images, 1_000_000)),
}


def find_workload(name: str) -> Workload:
    """Return a built-in workload, or the one that the user's function makes.

    Args:
        name: A key of `WORKLOADS`, or `package.module:build`. `build()` must return a `Workload`, or a model
            and a batch function, such that `model(batch(rank, step))` is the loss.

    Raises:
        OptionError: There is no such workload, or `build()` fails or returns something else.
    """
    if ":" not in name:
        if "." in name:
            module = name.removesuffix(".py")
            raise OptionError(f"model={name!r} names no function: write package.module:build, {module}:build")
        if name not in WORKLOADS:
            raise OptionError(
                f"workload={name!r} is not one of {', '.join(WORKLOADS)}: choose one of these, or pass"
                " --model module:build"
            )
        return WORKLOADS[name]
    build = find_object(name, "model")
    if isinstance(build, type):
        raise OptionError(
            f"model={name!r} is a class: pass a function that returns (model, batch), such as"
            f" `def build(): return {build.__name__}(), batch`"
        )
    made = call_users(build, f"model={name!r}")
    if isinstance(made, Workload):
        return made
    if not (
        isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1])
    ):
        raise OptionError(
            f"model={name!r} returned a {type(made).__name__}: it must return (model, batch) where"
            " model(batch(rank, step)) is the loss, or a thinwire.tools.bench.workloads.Workload"
        )
    return Workload(lambda: build()[0], made[1])


def check_workload(name: str) -> None:
    """Try one step of the user's model, before networks and processes are made for it.

    Args:
        name: As for `find_workload`. Built-in workloads are not tried.

    Raises:
        OptionError: `model(batch(0, 0))` fails, or is not a loss that backward can start from.
    """
    workload = find_workload(name)
    if ":" not in name:
        return
    with _one_rank():
        model = call_users(workload.model, f"model={name!r}")
        batch = call_users(
            lambda: workload.batch(0, 0), f"model={name!r}: batch(0, 0)", "batch takes a rank and a step"
        )
        loss = call_users(
            lambda: model(batch), f"model={name!r}: model(batch(0, 0))", "forward takes one batch"
        )
    wanted = "forward must take a batch and return its loss, a tensor with one number"
    if not isinstance(loss, torch.Tensor):
        raise OptionError(f"model={name!r}: model(batch(0, 0)) is a {type(loss).__name__}: {wanted}")
    if loss.dim() != 0:
        raise OptionError(
            f"model={name!r}: model(batch(0, 0)) has the shape {tuple(loss.shape)}, as logits have: {wanted}"
        )
    if not loss.requires_grad:
        raise OptionError(
            f"model={name!r}: the loss does not depend on a parameter that requires a gradient: train some"
        )


@contextmanager
def _one_rank() -> Iterator[None]:
    """Open a process group of this process alone, because models may use collectives."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def find_object(name: str, option: str) -> Any:
    """Return the object named by `package.module:attribute`. The working directory is searched too.

    Args:
        name: The module and its attribute.
        option: The name of the option, for error messages.

    Raises:
        OptionError: The module cannot be imported, or has no such attribute.
    """
    module_name, _, attribute = name.partition(":")
    if module_name.endswith(".py") or "/" in module_name:
        module = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise OptionError(
            f"{option}={name!r} names a file: write its module as Python imports it, {module}:{attribute}"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module = call_users(partial(importlib.import_module, module_name), f"{option}={name!r}")
    if not hasattr(module, attribute):
        raise OptionError(f"{option}={name!r}: the module has no {attribute!r}; write package.module:name")
    return getattr(module, attribute)


def call_users(function: Callable[[], Any], what: str, signature: str = "") -> Any:
    """Call the user's code with its stdout redirected to stderr.

    Args:
        function: The user's code.
        what: The option and its value, for error messages.
        signature: The arguments that it must take, for the message of a TypeError.

    Raises:
        OptionError: The code raised an exception, whose first line is in the message, or called sys.exit.
    """
    try:
        with redirect_stdout(sys.stderr):
            return function()
    except OptionError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code in _ENDED_BY_SIGNAL:
            raise
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        hint = f"{signature}; " if signature and isinstance(error, TypeError) else ""
        raise OptionError(
            f"{what} does not work ({reason}): {hint}run it in Python to find the cause"
        ) from error
