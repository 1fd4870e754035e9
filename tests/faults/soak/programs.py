"""Every program thinwire has, with options drawn at random."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TypeAlias

import torch

from thinwire import (
    BF16,
    FP8,
    FP16,
    AcrossNodes,
    Averaging,
    DiLoCo,
    Exact,
    Hierarchical,
    Int2,
    Int4,
    Int8,
    LocalSGD,
    Partition,
    PowerSGD,
    Program,
    RandomK,
    Sign,
    TopK,
    Warmup,
    ZeRO,
)


@dataclass(frozen=True)
class Hook:
    """PowerSGD under torch's names."""

    batched: bool
    start: int


Drawn: TypeAlias = Program | Averaging | ZeRO | Hook


def draw(rng: Random, world_size: int) -> Drawn:
    """Any of them."""
    (kind,) = rng.choices((draw_gradients, draw_averaging, draw_zero, _hook), (10, 6, 4, 1))
    return kind(rng, world_size)


def draw_attached(rng: Random, world_size: int) -> Program | Averaging:
    """One that `wire.swap` takes."""
    (kind,) = rng.choices((draw_gradients, draw_averaging), (2, 1))
    return kind(rng, world_size)


def draw_gradients(rng: Random, world_size: int) -> Program:
    """A program for gradients, maybe inside of others."""
    program = rng.choice(_SINGLE)(rng)
    if rng.random() < 0.15:
        program = Partition([("*.bias", Exact()), ("last.*", rng.choice(_SINGLE)(rng))], default=program)
    if rng.random() < 0.15:
        sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
        program = AcrossNodes(program, node_size=rng.choice(sizes))
    if rng.random() < 0.15:
        program = Warmup(program, steps=rng.randint(1, 4))
    return program


def draw_averaging(rng: Random, world_size: int) -> Averaging:
    """Models that are averaged, every few steps."""
    options = {
        "warmup_steps": rng.choice([0, 0, 1, 3]),
        "within": rng.choice([None, None, min(2, world_size)]),
        "gradients": rng.choice([Exact(), Int8(), PowerSGD(rank=1)]),
        "optimizer_state": rng.choice(["local", "local", "mean", "reset"]),
        "buffers": rng.choice(["mean", "rank0", "local"]),
    }
    kind = rng.choice(["LocalSGD", "Hierarchical", "DiLoCo", "DiLoCo"])
    if kind == "LocalSGD" or (kind == "Hierarchical" and world_size == 1):
        return LocalSGD(rng.randint(1, 4), **options)  # type: ignore[arg-type]
    if kind == "Hierarchical":
        return Hierarchical({rng.randint(1, 2): 2, rng.randint(3, 4): None}, **options)  # type: ignore[arg-type]
    period = rng.randint(2, 5)
    return DiLoCo(
        period,
        outer=rng.choice([None, partial(torch.optim.SGD, lr=0.7, momentum=0.5, nesterov=True)]),
        program=rng.choice(_SINGLE)(rng),
        fragments=rng.randint(1, min(3, period)),
        overlap=rng.randint(0, period - 1),
        **options,  # type: ignore[arg-type]
    )


def draw_zero(rng: Random, world_size: int) -> ZeRO:
    """Optimizer state in shards."""
    return ZeRO(
        rng.choice(_SINGLE)(rng),
        parameters=rng.choice([None, None, torch.bfloat16]),
        interleaved=rng.random() < 0.3,
        shard_buckets=rng.random() < 0.7,
    )


def _hook(rng: Random, world_size: int) -> Hook:
    return Hook(batched=rng.random() < 0.3, start=rng.randint(0, 3))


def _power_sgd(rng: Random) -> Program:
    return PowerSGD(
        rank=rng.choice([1, 2, 4]),
        warm_start=rng.random() < 0.8,
        error_feedback=rng.random() < 0.8,
        residual=rng.choice(["mean", "sent"]),
        factor_dtype=rng.choice([None, "int8", "bf16", "fp16"]),
        flatten=rng.random() < 0.2,
        warmup=rng.choice([None, 0, 3]),
    )


_SINGLE: list[Callable[[Random], Program]] = [
    lambda rng: Exact(),
    lambda rng: BF16(),
    lambda rng: FP16(),
    lambda rng: Int8(block=rng.choice([64, 256]), stochastic=rng.random() < 0.3),
    lambda rng: Int8(error_feedback=False),
    lambda rng: Int4(stochastic=rng.random() < 0.3),
    lambda rng: Int2(block=rng.choice([64, 128])),
    lambda rng: FP8(rng.choice(["e4m3", "e5m2"])),
    lambda rng: Sign(),
    lambda rng: TopK(rng.choice([0.05, 0.2])),
    lambda rng: RandomK(rng.choice([0.1, 0.25])),
    _power_sgd,
    _power_sgd,
]


def averages(program: Drawn) -> bool:
    """Whether models are apart between averages."""
    return isinstance(program, Averaging)


def steps_inside_backward(program: Drawn) -> bool:
    """Whether there is no moment for a GradScaler, for clipping or for unused parameters."""
    return isinstance(program, ZeRO) and program.interleaved


def can_swap(program: Drawn) -> bool:
    """Whether it may give way to another between steps."""
    return not isinstance(program, ZeRO | Hook)


def can_resize(program: Drawn) -> bool:
    """Whether what it remembers has a meaning for another number of ranks."""
    alone = not isinstance(program, Averaging) or program.within is None
    return alone and not isinstance(program, Hook) and "AcrossNodes" not in repr(program)
