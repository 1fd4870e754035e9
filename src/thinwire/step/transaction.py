"""A model's training steps: each is opened by its first bucket, and committed or rolled back as a whole."""

import logging
from collections.abc import Callable, Sequence

import torch

from thinwire.amp.loss_scale import Scales, Units
from thinwire.engine.engine import Engine
from thinwire.engine.meter import StepTrace
from thinwire.engine.ops import Collectives
from thinwire.errors import ThinwireError
from thinwire.programs.finite import all_true, finite
from thinwire.programs.memory import Memory, NoMemory, Staged
from thinwire.programs.program import Bucket, Program, check_outcome
from thinwire.step.model import Model
from thinwire.step.skip_overflows import Skipping

logger = logging.getLogger("thinwire")

_NO_MEMORY = NoMemory()
"""The memory of stateless programs. They keep nothing, so nothing needs to be staged."""


class OpenTransaction:
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

    def observed(self, program: Program, bucket: Bucket, memory: Memory) -> Collectives[torch.Tensor]:
        """Run a program, validate its outcome, and record whether its mean is finite.

        The flag stays a tensor, because reading it here would make backward wait for the wire.

        Args:
            program: The program.
            bucket: The gradients.
            memory: The tensors that the program keeps between steps.

        Returns:
            The mean.
        """
        outcome = yield from program(bucket, _NO_MEMORY if program.stateless else self.staged(memory))
        check_outcome(program, outcome, bucket)
        self.finite.append(finite(outcome.mean) if outcome.finite is None else outcome.finite)
        return outcome.mean

    @property
    def keeps_state(self) -> bool:
        """True if a program keeps tensors between steps."""
        return bool(self._memories)

    def commit(self, unused: set[str]) -> None:
        """Commit the step's changes of all memories, except those of parameters that no rank used."""
        for memory in self._memories.values():
            memory.commit(unused)

    def roll_back(self) -> None:
        """Discard the step's changes of all memories, and call the `undo` callbacks."""
        # An overflow in the last bucket undoes changes of the first one's residuals. They were written to
        # second copies: undoing the arithmetic would not be exact, and a snapshot would cost a pass in every
        # step.
        for memory in self._memories.values():
            memory.forget()
        for undo in self.undo:
            undo()


class Steps:
    """A model's training steps, one transaction at a time, and the only writer of their count.

    A step counts as a whole or not at all. All ranks agree on whether a mean is non-finite. If so, all
    gradients become NaN, so that a GradScaler detects it on every rank, and memories and counts stay as
    before the step.

    Args:
        engine: Runs the programs of the steps.
        model: The model whose gradients they average.
        scales: The GradScaler that determines the scale of residuals.
    """

    def __init__(self, engine: Engine, model: Model, scales: Scales) -> None:
        self.count = 0
        """Number of committed steps, without accumulation under `no_sync`."""
        self.overflowed = False
        """Whether the latest step was rolled back."""
        self.scales = scales
        self.skipping = Skipping()
        """The optimizer steps that follow overflows."""
        self._engine = engine
        self._model = model
        self._open: OpenTransaction | None = None
        if not model.reduces_gradients:
            # No backward is settled, so gradients are checked when an optimizer steps.
            self.skipping.checks_every_step, self.skipping.on_overflow = True, self._overflow_alone

    @property
    def is_open(self) -> bool:
        """True from the start of a step until its last bucket arrives."""
        return self._open is not None and not self._open.closed

    @property
    def unsettled(self) -> bool:
        """True from the start of a step until it is committed or rolled back."""
        return self._open is not None

    def open(self) -> None:
        """Begin a step, with its first bucket."""
        self.skipping.in_backward = True
        self._open = OpenTransaction(lambda: self.scales.units(self.overflowed))

    @property
    def current(self) -> OpenTransaction:
        """The open step."""
        assert self._open is not None, "open() comes first"
        return self._open

    def settle(self, agree_finite: Callable[[torch.Tensor], torch.Tensor], counts: bool) -> bool | None:
        """Wait for the latest step, then commit it or roll it back.

        Args:
            agree_finite: Returns whether the means are finite on all ranks, given whether this rank's are.
            counts: Whether a committed backward counts as a step.

        Returns:
            Whether the step was committed; None if there was none.

        Raises:
            WireError: A collective failed, and the step was rolled back.
            ProgramError: A program failed, and the step was rolled back.
        """
        step = self._open
        # Ctrl-C may interrupt the wait, in which the other ranks go on. `_open` is still set then, so that
        # the next call here settles the step as they have: with the same collectives, and the same count.
        try:
            self._engine.settle()
            committed, used = (True, ()) if step is None else self._read(step, agree_finite)
        except ThinwireError:
            self._open, self.skipping.in_backward = None, False
            if step is not None:
                step.roll_back()
            raise
        self._open, self.skipping.in_backward = None, False
        if step is None:
            return None
        self.overflowed = not committed
        if committed:
            # DDP drops the means of parameters that no rank used, so their residuals must not change either.
            step.commit(self._model.unused(used) if used else set())
            self.count += counts
        else:
            # The count stays too: seeds, warm-ups and schedules depend on it, so that training after this
            # step equals training without it, bit by bit.
            logger.info("step %d overflowed on some rank: it is rolled back on all", self.count)
            step.roll_back()
            self._engine.meter.overflowed()
            # All of them, as a GradScaler checks each optimizer's own parameters. An optimizer that stepped
            # while another skipped would apply a mean whose residuals were rolled back.
            self._model.spoil_gradients()
        self.skipping.settled(self.count, committed, self._model.tensors)
        return committed

    def _read(
        self, step: OpenTransaction, agree_finite: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[bool, Sequence[int]]:
        """Return whether all means are finite, and how many ranks used each parameter if that matters.

        This is the step's only read on the host. No extra collective is needed where all ranks have the same
        means: each detects the overflow by itself.

        It is not taken a step later, although that would let an accelerator's host run ahead. The optimizer's
        kernels would be queued behind collectives that a lost rank never ends. Raising an error for it aborts
        these, and then the kernels would run on whatever is in the gradients.
        """
        finite = agree_finite(all_true(step.finite))
        used = self._model.use_counts() if step.keeps_state else None
        if used is None:
            return bool(finite.item()), ()
        if finite.device != used.device:  # ZeRO has read the flag already, and returns it on the CPU
            return bool(finite.item()), used.tolist()
        flag, *counts = torch.cat([finite.view(1), used]).tolist()
        return bool(flag), counts

    def advance(self) -> None:
        """Count a step that ended with its optimizer instead of its backward."""
        if not self._model.reduces_gradients:  # no backward has recorded the step
            self._engine.meter.add(StepTrace(self.count, 0, 1).finish(0.0, timed=True))
            if self.overflowed:
                self._engine.meter.overflowed()
                self.overflowed = False
        self.count += 1

    def restore(self, count: int) -> None:
        """Continue from a saved count."""
        self.count = count

    def _overflow_alone(self) -> None:
        """Record that an optimizer skips its step, because gradients are non-finite on this rank."""
        if not self.overflowed:
            logger.info("step %d overflowed on this rank, which alone skips it", self.count)
        self.overflowed = True
