"""A tiny model, its data and a command line, which the examples of frameworks share."""

import argparse
import hashlib
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

import thinwire
from thinwire.wire import Wire

WIDTH = 32


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of all examples.

    Attributes:
        program: A program or configuration as Python text.
        steps: The number of optimizer steps to train to.
        accumulate: The number of batches in a step.
        clip: The largest norm of the gradients. 0 does not clip.
        bf16: Whether to train with bf16 autocast.
        save_at: The step at which to save a checkpoint. 0 saves none.
        resume: Whether to continue from the checkpoint in `folder`.
        folder: The folder of checkpoints and logs.
        compiled: Whether to compile the model.
    """

    program: str = "Int8()"
    steps: int = 8
    accumulate: int = 1
    clip: float = 0.0
    bf16: bool = False
    save_at: int = 0
    resume: bool = False
    folder: Path = Path("tiny-checkpoint")
    compiled: bool = False


def parsed(description: str | None) -> Options:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    for option in fields(Options):
        flag, kind = f"--{option.name.replace('_', '-')}", type(option.default)
        if kind is bool:
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, type=kind, default=option.default)
    return Options(**vars(parser.parse_args()))


def program(options: Options) -> Any:
    """Return the program or configuration that the options name."""
    return eval(options.program, {"torch": torch}, vars(thinwire))


def model() -> nn.Module:
    """Return a model with the same random weights in every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 128), nn.Tanh(), nn.Linear(128, WIDTH))


def loss_of(output: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the loss of predicting rows that are rolled by one."""
    loss: torch.Tensor = (output.float() - rows.roll(1, dims=1)).square().mean()
    return loss


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """Random rows, the same in every process."""

    def __init__(self, count: int = 4096) -> None:
        self.rows = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> torch.Tensor:
        return self.rows[place]


def batches(steps: int, rank: int, world_size: int, size: int = 8) -> torch.Tensor:
    """Return a rank's own batches, one for each step."""
    return Rows(steps * world_size * size).rows.view(steps, world_size, size, WIDTH)[:, rank]


def digest(module: nn.Module) -> str:
    """Return a short hash of the parameters' bits."""
    bits = torch.cat([parameter.detach().flatten() for parameter in module.parameters()]).view(torch.uint8)
    return hashlib.sha256(bytes(bits.tolist())).hexdigest()[:16]


def result(wire: Wire, module: nn.Module) -> dict[str, Any]:
    """Return what a run has led to on this rank, with the loss of the first rows."""
    stats, rows = wire.stats(), Rows().rows[:64]
    with torch.no_grad():
        loss = loss_of(module(rows), rows).item()
    return {
        "step": wire.step,
        "loss": loss,
        "digest": digest(module),
        "bytes_sent": stats.bytes_sent,
        "ddp_bytes": stats.ddp_bytes,
        "stats": str(stats),
    }


def show(found: dict[str, Any], path: Path | None = None) -> None:
    """Print a result as one line, and write it to a file if there is a path."""
    line = json.dumps(found)
    print(line, flush=True)
    if path is not None:
        path.write_text(line)
