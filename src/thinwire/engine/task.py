"""Steps, and the programs that run in them."""

import contextlib
import threading
from dataclasses import dataclass
from typing import Any

import torch

from thinwire.engine.comm.pending import Pending
from thinwire.engine.futures import Result
from thinwire.engine.meter import OpRecord, StepTrace
from thinwire.engine.ops import Await, Collective, Collectives
from thinwire.engine.order import Agenda
from thinwire.errors import ThinwireError


class EngineStep:
    """The programs of one backward pass, or of one exchange between two."""

    def __init__(self, trace: StepTrace) -> None:
        self.agenda = Agenda()
        self.tasks: list[Task] = []
        self.trace = trace
        self.done = threading.Event()
        self.thread = threading.get_ident()
        """The thread that submits the programs."""
        self.awaited_since: float | None = None
        self.guarded = False
        """Whether `Engine.settle` will raise the step's error, so that futures need not carry it."""

    @property
    def step(self) -> "EngineStep":
        """The step itself. Queued among its tasks, it separates those before it from those after it."""
        return self

    def end(self) -> None:
        """Mark the step as done, and drop the references to its buckets."""
        self.tasks.clear()
        self.done.set()


@dataclass(eq=False)
class Task:
    """One submitted program while it runs.

    Attributes:
        program: The generator, until it ends.
        label: The name of its work, for errors.
        last: Whether it ends its step.
        step: The step it belongs to.
        instead: The future's value if the program fails in a guarded step.
        future: The future of its result.
        ready: On an accelerator, the event after which its gradients are computed. None after its first turn.
    """

    program: Collectives[torch.Tensor] | None
    label: object
    last: bool
    step: EngineStep
    instead: torch.Tensor | None
    future: Result
    ready: Any | None = None
    op: Collective | Await | None = None
    stage: int = 0
    """The stage of the turn that the program takes next."""
    held: Collective | Await | None = None
    """The program's next collective, until it is issued."""
    early: bool = False
    """Whether that collective, or the one in flight, may be before its place in the static order."""
    pending: Pending | None = None
    record: OpRecord | None = None

    def resolve(self, value: Any) -> None:
        """Complete the future with the program's result."""
        self.program = self.op = self.pending = self.instead = None
        self.future.set_result(value)

    def fail(self, error: ThinwireError) -> None:
        """Complete the future with the error, or in a guarded step with `instead`."""
        if self.program is not None:
            with contextlib.suppress(Exception):  # errors of its clean-up would hide the failure
                self.program.close()
            if self.step.guarded:
                self.resolve(self.instead)
            else:
                self.program = self.op = self.pending = self.instead = None
                self.future.fail(anew(error))


def anew(error: ThinwireError) -> ThinwireError:
    """Copy an error without traceback and context; a subclass's constructor may take other arguments."""
    copy = type(error).__new__(type(error))
    copy.args = error.args
    copy.__dict__.update(error.__dict__)
    return copy
