"""Simulated ranks that average gradients with PowerSGD."""

import itertools
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch

from thinwire import Bucket, Memory
from thinwire.engine.simulate import Simulation, simulate
from thinwire.programs import powersgd
from thinwire.programs.lowrank import Passes
from thinwire.programs.stacked import StackedPasses

PASSES = {"as on a CPU": Passes, "as on an accelerator": StackedPasses}


def passing(name: str) -> AbstractContextManager[Any]:
    """Run PowerSGD's passes over CPU tensors as on another device."""
    return patch.object(powersgd, "Passes", PASSES[name])


SHAPES = {
    "w": (12, 9),
    "v": (12, 9),
    "tall": (20, 4),
    "conv": (6, 4, 3),
    "bias": (7,),
    "scalar": (),
    "none": (0, 3),
}


class Ranks:
    """Simulated ranks that average gradients with a program, step after step."""

    def __init__(
        self,
        program: Any,
        world_size: int,
        shapes: dict[str, tuple[int, ...]] = SHAPES,
        dtype: torch.dtype = torch.float32,
        buckets: int = 1,
    ) -> None:
        self.program = program
        self.shapes = {name: torch.Size(shape) for name, shape in shapes.items()}
        self.memories = [Memory() for _ in range(world_size)]
        self.dtype = dtype
        self.step = 0
        names = list(shapes)
        self.buckets = [names[start::buckets] for start in range(buckets)]

    def gradients(self, seed: int) -> list[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        return [
            {
                name: torch.randn(shape, generator=generator).to(self.dtype)
                for name, shape in self.shapes.items()
            }
            for _ in self.memories
        ]

    def average(self, gradients: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Run one step, and return the mean. All ranks must receive the same."""
        simulation = self.run(gradients)
        means = [
            {
                name: part
                for names, outcome in zip(self.buckets, results, strict=True)
                for name, part in self.bucket(names, outcome.mean, 0, 0).views().items()
            }
            for results in simulation.results
        ]
        for name, own in itertools.product(self.shapes, means):
            assert torch.equal(own[name].nan_to_num(), means[0][name].nan_to_num()), f"{name}: ranks differ"
        return means[0]

    def run(self, gradients: list[dict[str, torch.Tensor]]) -> Simulation:
        programs, staged = [], [memory.staged() for memory in self.memories]
        for rank, (own, memory) in enumerate(zip(gradients, staged, strict=True)):
            flat = [torch.cat([own[name].flatten() for name in names]) for names in self.buckets]
            buckets = [
                self.bucket(n, f, i, rank) for i, (n, f) in enumerate(zip(self.buckets, flat, strict=True))
            ]
            programs.append([self.program(bucket, memory) for bucket in buckets])
        self.step += 1
        simulation = simulate(programs)
        # As in training: a step with a mean that is not finite is rolled back.
        if all(outcome.mean.isfinite().all() for results in simulation.results for outcome in results):
            for memory in staged:
                memory.commit()
        return simulation

    def bucket(self, names: list[str], flat: torch.Tensor, index: int, rank: int) -> Bucket:
        shapes = tuple(self.shapes[name] for name in names)
        return Bucket(index, flat, tuple(names), shapes, rank, len(self.memories), self.step)

    def residual(self, name: str) -> torch.Tensor:
        """Return the mean of all ranks' residuals."""
        empty = torch.zeros(self.shapes[name], dtype=torch.promote_types(self.dtype, torch.float32))
        return torch.stack([memory.slot(name, "residual", empty.clone) for memory in self.memories]).mean(0)


def mean_of(gradients: list[dict[str, torch.Tensor]], name: str) -> torch.Tensor:
    return torch.stack([own[name] for own in gradients]).mean(0)


def low_rank(n: int, m: int, rank: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(size, rank, generator=generator, dtype=torch.float64) for size in (n, m))
    return left @ right.T
