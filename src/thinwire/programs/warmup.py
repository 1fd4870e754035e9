"""Exact at first, compressed later."""

from dataclasses import dataclass

from thinwire.errors import OptionError
from thinwire.programs.allreduce import Exact
from thinwire.programs.memory import Memory
from thinwire.programs.program import Bucket, Outcome, Program, require_program
from thinwire.wire.ops import Steps


@dataclass(frozen=True)
class Warmup:
    """The exact mean for the first `steps` steps, then `program`.

    Gradients change fastest at the start of training, and errors made there are hard to make up for. A tenth
    of all steps is a good first try.

    Example::

        wire = thinwire.attach(ddp, thinwire.Warmup(thinwire.PowerSGD(rank=4), steps=1000))
    """

    program: Program
    steps: int

    def __post_init__(self) -> None:
        require_program(self.program)
        if not isinstance(self.steps, int) or self.steps < 0:
            raise OptionError(f"steps={self.steps!r} must be a whole number from 0 on: steps to run exactly")

    def __call__(self, bucket: Bucket, memory: Memory) -> Steps[Outcome]:
        """Whichever is due."""
        program = Exact() if bucket.step < self.steps else self.program
        return (yield from program(bucket, memory))
