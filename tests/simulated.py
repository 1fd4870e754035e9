"""Helpers of the tests that run programs on simulated ranks."""

from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

import torch

from thinwire import Bucket, Collectives, Memory, Outcome, Program
from thinwire.engine.ops import Collective
from thinwire.programs.wrapper import Wrapper
from thinwire.testing import SimulatedRanks


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
        nonlocal total
        steps, received = program(bucket, memory), None
        while True:
            try:
                op = steps.send(received)
            except StopIteration as stop:
                outcome: Outcome = stop.value
                return outcome
            if bucket.rank == 0 and isinstance(op, Collective):
                total += op.bytes_sent(*op.place(0, world))
            received = yield op

    length = sum(torch.Size(shape).numel() for shape in shapes.values())
    SimulatedRanks(counted, shapes, world, exact).step(list(normal(0, world, length).to(dtype)))
    return total
