"""The strategy of averaged models: when to average, and what to do with the result.

`TrainingSteps` calls `begin` with a forward and `end` with the end of a step. The averager asks its
`Membership` for the exchanges that are due, and applies them when they have arrived: at once, or with overlap
some steps later. The replicas, and how tensors reach them, are the membership's concern.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from thinwire.checkpoint.averaged_state import checked, means_like, merge_averager_states, position
from thinwire.checkpoint.trees import copied
from thinwire.engine.meter import MODELS
from thinwire.engine.profiling import span
from thinwire.errors import AttachError, StateError
from thinwire.monitors.auditor import watched_all
from thinwire.programs.across_nodes import Within
from thinwire.programs.allreduce import Alone, Exact
from thinwire.programs.leftovers import carrying, set_aside
from thinwire.programs.memory import MODEL_SCOPE, Memory
from thinwire.programs.program import NO_EXCEPTIONS, Program
from thinwire.step.model import refuse_unfrozen
from thinwire.step.strategy import Context, Strategy
from thinwire.strategies.averaging.anchors import Anchors, restored
from thinwire.strategies.averaging.diloco import outer_step, pseudo_gradients
from thinwire.strategies.averaging.exchange import Contribution, check_finite
from thinwire.strategies.averaging.membership import FixedGroup, InFlight, Membership
from thinwire.strategies.averaging.policy import Averaging
from thinwire.strategies.averaging.replica import Replica, no_autograd
from thinwire.strategies.averaging.training_steps import TrainingSteps

_KEY = "averaging"


class Averager(Strategy):
    """The strategy of `Averaging`, with this rank's replica and its averages in flight.

    Constructing one is collective in a fixed group. It does not keep the model alive, and its thread ends
    with the model.
    """

    counts_backwards = False
    supports_join = False
    config: Averaging

    def __init__(self, config: Averaging, context: Context) -> None:
        super().__init__(config, context)
        memory = context.memory.scoped(MODEL_SCOPE)
        self.replica = Replica(context.model, context.optimizers(), config, memory)
        self._in_flight: list[InFlight] = []
        self._begun_at = context.steps.count
        self._training_steps: TrainingSteps | None = None
        self._broadcasts_buffers = False
        make = context.membership or FixedGroup
        self.membership: Membership = make(self.replica, self._contribution, context)
        try:
            self.reconfigure(config)
        except BaseException:
            self.membership.close()
            raise

    def start(self) -> None:
        """Register hooks on the model and its optimizers."""
        model = self.context.model
        self._begun_at = self.context.steps.count
        self._finalizer = model.on_gone(_let_go, self)
        self._broadcasts_buffers = model.broadcasts_buffers
        self._training_steps = TrainingSteps(model, self.replica.optimizers, self)
        self._set_broadcasts()

    def reconfigure(self, config: Averaging) -> None:
        """Switch to a changed configuration, and choose each parameter's programs."""
        # Averages in flight write residuals when they end. Later ones would be lost, as the caller sets aside
        # those of the programs so far.
        for flight in self._in_flight:
            flight.keep()
        self.config = self.replica.config = config
        loop = config.outer_loop
        self._gradient_exceptions = self.context.exceptions(config.gradients)
        self._model_exceptions = NO_EXCEPTIONS if loop is None else self.context.exceptions(loop.program)

    @property
    def step(self) -> int:
        """Training steps since this strategy started."""
        return self.context.steps.count - self._begun_at

    @property
    def warm(self) -> bool:
        """True during the warm-up, in which all gradients are exchanged and ranks hold the same model."""
        return self.step < self.config.warmup_steps

    @property
    def replicas_equal(self) -> bool:
        """True while all ranks hold the same model."""
        return self.warm

    @property
    def saves_model(self) -> bool:
        """True while `state_dict` contains this rank's parameters and buffers."""
        return not self.warm

    @property
    def replicas(self) -> tuple[str, ...]:
        """The names of the replicas in the last exchange."""
        return self.membership.replicas

    @property
    def exchanges(self) -> int:
        """The number of averages applied so far."""
        return self.replica.exchanges

    def wrap(self, program: Program) -> Program:
        """Return `program` in the warm-up, then a program that averages within groups or not at all."""
        if self.warm:
            return program
        return Alone() if self.config.within is None else Within(program, self.membership.neighbours)

    def exceptions(self) -> Mapping[str, Program]:
        """Return the parameters whose gradients use another program in this step, with that program."""
        alone = not self.warm and self.config.within is None
        return NO_EXCEPTIONS if alone else self._gradient_exceptions

    def end_backward(self, committed: bool) -> None:
        """Open a training step, which the optimizers' steps will end."""
        if self._training_steps is not None:
            self._training_steps.backward()

    def end_open_step(self) -> None:
        """End a step whose optimizer step the training loop skipped, as the next forward would."""
        if self._training_steps is not None:
            self._training_steps.cut_short()

    def begin_forward(self) -> None:
        """Take anchors from the parameters of the forward that has begun, which are equal on all ranks."""
        self.begin()

    def join(self) -> None:
        """Wait until this replica takes part in the others' exchanges."""
        with no_autograd():
            for flight in self.membership.join():
                self._apply(flight)

    def finalize(self) -> None:
        """Apply the averages in flight, then set all models to their exact mean. Collective."""
        self._synchronise(Memory())

    def _synchronise(self, memory: Memory) -> None:
        self.end_open_step()
        with no_autograd():
            while self._in_flight:
                self._apply_first()
            for flight in self.membership.synchronise(memory):
                self._apply(flight)

    def retire(self) -> None:
        """Synchronise models, optimizer states and loss scales, then stop averaging. Collective."""
        self.end_open_step()
        if not self.warm:
            self._synchronise(self.replica.memory)
        with no_autograd():
            self.membership.retire(trained_locally=not self.warm)
        self.close()
        wire = self.context.communicator
        self.context.steps.scales.share(lambda own: wire.rendezvous.gather("scales", own, wire.limit))

    def close(self) -> None:
        """Stop averaging without synchronising ranks."""
        if self._training_steps is not None:
            self._training_steps.remove()
            self._finalizer.detach()
            self.context.model.broadcasts_buffers = self._broadcasts_buffers
        self.membership.close()

    # Events of `TrainingSteps`

    def begin(self) -> None:
        """Join the other replicas, and take anchors while all hold the same parameters: after the warm-up."""
        refuse_unfrozen(self.replica.frozen, "it is not averaged", self.membership.to_unfreeze)
        self.join()
        if self.config.outer_loop is not None and not self.warm:
            self.replica.take_anchors()

    def stepped_late(self) -> None:
        """Record that this rank has changed its model since it was averaged."""
        if not self.warm:
            self.replica.window += 1

    def end(self) -> None:
        """Count a step, apply the averages that are due, and start new ones.

        A step that overflowed in the warm-up was skipped by all ranks, and does not count.
        """
        self.membership.check()
        steps = self.context.steps
        if self.warm and steps.overflowed:
            return
        steps.advance()
        since = self.step - self.config.warmup_steps
        if since == 0:
            self._set_broadcasts()
            self.context.settle_leftover()
            set_aside(self.context.memory)  # from here on gradients use other programs, or stay local
        if since <= 0:
            return
        self.replica.window += 1
        with span("averaging"), no_autograd():
            # Twice: an average in flight is applied before the next one of its fragment starts from the new
            # anchor, and without overlap the one that starts now is applied now.
            self._apply_due(since)
            averages = self.config.due(since)
            if averages:
                self._in_flight += self.membership.exchange(averages, since)
            self._apply_due(since)

    def _contribution(self, fragment: int, memory: Memory) -> Contribution:
        """Return what this replica contributes to the average of a fragment."""
        replica, loop = self.replica, self.config.outer_loop
        number = replica.exchanges // len(replica.fragments)
        if loop is None:
            # The parameters themselves. Exact means need no anchor, so local SGD costs no memory. Compressed,
            # they would lose the small differences that training makes. Differences to an anchor compress as
            # gradients do, and error feedback works on them.
            return Contribution(replica.parameters, Exact(), Memory(), number=number)
        if replica.anchors is None:
            raise AttachError("the optimizer has stepped, but the model ran no forward: call model(...)")
        delta = pseudo_gradients(replica.anchors, replica.parameters, fragment)
        audit = (replica.exchanges + len(self._in_flight)) // len(replica.fragments)
        findings = self.context.auditor.begin(audit)
        watched = watched_all(loop.program, self._model_exceptions, findings)
        program, exceptions = carrying(memory, *watched)
        return Contribution(delta, program, memory, exceptions, number, findings)

    def _apply_due(self, since: int) -> None:
        while self._in_flight and self._in_flight[0].due <= since:
            self._apply_first()

    def _apply_first(self) -> None:
        # Ctrl-C may interrupt the wait. The average then stays in flight, and a state that is saved by a
        # signal handler's flag contains it. Popped first, it would be lost on this rank alone.
        self._in_flight[0].keep()
        self._apply(self._in_flight.pop(0))

    def _apply(self, flight: InFlight) -> None:
        means, count, replica = flight.means(), self.context.steps.count, self.replica
        check_finite(means, count)
        fallback = self.context.auditor.conclude(flight.findings, count, MODELS)
        if fallback is not None:
            self.change(self.config.with_model_program(fallback))
        loop = self.config.outer_loop
        if replica.anchors is None or loop is None:
            replica.write(means)
        else:
            # A newcomer holds the old anchors, and has no steps of its own to keep. If it mixed them in, it
            # would differ from the new ones, and yet not be counted as a contributor to the next exchange.
            loop = loop if replica.window else replace(loop, mixing=0.0)
            outer_step(replica.anchors, replica.parameters, flight.fragment, means, loop, flight.contributors)
        replica.exchanges += 1
        if self.config.optimizer_state == "reset":
            replica.reset_optimizers(replica.fragments[flight.fragment])
        if flight.everyone and len(replica.fragments) == 1 and not (loop and loop.mixing):
            replica.window = 0
        self.membership.applied(flight)

    def _set_broadcasts(self) -> None:
        """Let DDP broadcast buffers in the warm-up only, if enabled. Later, averages share them."""
        self.context.model.broadcasts_buffers = self._broadcasts_buffers and self.warm

    # Saved state

    def state_dict(self) -> dict[str, Any]:
        """Return the averager's state, with parameters if ranks differ. Waits for the averages in flight."""
        self.end_open_step()
        for flight in self._in_flight:
            flight.keep()
        replica = self.replica
        saved = {
            "step": self.step,
            "window": replica.window,
            "used": replica.exchanges,
            "whole": replica.whole,
            # Making a DDP model copies rank 0's parameters to all ranks, and most jobs save rank 0's model
            # alone. Either would silently end a window early.
            "parameters": copied({} if self.warm else dict(replica.parameters)),
            "buffers": copied({} if self.warm else replica.buffers),
            "outer": None if replica.anchors is None else replica.anchors.state_dict(),
            "in_flight": [
                {"fragment": flight.fragment, "due": flight.due, "means": copied(flight.means())}
                for flight in self._in_flight
            ],
        }
        return {_KEY: saved, **self.membership.state_dict()}

    def merge(self, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Merge all ranks' entries. Models become their mean."""
        return {_KEY: merge_averager_states([entry.get(_KEY) for entry in entries])}

    def position(self, state: Mapping[str, Any]) -> str:
        """Describe the point of averaging at which a state was saved."""
        return position(state.get(_KEY))

    def prepare(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Validate a saved state, and return a function that applies it."""
        replica, warmup = self.replica, self.config.warmup_steps
        saved = checked(state.get(_KEY), replica.parameters, replica.buffers, replica.fragments, warmup)
        anchors = self._saved_anchors(saved)
        join = self.membership.prepare(state)
        in_flight = [
            InFlight(
                flight["fragment"],
                flight["due"],
                means=_returning(means_like(replica.parameters, flight["means"])),
                contributors=self.context.communicator.size,
            )
            for flight in saved["in_flight"]
        ]

        def take_over() -> None:
            self._begun_at = self.context.steps.count - saved["step"]
            replica.window, replica.exchanges, replica.whole = saved["window"], saved["used"], saved["whole"]
            replica.anchors, self._in_flight = anchors, in_flight
            with no_autograd():
                replica.write(saved["parameters"])
                buffers = replica.buffers
                for name, tensor in saved["buffers"].items():
                    buffers[name].copy_(tensor)
            self._set_broadcasts()
            join()

        return take_over

    def _saved_anchors(self, saved: Mapping[str, Any]) -> Anchors | None:
        since, outer, loop = saved["step"] - self.config.warmup_steps, saved["outer"], self.config.outer_loop
        overlap = 0 if loop is None else loop.overlap
        if any(since <= 0 or not 0 <= flight["due"] - since <= overlap for flight in saved["in_flight"]):
            raise StateError(f"an average in flight is not due within {overlap} steps of step {since}")
        if outer is None:
            if loop is not None and since > 0:
                raise StateError(f"the state has no anchors, but {since} steps since the warm-up")
            return None
        if loop is None:
            raise StateError("the state has anchors, which only DiLoCo keeps")
        return restored(self.replica.new_anchors, outer)


def _returning(means: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    return lambda: means


def _let_go(averager: Averager) -> None:
    """Close the averager of a deleted model, and release its parameters."""
    averager.close()
    averager.replica.forget_model()
    averager._in_flight.clear()
