"""Runs an example of a framework on real ranks, and compares it with plain DDP and thinwire."""

import logging
import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

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
RATIOS = {  # plain DDP's bytes over the program's, for 8 steps of this model on 2 ranks
    "Int8()": (3.5, 4.0),
    "PowerSGD(rank=2, warmup=0)": (10.0, 11.0),
    "DiLoCo(4, program=Int8())": (14.0, 16.0),
    "LocalSGD(2)": (1.99, 2.0),
    "ZeRO(Int8())": (1.55, 1.65),
}


def on_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Call `function(rank, *args)` on every rank, in the environment that torchrun would give it."""
    return run_ranks(_as_torchrun, world_size, function, args, seconds=100)


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


def plain(rank: int, options: tiny.Options, *, inside: bool, lr_every: int) -> dict[str, Any]:
    """The same training in a plain loop. Batch `n` of all goes to rank `n % world_size`."""
    size = torch.distributed.get_world_size()
    ddp = DDP(Inside() if inside else tiny.model())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=lr_every)
    wire = thinwire.attach(ddp, tiny.program(options), optimizer=optimizer)
    rows = tiny.Rows().rows
    for step in range(options.steps):
        optimizer.zero_grad()
        for micro in range(options.accumulate):
            place = ((step * options.accumulate + micro) * size + rank) * 8
            with ExitStack() as stack:
                if micro < options.accumulate - 1:
                    stack.enter_context(ddp.no_sync())
                with torch.autocast("cpu", torch.bfloat16, enabled=options.bf16):
                    output = ddp(rows[place : place + 8])
                loss = tiny.loss_of(output, rows[place : place + 8])
                (loss / options.accumulate).backward()
        if options.clip:
            wire.clip_grad_norm_(options.clip)
        optimizer.step()
        scheduler.step()
    wire.finalize()
    return tiny.result(wire, ddp.module)


def check_runs(rank: int, train: Train, folder: Path, *, inside: bool = False, lr_every: int = 4) -> None:
    """Train every program in the framework: as in a plain loop, compressed, and resumed bit by bit."""
    for options in RUNS:
        found, expected = train(options), plain(rank, options, inside=inside, lr_every=lr_every)
        for key in ("digest", "loss", "step", "ddp_bytes"):
            assert found[key] == expected[key], (options.program, key, found, expected)
        finalized_twice = 8  # a framework's own end of training compares the steps of 2 ranks once more
        assert 0 <= found["bytes_sent"] - expected["bytes_sent"] <= finalized_twice, (options.program, found)
        least, most = RATIOS[options.program]
        assert least <= found["ddp_bytes"] / found["bytes_sent"] <= most, found
        check_resumed(train, replace(options, folder=folder / options.program), found)
        torch.distributed.barrier()
        shutil.rmtree(folder / options.program, ignore_errors=True)
        torch.distributed.barrier()


def check_resumed(train: Train, options: tiny.Options, expected: dict[str, Any]) -> None:
    """Save at step 3, which lies between two averages, and end as without the interruption."""
    saved = train(replace(options, save_at=3))
    assert saved["digest"] == expected["digest"], f"saving changes {options.program}"
    resumed = train(replace(options, resume=True))
    assert resumed["step"] == expected["step"]
    assert resumed["digest"] == expected["digest"], f"{options.program} does not resume"


def check_metrics(rows: Sequence[Mapping[str, Any]]) -> None:
    """Every row has the figures of a step of `Int8()` with the tiny model."""
    for row in rows:
        assert 3.5 < row["thinwire/compression"] < 4
        assert row["thinwire/bytes_per_step"] == 8960
        assert row["thinwire/exposed_seconds"] >= 0
        assert row["thinwire/overflows"] == 0


def thinwires_messages() -> list[str]:
    """A list to which all that thinwire logs from now on is added."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("thinwire").addHandler(handler)
    return messages
