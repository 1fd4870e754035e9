"""A program that averages exactly in the first steps of training."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from thinwire.codecs.checks import check_whole
from thinwire.engine.ops import Collective, Collectives
from thinwire.programs.allreduce import Exact
from thinwire.programs.memory import Memory
from thinwire.programs.program import Bucket, Outcome, Program
from thinwire.programs.wrapper import Wrapper


@dataclass(frozen=True, repr=False)
class Warmup(Wrapper):
    """The exact mean in the first `steps` steps, and `program` afterwards.

    Gradients change fastest at the start of training, and errors made there are hard to correct later. Try a
    tenth of all steps first.

    Args:
        program: Program that runs after the warm-up.
        steps: Number of steps with exact gradients.

    Raises:
        OptionError: `program` is not a program, or `steps` is not a whole number of at least 0.

    Example::

        wire = thinwire.attach(ddp, thinwire.Warmup(thinwire.PowerSGD(rank=4), steps=1000))
    """

    steps: int

    # `Exact` runs in the warm-up. It adds no residuals, neither the bucket's nor the memory's.
    folds_residuals = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("steps", self.steps, 0, "steps with exact means")

    def feeds_back(self, shape: torch.Size) -> bool:
        """Return False: a residual would wait for the end of the warm-up instead of being added."""
        return False

    def outline(self, bucket: Bucket) -> Iterator[Collective] | None:
        """Return the outline of the program that runs in the bucket's step."""
        return self._program_at(bucket.step).outline(bucket)

    def __call__(self, bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
        """Run `Exact` during the warm-up, and the program afterwards."""
        return (yield from self._program_at(bucket.step)(bucket, memory))

    def _program_at(self, step: int) -> Program:
        return Exact() if step < self.steps else self.program
