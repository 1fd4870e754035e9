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
from thinwire.averaging.policy import Averaging
from thinwire.bridge import Bridge, in_backward, parameters_of
from thinwire.checks import check_program
from thinwire.errors import AttachError, OptionError, UnavailableError
from thinwire.explain import explain
from thinwire.grouping import groups_for
from thinwire.programs.allreduce import Exact
from thinwire.programs.audit import AuditRecord, Findings
from thinwire.programs.auditor import Auditor, watched_all
from thinwire.programs.memory import Memory
from thinwire.programs.program import NO_EXCEPTIONS, Program, describe
from thinwire.programs.replicas import compare_replicas, fingerprints
from thinwire.programs.rules import Rules, choose, exceptions_of
from thinwire.runners import Runners, share_scales
from thinwire.schedules import Runs, Schedule, gradient_program, known_runs, with_gradients, with_program
from thinwire.set_ups import agree_on
from thinwire.sharding.zero import ZeRO
from thinwire.state import FORMAT, all_or_none, memory_for, own_state, ranked, where_it_is
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
        self._ended = False
        """Whether there was a schedule, which a swap or an audit has ended."""
        self._rules = rules
        self._auditor = auditor
        self._memory = Memory()
        self._ddp = weakref.ref(ddp)
        steppers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._runners = Runners(bridge, steppers, self._memory, check_every, rules, auditor)
        self._check_every = check_every
        self._sharder = self._runners.sharder(self._program, ddp)
        self._averager = self._runners.averager(self._program, ddp, self._fall_back)
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
        runs = self._schedule or self._program
        return explain(runs, choose(self._rules, gradient_program(self._program), shapes), shapes)

    def swap(self, program: Runs) -> None:
        """Run another program from the next step on; call it on every rank, between steps.

        What the old program remembered by parameter stays, so that swapping back loses nothing. Models that
        were averaged are first made one, as by `finalize`, and so is the optimizer's state: means, and of
        counts rank 0's. A new way of averaging counts from here on, and its outer optimizer starts anew. A
        schedule ends here.
        """
        self._swap(program)
        self._end_schedule()

    def _swap(self, program: Runs) -> None:
        ddp, bridge, communicator = self._ddp(), self._bridge, self._bridge.communicator
        if ddp is None:
            raise AttachError("swap was called on a wire whose DDP model is gone: attach to a new one")
        check_program(program, ddp, self._runners.living_optimizers())
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
        new = self._runners.averager(program, ddp, self._fall_back)  # if it refuses, nothing has changed
        if old is not None:
            old.retire()
            share_scales(bridge)
        self._program, self._averager = program, new
        self._start(ddp)

    def _start(self, ddp: DistributedDataParallel) -> None:
        """Set to work what runs now, and the schedule behind it."""
        bridge, program = self._bridge, self._program
        self._choose()
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
        if due is not self._program and describe(due) != describe(self._program):
            self._swap(due)
            if self._averager is not None:
                self._averager.begin()

    def _settled(self, counted: bool) -> None:
        """A backward is over: see what an audit of it has found."""
        if not counted:
            return
        findings, self._findings = self._findings, None
        fallback = self._auditor.conclude(findings, self.step - 1, GRADIENTS)
        if fallback is None:
            return
        if self._averager is None:
            self.swap(fallback)
            return
        changed = with_gradients(self._program, fallback)
        assert isinstance(changed, Averaging), "averagers run nothing else"
        self._program = self._averager.policy = changed
        self._end_schedule()
        self._choose()

    def _fall_back(self, program: Program) -> Runs:
        """Exchange models by another program from now on."""
        self._program = with_program(self._program, program)
        self._end_schedule()
        return self._program

    def _end_schedule(self) -> None:
        self._ended = self._ended or self._schedule is not None
        self._schedule = None

    def _choose(self) -> None:
        """What each parameter's gradients go by."""
        ddp = self._ddp()
        assert ddp is not None, "its own hooks are running, or the caller holds it"
        shapes = {name: one.shape for name, one in parameters_of(ddp).items()}
        self._exceptions = exceptions_of(self._rules, gradient_program(self._program), shapes)

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
        """This rank's own state, under a key that names the rank: tensors, on the CPU, and plain values only.

        Ranks differ, so every rank must save its own; where models are averaged, its own optimizer too. What
        is under way is waited for and saved. This rank's parameters are in it while models are apart. The
        key, `"rank 0 of 2"`, is what has `torch.distributed.checkpoint` keep ranks apart.
        """
        self._between_steps("state_dict")
        averaging = (
            None if self._averager is None else self._averager.state_dict()
        )  # may wait, and change memory
        return ranked(
            {
                "format": FORMAT,
                "program": describe(self._program),
                "schedule_ended": self._ended,
                "step": self.step,
                "rank": self._bridge.communicator.rank,
                "world_size": self._bridge.communicator.size,
                "buckets": [list(group) for group in self._bridge.grouping.upcoming or ()],
                "scale": self._memory.scale,
                "memory": self._memory.state_dict(),
                "averaging": averaging,
                "sharding": None if self._sharder is None else self._sharder.state_dict(),
            }
        )

    def load_state_dict(
        self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, keep_buckets: bool = True
    ) -> None:
        """Go on from a saved state of the same program; every rank must call it, each with its own state.

        Valid before the first backward, after the model and the optimizer were loaded. With another number of
        ranks than at the save, give every rank all ranks' states, as a list or as `read_states` reads them:
        what they shared is taken over, residuals and models that were apart become their mean, so nothing is
        lost.

        Parameters go on travelling in the groups that they were saved in, so that all bits are the same;
        `keep_buckets=False` takes DDP's new buckets instead, after a change of `bucket_cap_mb`.

        Raises StateError and changes nothing where the state does not fit, MismatchError where ranks come
        from different steps.
        """
        self._between_steps("load_state_dict")
        communicator, ddp = self._bridge.communicator, self._ddp()
        if ddp is None:
            raise AttachError("load_state_dict was called on a wire whose DDP model is gone")
        known = known_runs(self._schedule or self._program, self._auditor.on_excess)
        with all_or_none(communicator, "load_state_dict") as agreed:
            own = own_state(state, list(known), communicator.rank, communicator.size)
            agreed.update(step=str(own["step"]), program=own["program"])
        runs = known[own["program"]]
        averager = (
            self._averager if runs is self._program else self._runners.averager(runs, ddp, self._fall_back)
        )
        try:
            with all_or_none(communicator, "load_state_dict in full") as agreed:
                memory = memory_for(parameters_of(ddp), own)
                groups = groups_for(parameters_of(ddp), own["buckets"] if keep_buckets else [])
                take_overs = [
                    runner.prepare(own.get(key))
                    for key, runner in (("averaging", averager), ("sharding", self._sharder))
                    if runner is not None
                ]
                agreed.update(averaging=where_it_is(own.get("averaging")))
        except BaseException:
            if averager is not None and averager is not self._averager:
                averager.close()
            raise
        if own.get("schedule_ended", False):
            self._end_schedule()
        self._resume(ddp, runs, averager)
        self._memory.take_over(memory)
        self._bridge.engine.step = own["step"]
        self._bridge.grouping.held = self._bridge.grouping.upcoming = groups
        for take_over in take_overs:
            take_over()

    def _resume(self, ddp: DistributedDataParallel, runs: Runs, averager: Averager | None) -> None:
        """Run what was running, without bringing models together as a swap does."""
        if runs is self._program:
            return
        if self._averager is not None:
            self._averager.close()
        if self._schedule is not None and runs not in self._schedule.stages.values():
            self._end_schedule()
        self._program, self._averager = runs, averager
        self._start(ddp)

    def _average(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        engine, averager = self._bridge.engine, self._averager
        same = averager is None or averager.warm
        if same and self._check_every and not engine.mid_step and engine.step % self._check_every == 0:
            self._compare_replicas()
        index, last = self._bridge.place(bucket)
        if index == 0:
            self._begin()
        elsewise, program = self._programs
        future = self._bridge.run(program, bucket, self._memory, elsewise)
        if last and averager is not None:
            averager.backward_ended()
        if last and self._sharder is not None:
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
        program = gradient_program(self._program)
        program, exceptions = watched_all(program, self._exceptions, self._findings)
        if self._averager is not None and self._averager.alone:
            exceptions = NO_EXCEPTIONS
        known = {id(one): self._as_run(one) for one in (program, *exceptions.values())}
        self._programs = {name: known[id(one)] for name, one in exceptions.items()}, known[id(program)]

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
