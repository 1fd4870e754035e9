"""Runs a way of averaging: counts steps, says what becomes of gradients, and averages when it is time."""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from thinwire.averaging.anchors import Anchors, restored, split_evenly
from thinwire.averaging.beside import mean_of_states, one_state, reset_states, share_buffers
from thinwire.averaging.diloco import DiLoCo
from thinwire.averaging.exchange import Exchange
from thinwire.averaging.flights import InFlight, Models, keep, kept
from thinwire.averaging.gradients import Alone, Within
from thinwire.averaging.groups import members_of
from thinwire.averaging.policy import Average, Averaging
from thinwire.averaging.rounds import Rounds
from thinwire.averaging.saved import checked, cloned, means_like
from thinwire.errors import AttachError, DivergedError, StateError
from thinwire.programs.allreduce import Exact
from thinwire.programs.auditor import watched_all
from thinwire.programs.memory import Memory
from thinwire.programs.overflow import all_finite
from thinwire.programs.program import NO_EXCEPTIONS, Program
from thinwire.programs.replicas import compare_replicas, fingerprints
from thinwire.wire.communicator import Communicator
from thinwire.wire.engine import Engine
from thinwire.wire.meter import MODELS, Meter
from thinwire.wire.ops import Steps, among


class Averager:
    """Owns the count of steps, the gradient policy, the anchors and the averages under way.

    Making one is collective. It does not keep the model alive; its thread ends with the model.
    """

    def __init__(
        self,
        policy: Averaging,
        ddp: DistributedDataParallel,
        parameters: Mapping[str, torch.nn.Parameter],
        optimizers: Sequence[Optimizer],
        communicator: Communicator,
        meter: Meter,
        memory: Memory,
        check_every: int,
        exceptions: Mapping[str, Program],
        audits: Models,
    ) -> None:
        self.step = 0
        """Training steps that are over."""
        self.policy = policy
        self._optimizers: Sequence[Optimizer] = optimizers
        self._ddp = weakref.ref(ddp)
        self._broadcasts_buffers = False
        self._check_every = check_every
        self._parameters = {name: one for name, one in parameters.items() if one.requires_grad}
        self._frozen = {name: one for name, one in parameters.items() if not one.requires_grad}
        count = policy.fragments if isinstance(policy, DiLoCo) else 1
        sizes = {name: one.numel() for name, one in self._parameters.items()}
        self._fragments = split_evenly(sizes, count)
        self._memory = memory
        self._exceptions = exceptions
        self._audits = audits
        self._anchors: Anchors | None = None
        self._in_flight: list[InFlight] = []
        self._used = 0  # averages so far
        self._whole = 0  # times that all of the model was averaged among all ranks
        self._apart = False
        self._communicator = communicator
        self._everybody = tuple(range(communicator.size))
        self._place = (communicator.rank, communicator.size)
        self._neighbours = members_of(policy.within, communicator, ddp.process_group)
        self._members = {
            groups: members_of(groups, communicator, ddp.process_group) for groups in policy.groups()
        }
        device = next(iter(parameters.values())).device
        self._engine = Engine(communicator, device=device, meter=meter, purpose=MODELS)
        self._rounds: Rounds | None = None

    def start(self, bridge_engine: Engine, overflowed: Callable[[], bool]) -> None:
        """Listen to the model and its optimizers from now on.

        All ranks count the same steps, but not the same backward passes (closures run as many as they like):
        the engine of gradients is told.
        """
        ddp = self._ddp()
        assert ddp is not None, "attach holds it"
        self._finalizer = weakref.finalize(ddp, _let_go, self)
        self._broadcasts_buffers = ddp.broadcast_buffers
        self._gradients, self._begun_at = bridge_engine, bridge_engine.step
        self._overflowed = overflowed
        self._rounds = Rounds(ddp, self._optimizers, self)
        self._set_broadcasts()

    @property
    def warm(self) -> bool:
        """Whether all gradients are still exchanged, so that ranks hold the same model."""
        return self.step < self.policy.warmup_steps

    def gradient_program(self, program: Program) -> Program:
        """What becomes of gradients that would go by `program`, in the step under way."""
        if self.warm:
            return program
        return Alone() if self.alone else Within(program, self._neighbours)

    @property
    def alone(self) -> bool:
        """Whether each rank keeps its own gradients now."""
        return not self.warm and self.policy.within is None

    def backward_ended(self) -> None:
        """All gradients of a step have been taken in."""
        if self._rounds is not None:
            self._rounds.backward()

    def end_open_step(self) -> None:
        """End a step that the training loop has left out, as its next forward would."""
        if self._rounds is not None:
            self._rounds.cut_short()

    def finalize(self) -> None:
        """Bring all ranks to one model: use what is under way, then the exact mean of what they hold."""
        self.end_open_step()
        with _quietly():
            while self._in_flight:
                self._use_first()
            if not self._apart:
                return
            means = self._exchange(self._parameters, Exact(), Memory(), self._everybody).means()
            self._check_finite(means)
            self._copy_in(means)
            self._share_buffers(self._everybody)
            if self._anchors is not None:
                self._anchors.move_to(self._parameters)
            self._apart = False

    def retire(self) -> None:
        """Leave all ranks with one model and one optimizer state, and stop averaging."""
        self.end_open_step()
        if not self.warm:
            self.finalize()
            with _quietly():
                held = [self._parameters[name] for names in self._fragments for name in names]
                states = one_state(held, self._optimizers, len(self._everybody))
                self._run(states, self._everybody, "optimizer state")
        # A rank that hangs up first could cut off another's last collective.
        self._communicator.meeting.gather("retire", "", self._communicator.limit)
        self.close()

    def close(self) -> None:
        """Stop averaging, whatever ranks hold."""
        ddp = self._ddp()
        if self._rounds is not None:
            self._rounds.remove()
            self._finalizer.detach()
            if ddp is not None:
                ddp.broadcast_buffers = self._broadcasts_buffers
        self._engine.close()

    def state_dict(self) -> dict[str, Any]:
        """All of it, this rank's parameters included where ranks differ; waits for what is under way."""
        self.end_open_step()
        for flight in self._in_flight:
            keep(flight)
        return {
            "step": self.step,
            "apart": self._apart,
            "used": self._used,
            "whole": self._whole,
            "parameters": cloned({} if self.warm else dict(self._parameters)),
            "buffers": cloned({} if self.warm else self._buffers()),
            "outer": None if self._anchors is None else self._anchors.state_dict(),
            "in_flight": [
                {"fragment": flight.fragment, "due": flight.due, "means": cloned(flight.means())}
                for flight in self._in_flight
            ],
        }

    def prepare(self, state: object) -> Callable[[], None]:
        """Check a saved state; what is returned takes it over. StateError, and nothing changed, if unfit."""
        saved = checked(state, self._parameters, self._buffers(), self._fragments, self.policy.warmup_steps)
        anchors = self._saved_anchors(saved)
        under_way = [means_like(self._parameters, one["means"]) for one in saved["in_flight"]]

        def take_over() -> None:
            self.step, self._apart = saved["step"], saved["apart"]
            self._used, self._whole = saved["used"], saved["whole"]
            self._anchors = anchors
            self._begun_at = self._gradients.step - self.step
            with _quietly():
                for name, tensor in saved["parameters"].items():
                    self._parameters[name].copy_(tensor)
                for name, tensor in saved["buffers"].items():
                    self._buffers()[name].copy_(tensor)
            self._in_flight = [
                kept(one["fragment"], one["due"], self._everybody, means)
                for one, means in zip(saved["in_flight"], under_way, strict=True)
            ]
            self._set_broadcasts()

        return take_over

    def _saved_anchors(self, saved: Mapping[str, Any]) -> Anchors | None:
        since, outer = saved["step"] - self.policy.warmup_steps, saved["outer"]
        overlap = self.policy.overlap if isinstance(self.policy, DiLoCo) else 0
        if any(since <= 0 or not 0 <= one["due"] - since <= overlap for one in saved["in_flight"]):
            raise StateError(f"an average under way is not due within {overlap} steps of step {since}")
        if outer is None:
            if isinstance(self.policy, DiLoCo) and since > 0:
                raise StateError(f"the state has no anchors, but {since} steps since the warm-up")
            return None
        if not isinstance(self.policy, DiLoCo):
            raise StateError("the state has anchors, which only DiLoCo keeps")
        return restored(self._new_anchors, outer)

    def begin(self) -> None:
        """A forward: parameters are what all ranks have, unless some steps were taken already."""
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise AttachError(
                    f"parameter {name!r} was frozen when the wire was attached, so it is not averaged, and"
                    " now it trains: call wire.swap(wire.program) after unfreezing it, on every rank"
                )
        if self._anchors is None and isinstance(self.policy, DiLoCo) and not self.warm:
            self._anchors = self._new_anchors()

    def stepped_late(self) -> None:
        """This rank has changed its model since it was averaged."""
        self._apart = not self.warm

    def end(self) -> None:
        """A step is over: use what is due, start what is due.

        One that overflowed while all gradients are exchanged was skipped by all, and does not count.
        """
        if self.warm and self._overflowed():
            return
        self.step += 1
        self._gradients.step = self._begun_at + self.step
        since = self.step - self.policy.warmup_steps
        if since == 0:
            self._set_broadcasts()
        if since <= 0:
            return
        self._engine.check()
        self._apart = True
        with _quietly():
            self._use_due(since)
            for average in self.policy.due(since):
                self._start(average, since)
            self._use_due(since)

    def _use_due(self, since: int) -> None:
        while self._in_flight and self._in_flight[0].due <= since:
            self._use_first()

    def _use_first(self) -> None:
        keep(self._in_flight[0])  # interrupted while it waits, it is still under way
        self._use(self._in_flight.pop(0))

    def _start(self, average: Average, since: int) -> None:
        ranks = self._everybody if average.among is None else self._members[average.among]
        if isinstance(self.policy, DiLoCo):
            if self._anchors is None:
                raise AttachError(
                    "the optimizer has stepped, but the DDP model ran no forward: call ddp(...)"
                )
            changes = self._anchors.pseudo_gradients(average.fragment, self._parameters)
            window = (self._used + len(self._in_flight)) // len(self._fragments)
            overlap, findings = self.policy.overlap, self._audits.begin(window)
            program, exceptions = watched_all(self.policy.program, self._exceptions, findings)
            exchange = self._exchange(changes, program, self._memory, ranks, exceptions)
        else:
            exchange, overlap = self._exchange(self._parameters, Exact(), Memory(), ranks), 0
            findings = None
        flight = InFlight(average.fragment, since + overlap, ranks, exchange.means, findings)
        self._in_flight.append(flight)

    def _exchange(
        self,
        tensors: Mapping[str, torch.Tensor],
        program: Program,
        memory: Memory,
        ranks: tuple[int, ...],
        exceptions: Mapping[str, Program] = NO_EXCEPTIONS,
    ) -> Exchange:
        self._engine.step = self.step
        window = self._used // len(self._fragments)
        return Exchange(self._engine, tensors, program, memory, ranks, self._place, window, exceptions)

    def _use(self, flight: InFlight) -> None:
        means, names = flight.means(), self._fragments[flight.fragment]
        self._check_finite(means)
        fallback = self._audits.conclude(flight.findings, self._gradients.step)
        if fallback is not None:
            self.policy = fallback
        mixing = 0.0
        if self._anchors is None:
            self._copy_in(means)
        else:
            assert isinstance(self.policy, DiLoCo), "nobody else has anchors"
            mixing = self.policy.mixing or 0.0
            self._anchors.step(flight.fragment, means)
            self._copy_in({name: self._anchors[name] for name in names}, mixing)
        everybody = flight.ranks == self._everybody
        self._used += 1
        self._share_optimizer_state(names, flight.ranks)
        if flight.fragment == len(self._fragments) - 1:
            self._share_buffers(flight.ranks)
        if everybody and len(self._fragments) == 1 and not mixing:
            self._apart = False
        if everybody and flight.fragment == len(self._fragments) - 1:
            self._whole += 1
            if self._check_every and self._whole % self._check_every == 0:
                self._compare()

    def _check_finite(self, means: Mapping[str, torch.Tensor]) -> None:
        for name, mean in means.items():
            if not all_finite(mean):
                raise DivergedError(
                    f"after step {self.step} the ranks' average of {name!r} is not finite: a rank's model"
                    " holds inf or NaN; go back to the last checkpoint, and lower the learning rate or clip"
                )

    def _copy_in(self, tensors: Mapping[str, torch.Tensor], mixing: float = 0.0) -> None:
        """Parameters in place: never bound to other memory, so views and layouts stay."""
        for name, tensor in tensors.items():
            parameter = self._parameters[name]
            if mixing:
                parameter.copy_(tensor.lerp(parameter.to(tensor.dtype), mixing))
            else:
                parameter.copy_(tensor)

    def _share_optimizer_state(self, names: Sequence[str], ranks: tuple[int, ...]) -> None:
        parameters = [self._parameters[name] for name in names]
        if self.policy.optimizer_state == "reset":
            reset_states(parameters, self._optimizers)
        elif self.policy.optimizer_state == "mean":
            self._run(mean_of_states(parameters, self._optimizers, len(ranks)), ranks, "optimizer state")

    def _share_buffers(self, ranks: tuple[int, ...]) -> None:
        buffers = list(self._buffers().values())
        if buffers and self.policy.buffers != "local":
            self._run(share_buffers(buffers, self.policy.buffers, len(ranks)), ranks, "buffers")

    def _compare(self) -> None:
        """What all ranks must hold alike: anchors, or parameters that were just averaged."""
        held, names = self._parameters if self._anchors is None else self._anchors, list(self._parameters)
        own = fingerprints(held[name] for name in names)
        self._run(compare_replicas(names, own, self.step, active=True), self._everybody, "the comparison")

    def _run(self, steps: Steps[torch.Tensor], ranks: tuple[int, ...], label: str) -> None:
        """Run a program by itself, and wait for it."""
        self._engine.step = self.step
        instead = torch.zeros(0, device=self._parameters[self._fragments[0][0]].device)
        job = steps if ranks == self._everybody else among(ranks, steps)
        future = self._engine.submit(job, label=label, last=True, instead=instead)
        self._engine.guard()
        self._engine.settle()
        future.wait()

    def _new_anchors(self) -> Anchors:
        assert isinstance(self.policy, DiLoCo)
        return Anchors(self._parameters, self._fragments, self.policy.outer)

    def _buffers(self) -> dict[str, torch.Tensor]:
        ddp = self._ddp()
        assert ddp is not None, "hooks end with the model"
        return {
            name: buffer
            for name, buffer in ddp.module.named_buffers()
            if name not in ddp.parameters_to_ignore
        }

    def _set_broadcasts(self) -> None:
        """In the warm-up DDP broadcasts buffers as it was told; afterwards that is our affair."""
        ddp = self._ddp()
        if ddp is not None:
            ddp.broadcast_buffers = self._broadcasts_buffers and self.warm


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Unseen by autograd, and with tensors that training can go on with, wherever it is called from."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _let_go(averager: Averager) -> None:
    """The model is gone: keep none of its parameters."""
    averager.close()
    averager._parameters, averager._frozen, averager._optimizers = {}, {}, []
    averager._anchors, averager._in_flight = None, []
