"""What becomes of gradients after the warm-up: they stay at home, or go round the neighbours."""

from dataclasses import dataclass, replace

from thinwire.programs.memory import Memory
from thinwire.programs.program import Bucket, Outcome, Program
from thinwire.wire.ops import Steps, among


@dataclass(frozen=True)
class Alone:
    """Every rank keeps its own gradients; nothing is sent."""

    def __call__(self, bucket: Bucket, memory: Memory) -> Steps[Outcome]:
        """Return what came."""
        return Outcome(bucket.buffer)
        yield  # a program is a generator


@dataclass(frozen=True)
class Within:
    """Runs `program` among some ranks, this one included."""

    program: Program
    ranks: tuple[int, ...]

    def __call__(self, bucket: Bucket, memory: Memory) -> Steps[Outcome]:
        """The program, as if these ranks were all there are."""
        inner = replace(bucket, rank=self.ranks.index(bucket.rank), world_size=len(self.ranks))
        return (yield from among(self.ranks, self.program(inner, memory)))
