"""A program that averages exactly in the first steps of training."""

from dataclasses import dataclass

from thinwire.engine.ops import Collectives
from thinwire.errors import OptionError
from thinwire.programs.allreduce import Exact
from thinwire.programs.description import ReprAsWritten
from thinwire.programs.memory import Memory
from thinwire.programs.program import (
    Bucket,
    Outcome,
    Program,
    carries_exact,
    exact_alone,
    require_program,
    tracks_error,
)


@dataclass(frozen=True, repr=False)
class Warmup(ReprAsWritten):
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

    program: Program
    steps: int

    def __post_init__(self) -> None:
        require_program(self.program)
        if not isinstance(self.steps, int) or self.steps < 0:
            raise OptionError(
                f"steps={self.steps!r} must be a whole number, at least 0: steps with exact means"
            )

    @property
    def carries_exact(self) -> bool:
        """True if the program averages some parameters exactly, also after the warm-up."""
        return carries_exact(self.program)

    @property
    def tracks_error(self) -> bool:
        """True if the program reports its error, as `Exact` does."""
        return tracks_error(self.program)

    @property
    def exact_alone(self) -> bool:
        """True if the program compresses nothing on one rank."""
        return exact_alone(self.program)

    def __call__(self, bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
        """Run `Exact` during the warm-up, and the program afterwards."""
        program = Exact() if bucket.step < self.steps else self.program
        return (yield from program(bucket, memory))
