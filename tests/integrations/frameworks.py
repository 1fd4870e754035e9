"""Runs an example of a framework on real ranks, and compares it with plain DDP and thinwire."""

import logging
import math
import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel

import thinwire
from examples import tiny
from tests.harness import run_ranks

Train = Callable[[tiny.Options], dict[str, Any]]

RUNS = (
    tiny.Options(program="Int8()", accumulate=2, clip=0.1),
    tiny.Options(program="PowerSGD(rank=2, warmup=0)", bf16=True),
    tiny.Options(program="DiLoCo(4, program=Int8())", clip=0.1),
    tiny.Options(program="LocalSGD(2)", accumulate=2),
    tiny.Options(program="ZeRO(Int8())", clip=0.1),
)
HALF = ("Int8()", "ZeRO(Int8())")
"""What is trained in fp16 with a GradScaler."""
RATIOS = {  # plain DDP's bytes over the program's, for 8 steps of this model on 2 ranks
    "Int8()": (3.5, 4.0),
    "PowerSGD(rank=2, warmup=0)": (10.0, 11.0),
    "DiLoCo(4, program=Int8())": (14.0, 16.0),
    "LocalSGD(2)": (1.99, 2.0),
    "ZeRO(Int8())": (1.55, 1.65),
}


def on_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Call `function(rank, *args)` on every rank, in the environment that torchrun would give it."""
    # Frameworks keep singletons of the process group that they found.
    return run_ranks(_as_torchrun, world_size, function, args, fresh=True)


def _as_torchrun(rank: int, world_size: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    warnings.simplefilter("ignore")  # the frameworks' own
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", TORCHELASTIC_RUN_ID="test", GROUP_RANK="0"
    )
    return function(rank, *args)


class Inside(nn.Module):
    """The model inside another one, as frameworks have it: PowerSGD draws by the parameters' names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny.model()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(rows)
        return result


def plain(
    rank: int,
    options: tiny.Options,
    *,
    inside: bool,
    lr_every: int,
    scaler: GradScaler | None = None,
    average: AveragedModel | None = None,
    average_every: int = 1,
) -> dict[str, Any]:
    """The same training in a plain loop. Batch `n` of all goes to rank `n % world_size`.

    With a scaler it trains in fp16. `average` follows the model after every `average_every` steps.
    """
    size = torch.distributed.get_world_size()
    ddp = DDP(Inside() if inside else tiny.model())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=lr_every)
    wire = thinwire.attach(ddp, tiny.program(options), optimizer=optimizer, scaler=scaler)
    rows, kind = tiny.Rows().rows, torch.bfloat16 if scaler is None else torch.float16
    scaled = GradScaler("cpu", enabled=False) if scaler is None else scaler
    for step in range(options.steps):
        optimizer.zero_grad()
        for micro in range(options.accumulate):
            place = ((step * options.accumulate + micro) * size + rank) * 8
            with ExitStack() as stack:
                if micro < options.accumulate - 1:
                    stack.enter_context(ddp.no_sync())
                with torch.autocast("cpu", kind, enabled=options.bf16 or scaler is not None):
                    output = ddp(rows[place : place + 8])
                loss = tiny.loss_of(output, rows[place : place + 8])
                scaled.scale(loss / options.accumulate).backward()
        if options.clip:
            scaled.unscale_(optimizer)
            wire.clip_grad_norm_(options.clip)
        scaled.step(optimizer)
        scaled.update()
        scheduler.step()
        if average is not None and (step + 1) % average_every == 0:
            average.update_parameters(ddp.module)
    wire.finalize()
    return tiny.result(wire, ddp.module)


@dataclass(frozen=True)
class Run:
    """What one program has led to on one rank."""

    program: str
    trained: dict[str, Any]
    """In the framework, with a checkpoint at step 3, which lies between two averages."""
    plain: dict[str, Any]
    """In a plain loop, without a checkpoint."""
    resumed: dict[str, Any]
    """In the framework, from that checkpoint."""

    def differences(self) -> list[str]:
        """What is not as in the plain loop, or not as without the interruption; nothing, if all is well."""
        found = [
            key for key in ("digest", "loss", "step", "ddp_bytes") if self.trained[key] != self.plain[key]
        ]
        more = self.trained["bytes_sent"] - self.plain["bytes_sent"]
        if not 0 <= more <= 8:  # a framework's own end of training compares the steps of 2 ranks once more
            found.append(f"{more} more bytes")
        least, most = RATIOS[self.program]
        if not least <= self.trained["ddp_bytes"] / self.trained["bytes_sent"] <= most:
            found.append("compression")
        return found + [
            f"resumed {key}" for key in ("digest", "step") if self.resumed[key] != self.trained[key]
        ]


def run_all(rank: int, train: Train, folder: Path, *, inside: bool = False, lr_every: int = 4) -> list[Run]:
    """Train every program of `RUNS` in the framework, resume it, and train it in a plain loop."""
    results = []
    for options in RUNS:
        place = folder / options.program
        trained = train(replace(options, folder=place, save_at=3))
        resumed = train(replace(options, folder=place, resume=True))
        expected = plain(rank, options, inside=inside, lr_every=lr_every)
        results.append(Run(options.program, trained, expected, resumed))
        torch.distributed.barrier()
        shutil.rmtree(place, ignore_errors=True)
        torch.distributed.barrier()
    return results


INT8_STEP = {"thinwire/bytes_per_step": 8960, "thinwire/overflows": 0}
"""The figures of a step of `Int8()` with the tiny model that do not depend on time."""


def of_int8_steps(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether every row has the figures of steps of `Int8()` with the tiny model."""
    return all(
        INT8_STEP.items() <= row.items()
        and 3.5 < row["thinwire/compression"] < 4
        and row["thinwire/exposed_seconds"] >= 0
        for row in rows
    )


def refusal(error: type[Exception], function: Callable[..., Any], *args: Any, **options: Any) -> str:
    """The message of the error that a call raises."""
    with pytest.raises(error) as raised:
        function(*args, **options)
    return str(raised.value)


def new_scaler() -> GradScaler:
    """A scaler whose scale changes within a few steps, and overflows by nothing but `poison`."""
    return GradScaler("cpu", init_scale=256.0, growth_interval=2)


def poison(step: int, rank: int) -> None:
    """Make the data of one step infinite on one of two ranks, in this process."""
    make = tiny.Rows.__init__

    def poisoned(self: tiny.Rows, count: int = 4096) -> None:
        make(self, count)
        self.rows[8 * (2 * step + rank)] = math.inf

    tiny.Rows.__init__ = poisoned  # type: ignore[method-assign]


def check_half(ranks: Sequence[Sequence[tuple[Any, ...]]]) -> None:
    """Compare each rank's (trained, resumed, plain, scales) of `HALF`, in which rank 1 overflowed once."""
    for results in ranks:
        for trained, resumed, expected, scales in results:
            assert trained["step"] == 7, "one of eight overflowed on rank 1"
            assert trained["digest"] == resumed["digest"] == expected["digest"]
            assert len(set(scales)) == 1


def thinwires_messages() -> list[str]:
    """A list to which all that thinwire logs from now on is added."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("thinwire").addHandler(handler)
    return messages
