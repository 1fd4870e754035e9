"""Programs for gradients after the warm-up, which stay local or are averaged within a group."""

from dataclasses import dataclass, replace

import torch

from thinwire.engine.ops import Collectives, among
from thinwire.programs.description import ReprAsWritten
from thinwire.programs.memory import Memory
from thinwire.programs.program import Bucket, Outcome, Program, carries_exact, feeds_back
from thinwire.programs.sparse_gradients import takes_sparse


@dataclass(frozen=True, repr=False)
class Alone(ReprAsWritten):
    """A program that sends nothing, so that every rank keeps its own gradients."""

    def __call__(self, bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
        """Return the bucket unchanged."""
        return Outcome(bucket.buffer)
        yield  # a program is a generator


@dataclass(frozen=True, repr=False)
class Within(ReprAsWritten):
    """A program that runs `program` among some ranks, this one included."""

    program: Program
    ranks: tuple[int, ...]

    @property
    def carries_exact(self) -> bool:
        """True if the program averages some parameters exactly."""
        return carries_exact(self.program)

    def feeds_back(self, shape: torch.Size) -> bool:
        """Return whether the program adds a parameter's residual to its gradient."""
        return feeds_back(self.program, shape)

    @property
    def takes_sparse(self) -> bool:
        """True if the program averages sparse gradients."""
        return takes_sparse(self.program)

    def __call__(self, bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
        """Run the program with these ranks as the whole world."""
        inner = replace(bucket, rank=self.ranks.index(bucket.rank), world_size=len(self.ranks))
        return (yield from among(self.ranks, self.program(inner, memory)))
