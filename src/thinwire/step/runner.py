"""The runner of an attached model's strategy. It begins steps, swaps strategies and follows a schedule."""

# DDP inspects a hook's annotations and rejects strings, so no `from __future__ import annotations` here.

import json
import logging
from typing import Any

import torch
import torch.distributed as dist

from thinwire.engine.comm.agreement import agree_on, decline
from thinwire.engine.futures import at_work, is_at_work
from thinwire.engine.meter import GRADIENTS
from thinwire.errors import AttachError, ThinwireError, UnavailableError
from thinwire.models.ddp.internals import in_backward
from thinwire.models.ddp.model import remove_handles
from thinwire.models.fsdp.reducer import Group, ShardReducer
from thinwire.monitors.audit import Findings
from thinwire.monitors.auditor import watched_all
from thinwire.monitors.replicas import (
    find_drift,
    fingerprints,
    gather_fingerprints,
    only_rounded,
    sample_of,
)
from thinwire.programs.allreduce import Exact
from thinwire.programs.description import described, same_program, short
from thinwire.programs.leftovers import carrying, set_aside
from thinwire.programs.memory import MODEL_SCOPE
from thinwire.programs.program import Programs
from thinwire.programs.wrapper import as_program
from thinwire.step.accumulation import Accumulation
from thinwire.step.model import AttachedReducer, refuse_unfrozen
from thinwire.step.strategy import Configuration, Context, Strategy
from thinwire.strategies.gradients import configuration_of, given_of
from thinwire.strategies.schedule import Stage, StagePlan

logger = logging.getLogger("thinwire")

_SWAP = "swap"
_CHECK_EVERY = 1000
"""Steps between two comparisons of replicas by default. On a CPU, one takes half as long as a cheap step (no
network, AdamW, batches of 8 in linear layers), so all of them cost about 0.05 %."""


def thinwire_hook(runner: "AttachedRun", bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket with the runner's current strategy. The only hook that `attach` registers."""
    runner.open_step()
    reducer: Any = runner.reducer  # a DDP model's, as DDP calls this hook
    future: torch.futures.Future[torch.Tensor] = reducer.run(runner.programs, bucket, runner.context.memory)
    return future


def run_group(runner: "AttachedRun", reducer: ShardReducer, group: Group) -> None:
    """Average a group of an FSDP2 model with the runner's current strategy, as `thinwire_hook` for DDP."""
    runner.open_step()
    reducer.run(runner.programs, group, runner.context.memory)


class AttachedRun:
    """The strategy that a wire runs now, and the events of its steps.

    Constructing one is collective.
    """

    def __init__(self, context: Context, plan: StagePlan) -> None:
        self.context = context
        self.reducer: AttachedReducer = context.reducer
        self.steps = self.reducer.steps
        self.plan = plan
        self.schedule_ended = False
        """Whether a swap or an audit has ended a schedule."""
        self.awaits_optimizers = False
        """Whether each rank's own optimizer state is loaded after rank 0's, as `GatheredState` does."""
        self.config: Configuration = plan.at(0)
        self.strategy: Strategy = self.bound(self.config)
        self._accumulation = Accumulation(context.model, self.steps.skipping)
        self.programs = Programs(Exact())
        self.begins_steps = True
        """Whether `begin_step` must run with the next step's first bucket."""
        self._findings: Findings | None = None
        self._gathered: torch.futures.Future[torch.Tensor] | None = None
        """All ranks' fingerprints, to be compared after the step's backward."""
        self._compared = False
        """Whether this rank's parameters take part in the comparison: not without inputs (Join)."""
        self._forwards: Any = None
        self._unreduced: dict[str, torch.nn.Parameter] = {}
        self._handles: list[Any] = []

    def start(self) -> None:
        """Start the strategy, and receive the reducer's step events from now on."""
        self.steps.events = self
        self._unreduced = self.context.model.unreduced()
        if self._unreduced:
            self._handles.append(self.context.model.on_forward(self._check_frozen))
            self.context.model.on_gone(self._unreduced.clear)
        self._start_strategy()

    def _start_strategy(self) -> None:
        """Start the strategy, and register the schedule's hook after the strategy's own.

        The strategy's own forward hook ends a training step that the loop skipped. The schedule's hook must
        run after it. Otherwise a rank that skipped a step would be one stage behind the others.
        """
        self.strategy.start()
        if self._forwards is not None:
            self._forwards.remove()
        if self.plan.scheduled:
            self._forwards = self.context.model.on_forward(self._follow_schedule)

    def close(self) -> None:
        """Stop at once, and remove all hooks."""
        self.strategy.close()
        remove_handles(self._handles)
        if self._forwards is not None:
            self._forwards.remove()

    def _check_frozen(self) -> None:
        """Raise if a parameter trains whose gradient is not exchanged, since ranks would diverge."""
        if not self.config.trains_locally:
            refuse_unfrozen(
                self._unreduced,
                "its gradient is not exchanged",
                "unfreeze it before DistributedDataParallel wraps the module, and attach to the new model",
            )

    # Events of a step, called by the reducer

    def open_step(self) -> None:
        """Begin a step with its first bucket, and compare the replicas if a comparison is due."""
        if self.steps.is_open:
            return
        self.steps.settle_leftover()  # it may count a step
        if self.begins_steps:
            self.begin_step()
        count, every = self.steps.count, self.context.check_every
        if every is None:
            every = _CHECK_EVERY
        # DDP starts from rank 0's parameters, so the first comparison comes after `every` steps.
        if every and count and count % every == 0 and self.strategy.replicas_equal:
            self._compare_replicas()

    def begin_step(self) -> None:
        """Choose the step's programs."""
        if not self.strategy.supports_join and not in_backward():
            raise UnavailableError(
                f"a rank has run out of inputs (Join), and {self.config!r} cannot continue without it: give"
                " every rank the same number of batches"
            )
        self.strategy.begin_step()
        program, exceptions = as_program(self.config.gradient_program()), self.strategy.exceptions()
        exact = frozenset(name for name, one in exceptions.items() if isinstance(one, Exact))
        if self.context.auditor.every:
            equal = self.strategy.replicas_equal
            self._findings = self.context.auditor.begin(self.steps.count) if equal else None
            program, exceptions = watched_all(program, exceptions, self._findings)
        wrapped = {id(own): as_program(self.strategy.wrap(own)) for own in (program, *exceptions.values())}
        others = {name: wrapped[id(own)] for name, own in exceptions.items()}
        memory = self.context.memory
        self.programs = Programs(*carrying(memory, wrapped[id(program)], others), exact, sliced=True)
        always = self.strategy.begins_steps or not self.strategy.supports_join
        # Leftovers stay if the step is rolled back, and those of parameters that no rank used in it.
        self.begins_steps = always or bool(self.context.auditor.every) or memory.has_leftovers

    @property
    def counts_backwards(self) -> bool:
        """True if each committed backward counts as a step."""
        return self.strategy.counts_backwards

    def agree_finite(self, finite: torch.Tensor) -> torch.Tensor:
        """Return whether the step's means are finite on all ranks. Conclude the comparison of replicas."""
        if self._gathered is not None:
            self._check_replicas(self._gathered.wait())
            self._gathered = None
        return self.reducer.agree_finite(self.strategy.agree_finite(finite))

    def end_backward(self, committed: bool) -> None:
        """Notify the reducer and the strategy of a settled backward, then conclude its audit."""
        self.reducer.settled(committed)
        self.strategy.end_backward(committed)
        if self._accumulation.watching and self.counts_backwards:  # averaged models have a check of their own
            self._accumulation.backward()
        if not committed or self._findings is None:
            return
        findings, self._findings = self._findings, None
        step = self.steps.count - self.counts_backwards
        fallback = self.context.auditor.conclude(findings, step, GRADIENTS)
        if fallback is not None:
            self.change(self.config.with_gradient_program(fallback))

    def _compare_replicas(self) -> None:
        """Gather the fingerprints of all replicas with the step's gradients."""
        own = fingerprints(self.context.model.tensors().values())
        self._compared = in_backward()
        gather = gather_fingerprints(own, active=self._compared)
        label = "the comparison of replicas"
        self._gathered = self.reducer.engine.submit(
            gather, step=self.steps.count, label=label, last=False, instead=own
        )

    def _check_replicas(self, gathered: torch.Tensor) -> None:
        """Compare the replicas, and end the wire if they differ, since the ranks have diverged."""
        tensors, step = self.context.model.tensors(), self.steps.count
        ranks = self.reducer.engine.world_ranks(range(len(gathered)))
        drift = find_drift(list(tensors), [one.numel() for one in tensors.values()], gathered, step, ranks)
        if drift is None:
            return
        if self.context.check_every is None and self._only_rounded([*tensors.values()][drift.smallest]):
            logger.warning(
                "%s. Rounding explains the difference, as between kinds of processors, so training continues",
                drift.error,
            )
        else:
            self.reducer.engine.fail(drift.error)

    def _only_rounded(self, tensor: torch.Tensor) -> bool:
        """Return whether rounding explains how far replicas of a parameter have drifted. Collective."""
        if not tensor.is_floating_point():
            return False
        communicator = self.reducer.communicator
        own = json.dumps(sample_of(tensor) if self._compared else None)
        samples = map(json.loads, communicator.rendezvous.gather("drift", own, communicator.limit))
        return only_rounded([one for one in samples if one is not None], tensor.dtype, self.steps.count)

    # Changes of strategy

    def _follow_schedule(self) -> None:
        if not self.plan.scheduled or self.steps.is_open:
            return
        self.plan.check_join(self.context.model.joins, self.steps.count)
        due = self.plan.at(self.steps.count)
        if not same_program(due, self.config):
            with at_work():
                self._swap(due)
                self.strategy.begin_forward()

    def swap(self, given: Stage) -> None:
        """Run another program or configuration from the next step on, and end the schedule. Collective."""
        self._swap(configuration_of(given))
        self.end_schedule()

    def _swap(self, config: Configuration) -> None:
        communicator = self.reducer.communicator
        try:
            for one in (self.config, config):
                _check_swappable(one, config)
            config.validate(self.context.target())
        except ThinwireError as error:
            decline(str(error), communicator.rendezvous, _SWAP)
            raise
        # A backward that raised after its last bucket has not written its residuals yet.
        self.steps.settle_leftover()
        self.strategy.end_open_step()
        agree_on({"program": described(config)}, communicator.rendezvous, communicator.limit, topic=_SWAP)
        new = self.bound(config)  # before the old strategy is retired, in case it raises
        try:
            self.strategy.retire()
        except BaseException:
            new.close()
            raise
        self.config, self.strategy, self.begins_steps = config, new, True
        set_aside(self.context.memory)
        self._start_strategy()

    def bound(self, config: Configuration) -> Strategy:
        """Return a new strategy for a configuration, not started yet. Collective."""
        strategy = config.bind(self.context)
        strategy.change = self.change
        return strategy

    def change(self, config: Configuration) -> None:
        """Switch to a changed configuration of the same class, as an audit decides, and end the schedule."""
        self.steps.settle_leftover()
        self.config, self.begins_steps = config, True
        self.strategy.reconfigure(config)
        for memory in (self.context.memory, self.context.memory.scoped(MODEL_SCOPE)):
            set_aside(memory)
        self.end_schedule()

    def resume(self, config: Configuration, strategy: Strategy) -> None:
        """Run the strategy of a loaded state, without synchronising models as a swap does."""
        if strategy is self.strategy:
            return
        self.strategy.close()
        self.config, self.strategy, self.begins_steps = config, strategy, True
        if not any(same_program(config, one) for one in self.plan.stages):
            self.end_schedule()
        self._start_strategy()

    def end_schedule(self) -> None:
        """Stop following the schedule, if there is one."""
        self.schedule_ended = self.schedule_ended or self.plan.scheduled
        self.plan = StagePlan(given_of(self.config))
        if self._forwards is not None:
            self._forwards.remove()
            self._forwards = None

    def between_steps(self, what: str) -> None:
        """Settle the latest step.

        A signal handler may have interrupted thinwire's own work on this thread. It would then wait for a
        step that cannot end before the handler does, or see an incomplete change.

        Args:
            what: The caller's name, for the error message.

        Raises:
            AttachError: A step, or thinwire's own work on this thread, is running.
        """
        if self.steps.is_open or in_backward() or is_at_work():
            raise AttachError(
                f"{what} was called during backward or an exchange, or after a backward that was interrupted:"
                " call it between steps. In a signal handler, only set a flag, and check it after each step"
            )
        self.steps.settle()


def _check_swappable(one: Configuration, wanted: Configuration) -> None:
    if not one.swappable:
        raise UnavailableError(f"swap to {short(wanted)}: {one!r} cannot be swapped, {one.fixed_because}")
