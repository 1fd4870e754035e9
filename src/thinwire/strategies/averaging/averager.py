"""The strategy of averaged models. It wraps gradient programs, and starts and applies averages."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from thinwire.checkpoint.averaged_state import checked, means_like, merge_averager_states, position
from thinwire.checkpoint.trees import copied
from thinwire.engine.comm.group_communicator import GroupCommunicator
from thinwire.engine.meter import MODELS
from thinwire.engine.profiling import span
from thinwire.errors import AttachError, StateError
from thinwire.monitors.auditor import watched_all
from thinwire.monitors.replicas import compare_replicas, fingerprints
from thinwire.programs.across_nodes import Within
from thinwire.programs.allreduce import Alone, Exact
from thinwire.programs.leftovers import WithLeftovers, carrying, set_aside
from thinwire.programs.memory import MODEL_SCOPE, Memory
from thinwire.programs.program import NO_EXCEPTIONS, Program
from thinwire.step.model import refuse_unfrozen
from thinwire.step.strategy import Context, Strategy
from thinwire.strategies.averaging.anchors import Anchors, restored, split_evenly
from thinwire.strategies.averaging.exchange import ModelExchange, check_finite
from thinwire.strategies.averaging.exchange_id import ExchangeId
from thinwire.strategies.averaging.in_flight import InFlight, keep, kept
from thinwire.strategies.averaging.local_parts import LocalParts, no_autograd
from thinwire.strategies.averaging.peers import AveragingGroup
from thinwire.strategies.averaging.policy import Average, Averaging
from thinwire.strategies.averaging.shared_state import mean_of_states, one_state, reset_states, share_buffers
from thinwire.strategies.averaging.training_steps import TrainingSteps

_KEY = "averaging"


class Averager(Strategy):
    """The strategy of `Averaging`, with the anchors and the averages in flight of one model.

    Constructing one is collective. It does not keep the model alive, and its thread ends with the model.
    """

    counts_backwards = False
    supports_join = False
    config: Averaging

    def __init__(self, config: Averaging, context: Context) -> None:
        super().__init__(config, context)
        model = context.model
        self._optimizers = context.optimizers()
        trained = {name: one for name, one in model.parameters().items() if one.requires_grad}
        self._parameters = LocalParts(trained)
        self._frozen = {name: one for name, one in model.parameters().items() if not one.requires_grad}
        loop = config.outer_loop
        sizes = {name: one.numel() for name, one in self._parameters.items()}
        self._fragments = split_evenly(sizes, 1 if loop is None else loop.fragments)
        self._memory = context.memory.scoped(MODEL_SCOPE)
        self._anchors: Anchors | None = None
        self._in_flight: list[InFlight] = []
        self._used = 0  # averages used so far
        self._whole = 0  # times that all of the model was averaged among all ranks
        self._diverged = False
        self._begun_at = context.steps.count
        self._training_steps: TrainingSteps | None = None
        self._broadcasts_buffers = False
        communicator = GroupCommunicator(model.group, context.communicator.limit)
        communicator.open()
        try:
            self._peers = AveragingGroup(
                config, model.group, communicator, context.steps, context.engine.meter, model.device
            )
            self.reconfigure(config)
        except BaseException:
            communicator.close()
            raise

    def start(self) -> None:
        """Register hooks on the model and its optimizers."""
        model = self.context.model
        self._begun_at = self.context.steps.count
        self._finalizer = model.on_gone(_let_go, self)
        self._broadcasts_buffers = model.broadcasts_buffers
        self._training_steps = TrainingSteps(model, self._optimizers, self)
        self._set_broadcasts()

    def reconfigure(self, config: Averaging) -> None:
        """Switch to a changed configuration, and choose each parameter's programs."""
        # Averages in flight write residuals when they end. Later ones would be lost, as the caller sets aside
        # those of the programs so far.
        for flight in self._in_flight:
            keep(flight)
        self.config = config
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

    def wrap(self, program: Program) -> Program:
        """Return `program` in the warm-up, then a program that averages within groups or not at all."""
        if self.warm:
            return program
        return Alone() if self.config.within is None else Within(program, self._peers.neighbours)

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

    def finalize(self) -> None:
        """Apply the averages in flight, then set all models to their exact mean. Collective."""
        self._synchronise(Memory())

    def _synchronise(self, memory: Memory) -> None:
        """Set all models to the exact mean of parameters, less the residuals of a memory, which it drops.

        A residual is a part of this rank's pseudo-gradients, anchor - parameters, that was not yet averaged.
        """
        self.end_open_step()
        everyone = self._peers.everyone
        with no_autograd():
            while self._in_flight:
                self._use_first()
            set_aside(memory)
            if not self._peers.any_diverged(self._diverged or memory.has_leftovers):
                return
            program = WithLeftovers(Exact(), sign=-1)
            means = self._exchange(None, self._parameters, program, memory, everyone).means()
            check_finite(means, self.context.steps.count)
            self._copy_in(means)
            self._share_buffers(everyone)
            if self._anchors is not None:
                self._anchors.move_to(self._parameters)
            self._diverged = False

    def retire(self) -> None:
        """Synchronise models, optimizer states and loss scales, then stop averaging. Collective."""
        self.end_open_step()
        everyone, communicator = self._peers.everyone, self._peers.communicator
        if not self.warm:
            self._synchronise(self._memory)
            with no_autograd():
                held = [self._parameters.whole[name] for names in self._fragments for name in names]
                states = one_state(held, self._optimizers, len(everyone))
                self._peers.run(states, everyone, "optimizer state")
        # A rank that closes its connections first could cut off another's last collective.
        communicator.rendezvous.gather("retire", "", communicator.limit)
        self.close()
        wire = self.context.communicator
        self.context.steps.scales.share(lambda own: wire.rendezvous.gather("scales", own, wire.limit))

    def close(self) -> None:
        """Stop averaging without synchronising ranks."""
        if self._training_steps is not None:
            self._training_steps.remove()
            self._finalizer.detach()
            self.context.model.broadcasts_buffers = self._broadcasts_buffers
        self._peers.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the averager's state, with parameters if ranks differ. Waits for the averages in flight."""
        self.end_open_step()
        for flight in self._in_flight:
            keep(flight)
        saved = {
            "step": self.step,
            "apart": self._diverged,
            "used": self._used,
            "whole": self._whole,
            "parameters": copied({} if self.warm else dict(self._parameters)),
            "buffers": copied({} if self.warm else self.context.model.buffers()),
            "outer": None if self._anchors is None else self._anchors.state_dict(),
            "in_flight": [
                {"fragment": flight.fragment, "due": flight.due, "means": copied(flight.means())}
                for flight in self._in_flight
            ],
        }
        return {_KEY: saved}

    def merge(self, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Merge all ranks' entries. Models become their mean."""
        return {_KEY: merge_averager_states([each.get(_KEY) for each in entries])}

    def position(self, state: Mapping[str, Any]) -> str:
        """Describe the point of averaging at which a state was saved."""
        return position(state.get(_KEY))

    def prepare(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Validate a saved state, and return a function that applies it."""
        buffers, warmup = self.context.model.buffers(), self.config.warmup_steps
        saved = checked(state.get(_KEY), self._parameters, buffers, self._fragments, warmup)
        anchors = self._saved_anchors(saved)
        in_flight = [
            kept(
                one["fragment"], one["due"], self._peers.everyone, means_like(self._parameters, one["means"])
            )
            for one in saved["in_flight"]
        ]

        def take_over() -> None:
            self._begun_at = self.context.steps.count - saved["step"]
            self._diverged, self._used, self._whole = saved["apart"], saved["used"], saved["whole"]
            self._anchors, self._in_flight = anchors, in_flight
            with no_autograd():
                for name, tensor in saved["parameters"].items():
                    self._parameters[name].copy_(tensor)
                for name, tensor in saved["buffers"].items():
                    buffers[name].copy_(tensor)
            self._set_broadcasts()

        return take_over

    def _saved_anchors(self, saved: Mapping[str, Any]) -> Anchors | None:
        since, outer, loop = saved["step"] - self.config.warmup_steps, saved["outer"], self.config.outer_loop
        overlap = 0 if loop is None else loop.overlap
        if any(since <= 0 or not 0 <= one["due"] - since <= overlap for one in saved["in_flight"]):
            raise StateError(f"an average in flight is not due within {overlap} steps of step {since}")
        if outer is None:
            if loop is not None and since > 0:
                raise StateError(f"the state has no anchors, but {since} steps since the warm-up")
            return None
        if loop is None:
            raise StateError("the state has anchors, which only DiLoCo keeps")
        return restored(self._new_anchors, outer)

    # Events of `TrainingSteps`

    def begin(self) -> None:
        """Take anchors in the first forward after the warm-up, while ranks hold the same parameters."""
        refuse_unfrozen(
            self._frozen,
            "it is not averaged",
            "call wire.swap(wire.program) after unfreezing it, on every rank",
        )
        if self._anchors is None and self.config.outer_loop is not None and not self.warm:
            self._anchors = self._new_anchors()

    def stepped_late(self) -> None:
        """Record that this rank has changed its model since it was averaged."""
        self._diverged = not self.warm

    def end(self) -> None:
        """Count a step, apply the averages that are due, and start new ones.

        A step that overflowed in the warm-up was skipped by all ranks, and does not count.
        """
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
        self._peers.engine.check()
        self._diverged = True
        with span("averaging"), no_autograd():
            self._use_due(since)
            for average in self.config.due(since):
                self._start(average, since)
            self._use_due(since)

    def _use_due(self, since: int) -> None:
        while self._in_flight and self._in_flight[0].due <= since:
            self._use_first()

    def _use_first(self) -> None:
        keep(self._in_flight[0])  # if the wait is interrupted, it stays in flight
        self._use(self._in_flight.pop(0))

    def _exchange(
        self,
        fragment: int | None,
        tensors: Mapping[str, torch.Tensor],
        program: Program,
        memory: Memory,
        ranks: tuple[int, ...],
        exceptions: Mapping[str, Program] = NO_EXCEPTIONS,
    ) -> ModelExchange:
        """Start to average tensors. The programs' step is the number of whole-model exchanges."""
        window = self._used // len(self._fragments)
        point = ExchangeId(self.context.steps.count, fragment)
        return self._peers.exchange(point, tensors, program, memory, ranks, window, exceptions)

    def _start(self, average: Average, since: int) -> None:
        fragment, ranks, loop = average.fragment, self._peers.of(average), self.config.outer_loop
        findings = None
        if loop is None:
            exchange = self._exchange(fragment, self._parameters, Exact(), Memory(), ranks)
        else:
            if self._anchors is None:
                raise AttachError("the optimizer has stepped, but the model ran no forward: call model(...)")
            changes = self._anchors.pseudo_gradients(fragment, self._parameters)
            number = (self._used + len(self._in_flight)) // len(self._fragments)
            findings = self.context.auditor.begin(number)
            programs = watched_all(loop.program, self._model_exceptions, findings)
            program, exceptions = carrying(self._memory, *programs)
            exchange = self._exchange(fragment, changes, program, self._memory, ranks, exceptions)
        due = since + (0 if loop is None else loop.overlap)
        self._in_flight.append(InFlight(fragment, due, ranks, exchange.means, findings))

    def _use(self, flight: InFlight) -> None:
        means, names = flight.means(), self._fragments[flight.fragment]
        check_finite(means, self.context.steps.count)
        count, loop = self.context.steps.count, self.config.outer_loop
        fallback = self.context.auditor.conclude(flight.findings, count, MODELS)
        if fallback is not None:
            self.change(self.config.with_model_program(fallback))
        mixing = 0.0
        if self._anchors is None or loop is None:
            self._copy_in(means)
        else:
            mixing = loop.mixing
            if loop.tuning is not None:
                self._anchors.tune(flight.fragment, loop.tuning(len(self._peers.everyone)))
            self._anchors.step(flight.fragment, means)
            self._copy_in({name: self._anchors[name] for name in names}, mixing)
        everyone = flight.ranks == self._peers.everyone
        self._used += 1
        self._share_optimizer_state(names, flight.ranks)
        if flight.fragment == len(self._fragments) - 1:
            self._share_buffers(flight.ranks)
        if everyone and len(self._fragments) == 1 and not mixing:
            self._diverged = False
        if everyone and flight.fragment == len(self._fragments) - 1:
            self._whole += 1
            if self.context.check_every and self._whole % self.context.check_every == 0:
                self._compare()

    def _copy_in(self, tensors: Mapping[str, torch.Tensor], mixing: float = 0.0) -> None:
        """Write parameters in place, so that views and memory layouts stay valid."""
        for name, tensor in tensors.items():
            parameter = self._parameters[name]
            if mixing:
                parameter.copy_(tensor.lerp(parameter.to(tensor.dtype), mixing))
            else:
                parameter.copy_(tensor)

    def _share_optimizer_state(self, names: Sequence[str], ranks: tuple[int, ...]) -> None:
        parameters = [self._parameters.whole[name] for name in names]
        if self.config.optimizer_state == "reset":
            reset_states(parameters, self._optimizers)
        elif self.config.optimizer_state == "mean":
            states = mean_of_states(parameters, self._optimizers, len(ranks))
            self._peers.run(states, ranks, "optimizer state")

    def _share_buffers(self, ranks: tuple[int, ...]) -> None:
        buffers, how = list(self.context.model.buffers().values()), self.config.buffers
        if buffers and how != "local":
            self._peers.run(share_buffers(buffers, how, len(ranks)), ranks, "buffers")

    def _compare(self) -> None:
        """Compare across ranks the anchors, or the parameters that were just averaged."""
        held, names = self._parameters if self._anchors is None else self._anchors, list(self._parameters)
        own = fingerprints(held[name] for name in names)
        everyone = self._peers.everyone
        ranks = self._peers.engine.world_ranks(everyone)
        check = compare_replicas(names, own, self.context.steps.count, ranks)
        self._peers.run(check, everyone, "the comparison of replicas")

    def _new_anchors(self) -> Anchors:
        loop = self.config.outer_loop
        assert loop is not None, "only an outer loop has anchors"
        return Anchors(self._parameters, self._fragments, loop.optimizer)

    def _set_broadcasts(self) -> None:
        """Let DDP broadcast buffers in the warm-up only, if enabled. Later, averages share them."""
        self.context.model.broadcasts_buffers = self._broadcasts_buffers and self.warm

    def _forget_model(self) -> None:
        self._parameters, self._frozen, self._optimizers = LocalParts({}), {}, []
        self._anchors, self._in_flight = None, []


def _let_go(averager: Averager) -> None:
    """Close the averager of a deleted model, and release its parameters."""
    averager.close()
    averager._forget_model()
