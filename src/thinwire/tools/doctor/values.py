"""Checks of values: every collective and dtype against `simulate`, every program's bits against the CPU's."""

import gc
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.engine.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Exchange,
    Reduce,
    ReduceScatter,
)
from thinwire.engine.simulate import exchange
from thinwire.testing.ranks import SimulatedRanks
from thinwire.tools.doctor.check import Outcome, Surroundings, judged

DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
)
PROGRAMS: dict[str, Callable[[], thinwire.Program]] = {
    "Exact": thinwire.Exact,
    "BF16": thinwire.BF16,
    "FP16": thinwire.FP16,
    "Int8": thinwire.Int8,
    "Int4": thinwire.Int4,
    "Int2": thinwire.Int2,
    "FP8": thinwire.FP8,
    "Sign": thinwire.Sign,
    "TopK": partial(thinwire.TopK, 0.1),
    "RandomK": partial(thinwire.RandomK, 0.1),
    "PowerSGD": partial(thinwire.PowerSGD, rank=2, warmup=0),
}
NOT_BITWISE = ("PowerSGD",)
"""Programs with matrix products, which every device rounds in its own order. Ranks must still be equal."""
SUMMED = ("Exact", "BF16", "FP16", "RandomK")
"""Programs whose numbers the backend adds up itself. Its order matters with more than two ranks."""
_SHAPES = {"weight": (48, 33), "bias": (48,), "scale": ()}
_STEPS, _RANKS = 3, 3  # by three, because a mean of two is exact however it is divided
_LENGTH = sum(math.prod(shape) for shape in _SHAPES.values())


def collectives(around: Surroundings) -> Outcome:
    """Run every collective in every dtype on the wire, and compare with the simulation's values."""
    wrong: list[str] = []
    count = 0
    with around.group():
        for dtype in DTYPES:
            for make in _makers(around.world_size):
                found = _differs(around, make, dtype)
                gc.collect()  # every rank closes its wire here; 49 communicators would fill a device
                count += 1
                wrong += [found] if found else []
    return judged(wrong, f"{count} combinations of collective and dtype give the simulated values")


def _makers(size: int) -> Iterator[Callable[[torch.Tensor], Collective]]:
    """Yield functions that make a collective of a rank's rows."""
    yield lambda rows: AllReduce(rows)
    yield lambda rows: AllGather(rows)
    yield lambda rows: AllToAll(rows)
    yield lambda rows: ReduceScatter(rows)
    yield lambda rows: Reduce(rows, dst=size - 1)
    yield lambda rows: Broadcast(rows, src=size - 1)
    yield lambda rows: Exchange(
        rows.flatten(), sends=(rows[0].numel(),) * size, receives=(rows[0].numel(),) * size
    )


def _rows(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return whole numbers, whose sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 4, (size, 37), generator=generator, dtype=torch.int64, device="cpu").to(dtype)


def _differs(around: Surroundings, make: Callable[[torch.Tensor], Collective], dtype: torch.dtype) -> str:
    """Return how a collective's result differs from the simulated one, or an empty text."""
    rank, size = around.rank, around.world_size
    expected = exchange([make(_rows(peer, size, dtype)) for peer in range(size)])[rank]
    received: list[torch.Tensor] = []
    op = make(_rows(rank, size, dtype).to(around.device))

    def program(bucket: thinwire.Bucket, memory: thinwire.Memory) -> thinwire.Collectives[thinwire.Outcome]:
        received.append((yield op))
        return thinwire.Outcome(bucket.buffer)

    name = f"{type(op).__name__} of {str(dtype).removeprefix('torch.')}"
    ddp = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False).to(around.device))
    thinwire.attach(ddp, program, timeout=around.limit)
    try:
        ddp(torch.ones(1, 2, dtype=torch.float32, device=around.device)).sum().backward()
    except thinwire.ThinwireError as error:
        return f"{name} raised {type(error).__name__}: {str(error)[:200]}"
    if isinstance(op, Reduce) and rank != op.dst:
        return ""  # undefined there
    got = received[0].cpu()
    return "" if torch.equal(got, expected.view_as(got)) else f"{name}: other values than simulated"


def bits(around: Surroundings) -> Outcome:
    """Run every program on simulated ranks on the device, and compare all bits with the CPU's."""
    wrong: list[str] = []
    details: dict[str, Any] = {}
    for name, make in PROGRAMS.items():
        for kind, inputs in _inputs().items():
            try:
                count, largest = _compared(make, inputs, around.device)
            except Exception as error:  # any failure of a device's kernel is this check's finding
                wrong.append(f"{name} on {kind} raised {type(error).__name__}: {str(error)[:200]}")
                continue
            details[f"{name}, {kind}"] = {"numbers that differ": count, "largest difference in ulp": largest}
            if count and name not in NOT_BITWISE:
                wrong.append(f"{name} on {kind}: {count} numbers differ, by up to {largest} ulp")
    others = ", ".join(NOT_BITWISE)
    right = f"{len(details)} runs of {len(PROGRAMS)} programs; all but {others} have the CPU's bits"
    return judged(wrong, right, details)


def _inputs() -> dict[str, list[torch.Tensor]]:
    """Return inputs that are hard to round, each for all ranks and steps."""
    generator = torch.Generator().manual_seed(0)
    normal = [
        torch.randn(_LENGTH, generator=generator, dtype=torch.float32, device="cpu")
        for _ in range(_STEPS * _RANKS)
    ]
    ties = [
        torch.randint(-254, 255, (_LENGTH,), generator=generator, dtype=torch.int64, device="cpu").float() / 2
        for _ in range(_STEPS * _RANKS)
    ]
    return {
        "normal numbers": normal,
        "ties": ties,
        "tiny numbers": [1e-38 * x for x in normal],
        "large numbers": [1e30 * x for x in normal],
        "many zeros": [x * (x.abs() > 1.5) for x in normal],
    }


def _compared(
    make: Callable[[], thinwire.Program], inputs: list[torch.Tensor], device: torch.device
) -> tuple[int, int]:
    """Return how many numbers of means and residuals differ between device and CPU, and the largest ulp."""
    sides = []
    for place in (device, torch.device("cpu")):
        ranks = SimulatedRanks(make(), _SHAPES, count=_RANKS)
        numbers = []
        for step in range(_STEPS):
            outcomes = ranks.step([x.to(place) for x in inputs[_RANKS * step : _RANKS * (step + 1)]])
            numbers += [outcome.mean.cpu() for outcome in outcomes]
        for memory in ranks.memories:
            for slots in memory.state_dict().values():
                numbers += [value.cpu().flatten() for value in slots.values() if value.is_floating_point()]
        sides.append(torch.cat([value.float().flatten() for value in numbers]))
    ulps = (_ordered(sides[0]) - _ordered(sides[1])).abs()
    return int((ulps != 0).sum()), int(ulps.max()) if ulps.numel() else 0


def _ordered(numbers: torch.Tensor) -> torch.Tensor:
    """Return float32 numbers as integers whose distance is in units in the last place."""
    whole = numbers.contiguous().view(torch.int32).to(torch.int64)
    return torch.where(whole < 0, -(whole & 0x7FFFFFFF), whole)
