"""Helpers of the tests that run programs on simulated ranks."""

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

from thinwire import (
    Bucket,
    Cast,
    Codec,
    Collectives,
    Float8,
    LargestEntries,
    Memory,
    Outcome,
    Program,
    Quantize,
    SignBits,
)
from thinwire.engine.ops import Collective, mapped
from thinwire.programs.program import ProgramFunction
from thinwire.programs.wrapper import Wrapper
from thinwire.testing import SimulatedRanks

CODECS: list[Codec] = [
    Quantize(block=16),
    Quantize(bits=4, block=8),
    Quantize(affine=True, block=24),
    Quantize(stochastic=True, block=8),
    Float8(block=16),
    SignBits(block=8),
    LargestEntries(ratio=0.2, block=10),
    Cast(torch.bfloat16),
]


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


Some = TypeVar("Some")


def compressing_alone(program: Some) -> Some:
    """A program that compresses on one rank too, where nothing is sent and thinwire's are exact otherwise."""
    if isinstance(program, Wrapper):
        compressing_alone(program.program)
    else:
        object.__setattr__(program, "exact_alone", False)
    return program


def stepping_in(
    make: Callable[[], AbstractContextManager[Any]], program: Program, ranks: Container[int]
) -> ProgramFunction:
    """A program that takes its steps in a new context on some ranks."""

    def run(bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
        steps, received = program(bucket, memory), None
        while True:
            with make() if bucket.rank in ranks else nullcontext():
                try:
                    op = steps.send(received)
                except StopIteration as stop:
                    outcome: Outcome = stop.value
                    return outcome
            received = yield op

    return run


def sent_by(program: Program, world: int, length: int) -> int:
    """Bytes that rank 0 sends in a step."""
    return bytes_of(program, world, {"p": (length,)})


def bytes_of(
    program: Program,
    world: int,
    shapes: Mapping[str, Sequence[int]],
    exact: Collection[str] = (),
    dtype: torch.dtype = torch.float32,
) -> int:
    """Bytes that rank 0 sends in a step."""
    total = 0

    def counted(bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
        def count(op: Collective) -> Collective:
            nonlocal total
            if bucket.rank == 0:
                total += op.bytes_sent(*op.place(0, world))
            return op

        return mapped(program(bucket, memory), count)

    length = sum(torch.Size(shape).numel() for shape in shapes.values())
    SimulatedRanks(counted, shapes, world, exact).step(list(normal(0, world, length).to(dtype)))
    return total
