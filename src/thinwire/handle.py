"""What `attach` returns: the handle to what a model's ranks exchange."""

# DDP inspects a hook's annotations and refuses strings: no `from __future__ import annotations` here.

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from thinwire.averaging.averager import Averager
from thinwire.averaging.diloco import DiLoCo
from thinwire.averaging.flights import Models
from thinwire.averaging.policy import Averaging
from thinwire.bridge import Bridge, in_backward, parameters_of
from thinwire.checks import check_program
from thinwire.errors import AttachError, OptionError, StateError, UnavailableError
from thinwire.explain import explain
from thinwire.grouping import Groups
from thinwire.programs.allreduce import Exact
from thinwire.programs.audit import AuditRecord, Findings
from thinwire.programs.auditor import Auditor, watched
from thinwire.programs.memory import MODELS, Memory
from thinwire.programs.program import Program, describe
from thinwire.programs.replicas import compare_replicas, fingerprints
from thinwire.programs.rules import Rules, choose, exceptions_of
from thinwire.schedules import Runs, Schedule, gradient_program, with_program
from thinwire.set_ups import agree_on, decline
from thinwire.sharding.sharder import Sharder
from thinwire.sharding.zero import ZeRO
from thinwire.state import FORMAT, own_state, where_it_is
from thinwire.wire.communicator import Communicator
from thinwire.wire.meter import GRADIENTS, Stats


def thinwire_hook(wire: "Wire", bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The one hook that `attach` registers: it runs whatever program the wire holds now."""
    return wire._average(bucket)


class Wire:
    """What `attach` returns: the handle to what a model's ranks exchange.

    It does not keep the model alive, and the model's thread ends with the model.
    """

    def __init__(
        self,
        bridge: Bridge,
        program: Runs | Schedule,
        ddp: DistributedDataParallel,
        optimizers: Sequence[Optimizer],
        check_every: int,
        rules: Rules,
        auditor: Auditor,
    ) -> None:
        self._bridge = bridge
        self._schedule = program if isinstance(program, Schedule) else None
        self._program: Runs = program.at(0) if isinstance(program, Schedule) else program
        self._rules = rules
        self._auditor = auditor
        self._memory = Memory()
        self._ddp = weakref.ref(ddp)
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._check_every = check_every
        self._sharder = self._new_sharder(self._program, ddp)
        self._averager = self._new_averager(self._program, ddp)
        self._forwards: Any = None
        self._findings: Findings | None = None
        self._programs: tuple[Mapping[str, Program], Program] = ({}, Exact())
        self._start(ddp)
        bridge.settled = self._settled

    @property
    def program(self) -> Runs:
        """The program, or the way of averaging models, that runs now."""
        return self._program

    @property
    def step(self) -> int:
        """How many backward passes have communicated; those that overflowed do not count."""
        return self._bridge.engine.step

    def stats(self) -> Stats:
        """Bytes and times so far: totals, and the latest steps in full."""
        return self._bridge.engine.stats()

    def audits(self) -> tuple[AuditRecord, ...]:
        """The latest audits, if `audit_every` was given: errors and residuals by parameter."""
        return tuple(self._auditor.records)

    def explain(self) -> str:
        """A table of what every parameter goes by, and why."""
        ddp = self._ddp()
        if ddp is None:
            raise AttachError("explain was called on a wire whose DDP model is gone")
        shapes = {name: one.shape for name, one in parameters_of(ddp).items()}
        return explain(self._program, choose(self._rules, gradient_program(self._program), shapes), shapes)

    def swap(self, program: Runs) -> None:
        """Run another program from the next step on; call it on every rank, between steps.

        What the old program remembered by parameter stays, so that swapping back loses nothing. Models that
        were averaged are first made one, as by `finalize`, and so is the optimizer's state: means, and of
        counts rank 0's. A new way of averaging counts from here on, and its outer optimizer starts anew. A
        schedule ends here.
        """
        self._swap(program)
        self._schedule = None

    def _swap(self, program: Runs) -> None:
        ddp, communicator = self._ddp(), self._bridge.communicator
        if ddp is None:
            raise AttachError("swap was called on a wire whose DDP model is gone: attach to a new one")
        optimizers = [one for reference in self._optimizers if (one := reference()) is not None]
        check_program(program, ddp, optimizers)
        self._between_steps("swap")
        if self._sharder is not None or isinstance(program, ZeRO):
            raise UnavailableError(
                f"swap to {describe(program)}: under ZeRO owners keep the optimizer's state, so it begins and"
                " ends with the DDP model: load what wire.consolidate_optimizer_state() gives on every rank,"
                " and wrap the module in a new DistributedDataParallel"
            )
        old = self._averager
        if old is not None:
            old.end_open_step()
        agree_on({"program": describe(program)}, communicator.meeting, communicator.limit, topic="swap")
        new = self._new_averager(program, ddp)  # what it refuses leaves everything as it is
        if old is not None:
            old.retire()
        self._program, self._averager = program, new
        self._start(ddp)

    def _start(self, ddp: DistributedDataParallel) -> None:
        """Set to work what runs now, and the schedule behind it."""
        bridge, program = self._bridge, self._program
        shapes = {name: one.shape for name, one in parameters_of(ddp).items()}
        self._exceptions = exceptions_of(self._rules, gradient_program(program), shapes)
        if self._averager is not None:
            self._averager.start(bridge.engine, lambda: bridge.overflowed)
        if self._sharder is not None and isinstance(program, ZeRO) and not program.interleaved:
            bridge.agree = self._sharder.agree
        if self._forwards is not None:
            self._forwards.remove()
        if self._schedule is not None:
            self._forwards = ddp.register_forward_pre_hook(self._forward)

    def _forward(self, module: object, inputs: object) -> None:
        """A step begins: with the program that is due."""
        if self._schedule is None or not torch.is_grad_enabled() or self._bridge.engine.mid_step:
            return
        due = self._schedule.at(self.step)
        if due is not self._program:
            self._swap(due)
            if self._averager is not None:
                self._averager.begin()

    def _settled(self, counted: bool) -> None:
        """A backward is over: see what an audit of it has found."""
        if not counted:
            return
        findings, self._findings = self._findings, None
        fallback = self._auditor.conclude(findings, self.step - 1, GRADIENTS)
        if fallback is not None:
            self.swap(fallback)

    def _fall_back(self, program: Program) -> Runs:
        """Exchange models by another program from now on."""
        self._program = with_program(self._program, program)
        return self._program

    def finalize(self) -> None:
        """Bring all ranks to one model: call it on every rank when training ends, and before evaluating.

        Only `LocalSGD` and its like need it: exchanges under way are used, then parameters become their exact
        mean, and buffers what `buffers` says. Where ranks hold one model already, nothing is sent. Training
        may go on afterwards.
        """
        self._between_steps("finalize")
        if self._averager is None:
            return
        if self._ddp() is None:
            raise AttachError(
                "finalize was called on a wire whose DDP model is gone: call it while that lives"
            )
        self._averager.finalize()

    def disable(self) -> None:
        """Back to the exact mean; the same as `swap(Exact())`."""
        self.swap(Exact())

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """As `torch.nn.utils.clip_grad_norm_` of all of the model's gradients; call it on every rank.

        With `ZeRO` every rank holds only the gradients of its own parameters, so that torch's function would
        clip by a part of the norm. Returns the norm before.
        """
        ddp = self._ddp()
        if ddp is None:
            raise AttachError("clip_grad_norm_ was called on a wire whose DDP model is gone")
        if self._sharder is not None:
            return self._sharder.clip(max_norm, norm_type)
        return torch.nn.utils.clip_grad_norm_(ddp.parameters(), max_norm, norm_type)

    def consolidate_optimizer_state(self, to: int = 0) -> dict[str, Any] | None:
        """Under `ZeRO`, the whole optimizer state on rank `to`, on CPU; None elsewhere.

        Call it on every rank; it travels one owner's share at a time. `optimizer.load_state_dict` takes it,
        with any number of ranks, and without thinwire too. To save without communication, save each rank's
        `optimizer.state_dict()`, and see `merge_optimizer_states`.
        """
        self._between_steps("consolidate_optimizer_state")
        if self._sharder is None:
            raise AttachError("consolidate_optimizer_state is for ZeRO: every rank has the whole state here")
        size = self._bridge.communicator.size
        if not isinstance(to, int) or not 0 <= to < size:
            raise OptionError(f"to={to!r} is not a rank of the model's group: it has 0 to {size - 1}")
        return self._sharder.collect(to)

    def state_dict(self) -> dict[str, Any]:
        """This rank's own state, by parameter name: tensors and plain values only.

        Ranks differ, so every rank must save its own; where models are averaged, its own optimizer too. What
        is under way is waited for and saved. This rank's parameters are in it while models are apart.
        """
        self._between_steps("state_dict")
        averaging = (
            None if self._averager is None else self._averager.state_dict()
        )  # may wait, and change memory
        return {
            "format": FORMAT,
            "program": describe(self._program),
            "step": self.step,
            "rank": self._bridge.communicator.rank,
            "world_size": self._bridge.communicator.size,
            "buckets": [list(group) for group in self._bridge.grouping.upcoming or ()],
            "scale": self._memory.scale,
            "memory": self._memory.state_dict(),
            "averaging": averaging,
            "sharding": None if self._sharder is None else self._sharder.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on from a saved state of the same program; every rank must call it, each with its own state.

        Valid before the first backward, after the model and the optimizer were loaded. With another number of
        ranks than at the save, give every rank the list of all ranks' states: what they shared is taken over,
        residuals and models that were apart become their mean, so nothing is lost.

        Raises StateError and changes nothing where the state does not fit, MismatchError where ranks come
        from different steps.
        """
        self._between_steps("load_state_dict")
        communicator = self._bridge.communicator
        try:
            own = own_state(state, describe(self._program), communicator.rank, communicator.size)
            memory = Memory()
            memory.load_state_dict(own["memory"], self._shapes())
            memory.scale, groups = own["scale"], self._groups(own["buckets"])
            take_overs = [
                runner.prepare(own.get(key))
                for key, runner in (("averaging", self._averager), ("sharding", self._sharder))
                if runner is not None
            ]
        except StateError as error:
            decline(str(error), communicator.meeting, topic="load_state_dict")
            raise
        saved = {"step": str(own["step"]), "averaging": where_it_is(own.get("averaging"))}
        agree_on(saved, communicator.meeting, communicator.limit, topic="load_state_dict")
        self._memory.take_over(memory)
        self._bridge.engine.step = own["step"]
        self._bridge.grouping.held = self._bridge.grouping.upcoming = groups
        for take_over in take_overs:
            take_over()

    def _groups(self, saved: list[list[str]]) -> Groups | None:
        """Which parameters shall travel together as they did; None where they are not the same any more."""
        ddp = self._ddp()
        parameters = {} if ddp is None else parameters_of(ddp)
        groups = tuple(tuple(group) for group in saved)
        trained = {name for name, one in parameters.items() if one.requires_grad}
        same = sorted(name for group in groups for name in group) == sorted(trained)
        alike = same and all(len({parameters[name].dtype for name in group}) == 1 for group in groups)
        return groups if alike else None

    def _shapes(self) -> dict[str, torch.Size]:
        ddp = self._ddp()
        return {} if ddp is None else {name: one.shape for name, one in parameters_of(ddp).items()}

    def _new_sharder(self, program: Runs, ddp: DistributedDataParallel) -> Sharder | None:
        if not isinstance(program, ZeRO):
            return None
        (optimizer,) = [one for reference in self._optimizers if (one := reference()) is not None]
        communicator = Communicator(ddp.process_group, self._bridge.communicator.limit)
        communicator.open()
        return Sharder(program, ddp, parameters_of(ddp), optimizer, communicator, self._bridge.engine)

    def _new_averager(self, program: Runs, ddp: DistributedDataParallel) -> Averager | None:
        if not isinstance(program, Averaging):
            return None
        optimizers = [one for reference in self._optimizers if (one := reference()) is not None]
        shapes = {name: one.shape for name, one in parameters_of(ddp).items()}
        exceptions = {}
        if isinstance(program, DiLoCo):
            exceptions = exceptions_of(self._rules, program.program, shapes)
        communicator = Communicator(ddp.process_group, self._bridge.communicator.limit)
        communicator.open()
        try:
            return Averager(
                program,
                ddp,
                parameters_of(ddp),
                optimizers,
                communicator,
                self._bridge.engine.meter,
                self._memory.scoped(MODELS),
                self._check_every,
                exceptions,
                Models(self._auditor, self._fall_back),
            )
        except BaseException:
            communicator.close()
            raise

    def _average(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        engine, averager = self._bridge.engine, self._averager
        same = averager is None or averager.warm
        if same and self._check_every and not engine.mid_step and engine.step % self._check_every == 0:
            self._compare_replicas()
        if bucket.index() == 0:
            self._begin()
        elsewise, program = self._programs
        future = self._bridge.run(program, bucket, self._memory, elsewise)
        if bucket.is_last() and averager is not None:
            averager.backward_ended()
        if bucket.is_last() and self._sharder is not None:
            sharder, queue = self._sharder, Variable._execution_engine.queue_callback
            queue(lambda: queue(sharder.after_backward))  # after DDP's own, which writes the gradients
        return future

    def _begin(self) -> None:
        """A step's first bucket has come: what its gradients go by."""
        if not in_backward() and (self._averager is not None or self._sharder is not None):
            what = "models that are averaged" if self._sharder is None else "ZeRO"
            raise UnavailableError(
                f"a rank has run out of inputs (Join), and {what} cannot go on without it: give every rank"
                " the same number of batches"
            )
        if self._sharder is not None:
            self._sharder.before_backward()
        everybody = self._averager is None or self._averager.warm
        self._findings = self._auditor.begin(self.step) if everybody else None
        known: dict[int, Program] = {}

        def as_run(program: Program) -> Program:
            if id(program) not in known:
                known[id(program)] = self._as_run(watched(program, self._findings))
            return known[id(program)]

        exceptions = {name: as_run(program) for name, program in self._exceptions.items()}
        self._programs = exceptions, as_run(gradient_program(self._program))

    def _as_run(self, program: Program) -> Program:
        if self._averager is not None:
            return self._averager.gradient_program(program)
        return program if self._sharder is None else self._sharder.by(program)

    def _close(self) -> None:
        for runner in (self._averager, self._sharder):
            if runner is not None:
                runner.close()

    def _compare_replicas(self) -> None:
        ddp, engine = self._ddp(), self._bridge.engine
        assert ddp is not None, "its own hook is running"
        replica = parameters_of(ddp)
        own = fingerprints(replica.values())
        check = compare_replicas(list(replica), own, engine.step, active=in_backward())
        engine.submit(check, label="the comparison of replicas", last=False, instead=own)

    def __reduce__(self) -> str:
        raise AttachError(
            "a wire belongs to a running model and cannot be copied or pickled: copy ddp.module, or save"
            " wire.state_dict()"
        )

    def _between_steps(self, what: str) -> None:
        if self._bridge.engine.mid_step:
            raise AttachError(
                f"{what} was called during backward, or after one that was interrupted: call it between steps"
            )
        self._bridge.settle()
