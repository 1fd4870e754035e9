"""One training step, opened by its first bucket, and committed or rolled back as a whole.

The order in which a step ends, for backward passes:

    the hook of the last bucket     calls `close`
    all gradients are computed      `_backward_computed` runs: from here on, waiting is exposed time
    DDP's own final callback        waits for the futures and writes the gradients
    after it                        `settle` runs: it commits or rolls back, then calls the strategy
"""

import logging
from collections.abc import Callable
from typing import Protocol

import torch

from thinwire.amp.loss_scale import Scales, Units
from thinwire.engine.engine import Engine
from thinwire.engine.ops import Collectives
from thinwire.engine.profiling import span
from thinwire.errors import ThinwireError
from thinwire.models.ddp.internals import in_backward, queue_callback
from thinwire.programs.finite import all_true, finite
from thinwire.programs.memory import Memory, NoMemory, Staged
from thinwire.programs.program import Bucket, Program, check_outcome
from thinwire.step.skip_overflows import Skipping

logger = logging.getLogger("thinwire")

_NO_MEMORY = NoMemory()
"""The memory of stateless programs. They keep nothing, so nothing needs to be staged."""


class SteppedModel(Protocol):
    """The part of a model's interface that a step uses."""

    find_unused_parameters: bool
    """Whether DDP waits at the end of backward to learn which parameters all ranks left unused."""

    def check_finalization(self) -> None:
        """Raise UnavailableError if the user's code ends the backward."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's part of each parameter by name, sharing its memory."""

    def unused(self) -> set[str]:
        """Return the names of parameters that no rank used in the last backward."""

    def spoil_gradients(self) -> None:
        """Set all gradients to NaN."""


class StepEvents(Protocol):
    """The callbacks at a step's end."""

    @property
    def counts_backwards(self) -> bool:
        """True if each settled backward counts as a step. If False, `advance` counts steps."""

    def agree_finite(self, finite: torch.Tensor) -> torch.Tensor:
        """Return whether the means are finite on all ranks, given whether this rank's are.

        Both are scalar bool tensors. The step reads the result, its only read.
        """

    def end_backward(self, committed: bool) -> None:
        """React to a settled backward. Gradients are written, the step is committed or rolled back."""


class _OpenTransaction:
    """A step whose gradients are being exchanged, before it is committed or rolled back."""

    def __init__(self, units: Callable[[], Units]) -> None:
        self.closed = False
        self.undo: list[Callable[[], None]] = []
        self.finite: list[torch.Tensor] = []
        self._units = units
        self._memories: dict[int, Staged] = {}

    def staged(self, memory: Memory) -> Staged:
        """Return the memory staged for this step."""
        if id(memory) not in self._memories:
            if not self._memories:
                units = self._units()  # read once a step, and only if a program has memory
                self._units = lambda: units
            memory.convert(self._units())
            self._memories[id(memory)] = memory.staged()
        return self._memories[id(memory)]

    def commit(self, unused: set[str]) -> None:
        """Commit the step's changes of all memories, except those of parameters that no rank used."""
        for memory in self._memories.values():
            memory.commit(unused)

    def roll_back(self) -> None:
        """Discard the step's changes of all memories, and call the `undo` callbacks."""
        for memory in self._memories.values():
            memory.forget()
        for undo in self.undo:
            undo()


class StepTransaction:
    """The owner of a model's training steps, and the only writer of their count.

    A step counts as a whole or not at all. All ranks agree on whether a mean is non-finite. If so, all
    gradients become NaN, so that a GradScaler detects it on every rank, and memories and counts stay as
    before the step.
    """

    def __init__(self, engine: Engine, model: SteppedModel, scales: Scales, events: StepEvents) -> None:
        self.count = 0
        """Number of committed steps, without accumulation under `no_sync`."""
        self.overflowed = False
        """Whether the latest step was rolled back."""
        self.events = events
        self.scales = scales
        self.skipping = Skipping()
        """The optimizer steps that follow overflows."""
        self._engine = engine
        self._model = model
        self._open: _OpenTransaction | None = None

    @property
    def is_open(self) -> bool:
        """True from the start of a step until its last bucket arrives."""
        return self._open is not None and not self._open.closed

    def settle_leftover(self) -> None:
        """Settle a step whose backward raised, or was interrupted, after its last bucket."""
        if self._open is not None:
            self.settle()

    def open(self) -> None:
        """Begin a step, with its first bucket.

        Raises:
            UnavailableError: DDP was set to be finalized manually since the last step.
        """
        self._model.check_finalization()
        self.settle_leftover()
        self.skipping.in_backward = True
        self._open = _OpenTransaction(lambda: self.scales.units(self.overflowed))

    def submit(
        self, program: Program, bucket: Bucket, memory: Memory, last: bool
    ) -> "torch.futures.Future[torch.Tensor]":
        """Run a program on a bucket of the open step.

        Args:
            program: The program.
            bucket: The gradients.
            memory: The tensors that the program keeps between steps.
            last: Whether it ends the step.

        Returns:
            A future of the mean.
        """
        step = self._open
        assert step is not None, "open() comes first"
        steps = self._observed(step, program, bucket, memory)
        return self._engine.submit(steps, step=self.count, label=bucket, last=last, instead=bucket.buffer)

    def undo_with(self, undo: Callable[[], None]) -> None:
        """Call `undo` if the open step is rolled back."""
        assert self._open is not None, "open() comes first"
        self._open.undo.append(undo)

    def close(self) -> None:
        """Close the open step, after its last bucket was submitted.

        A rank without inputs (Join) has no backward whose end could settle the step, so it settles here, at
        the same point as the other ranks.
        """
        assert self._open is not None, "open() comes first"
        self._open.closed = True
        if in_backward():
            queue_callback(self._backward_computed)
        else:
            self.settle()

    def settle(self) -> None:
        """Wait for the latest step, then commit it or roll it back.

        Raises:
            WireError: A collective failed, and the step was rolled back.
            ProgramError: A program failed, and the step was rolled back.
        """
        with span("settle"):
            self._settle()

    def _settle(self) -> None:
        step = self._open
        # If the wait is interrupted (Ctrl-C), the step is settled later, as on the other ranks.
        try:
            self._engine.settle()
            committed = step is None or bool(self.events.agree_finite(all_true(step.finite)).item())
        except ThinwireError:
            self._open, self.skipping.in_backward = None, False
            if step is not None:
                step.roll_back()
            raise
        self._open, self.skipping.in_backward = None, False
        if step is None:
            return
        self.overflowed = not committed
        if committed:
            step.commit(self._model.unused())
            self.count += self.events.counts_backwards
        else:
            logger.info("step %d overflowed on some rank: it is rolled back on all", self.count)
            step.roll_back()
            self._engine.meter.overflowed()
            self._model.spoil_gradients()
        self.skipping.settled(self.count, committed, self._model.tensors)
        self.events.end_backward(committed)

    def advance(self) -> None:
        """Count a step that ended with its optimizer instead of its backward."""
        self.count += 1

    def restore(self, count: int) -> None:
        """Continue from a saved count."""
        self.count = count

    def _observed(
        self, step: _OpenTransaction, program: Program, bucket: Bucket, memory: Memory
    ) -> Collectives[torch.Tensor]:
        """Run the program, validate its outcome, and record the finiteness check, without a host read."""
        outcome = yield from program(bucket, _NO_MEMORY if program.stateless else step.staged(memory))
        check_outcome(program, outcome, bucket)
        step.finite.append(finite(outcome.mean) if outcome.finite is None else outcome.finite)
        return outcome.mean

    def _backward_computed(self) -> None:
        """Start counting exposed time, and queue `settle`; runs before DDP's final callback.

        A failure is raised after DDP's final callback, which would lose the exception's type. Under
        find_unused_parameters DDP waits there for a collective of its own. That collective would fail first,
        with an error that names no rank, so a failure is raised here instead.
        """
        self._engine.guard()
        if self._model.find_unused_parameters:
            self._engine.settle()
        queue_callback(self.settle)
