"""The run of an attached model: it owns the engine and the steps, and runs one strategy at a time.

    models/ -> AttachedRun.bucket_ready -> Steps, Engine -> torch.distributed

The order in which a step ends, for backward passes:

    the last bucket                 `bucket_ready` closes the step
    all gradients are computed      `_backward_computed` runs: from here on, waiting is exposed time
    DDP's own final callback        waits for the futures and writes the gradients
    after it                        `settle` runs: it commits or rolls back, then calls the strategy
"""

import json
import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from thinwire.amp.loss_scale import ScalerOption, Scales
from thinwire.engine.comm.agreement import SetUp, agree_on, decline, full_texts
from thinwire.engine.comm.group_communicator import GroupCommunicator
from thinwire.engine.engine import Engine
from thinwire.engine.futures import at_work, is_at_work
from thinwire.engine.meter import GRADIENTS, Meter
from thinwire.engine.profiling import span
from thinwire.errors import AttachError, ThinwireError, UnavailableError
from thinwire.monitors.audit import Findings
from thinwire.monitors.auditor import Auditor, watched_all
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
from thinwire.programs.memory import MODEL_SCOPE, Memory
from thinwire.programs.program import Bucket, Programs
from thinwire.programs.reproducible import has_float64
from thinwire.programs.rules import Rules
from thinwire.programs.sparse_gradients import require_sparse
from thinwire.programs.wrapper import as_program
from thinwire.step.accumulation import Accumulation
from thinwire.step.autograd import in_backward, queue_callback, remove_handles
from thinwire.step.buckets import BucketLayout, Buckets
from thinwire.step.model import Model, refuse_unfrozen
from thinwire.step.strategy import Configuration, Context, Stages, Strategy
from thinwire.step.transaction import Steps

logger = logging.getLogger("thinwire")

_SWAP = "swap"
_CHECK_EVERY = 1000
"""Steps between two comparisons of replicas by default. On a CPU, one takes half as long as a cheap step (no
network, AdamW, batches of 8 in linear layers), so all of them cost about 0.05 %."""


class Connection(NamedTuple):
    """A process group of thinwire's own, and the engine that runs programs on it."""

    communicator: GroupCommunicator
    engine: Engine


def connect(
    model: Model, set_up: SetUp, *, limit: timedelta | None = None, meter: Meter | None = None
) -> Connection:
    """Compare set-ups with the other replicas and shards, then make thinwire's process groups. Collective.

    Args:
        model: The model.
        set_up: What must be equal on all ranks, besides the parameters.
        limit: The time limit of a collective. None takes that of the group.
        meter: Where steps are recorded. None keeps a record of its own.

    Raises:
        MismatchError: Set-ups differ between ranks.
        WireError: A rank did not take part in time.
    """
    tensors = model.tensors()
    own = {f"parameter {name}": f"{tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors.items()}
    shard = {} if model.shard_key is None else {"shard": model.shard_key}
    communicator = GroupCommunicator(model.group, limit, model.device)
    # Everything is compared before the first group is made: a rank that raises then would leave the others
    # waiting for its connection.
    whole = {**set_up, **own, **shard, **arithmetic(model.device, set_up)}
    agree_on(whole, communicator.rendezvous, communicator.limit)
    model.connect_shards(set_up, limit)
    communicator.open()
    return Connection(communicator, Engine(communicator, device=model.device, meter=meter))


def arithmetic(device: torch.device, set_up: SetUp) -> dict[str, str]:
    """Return the kind of a device if all ranks must have the same one, as a part of the set-up.

    Without float64, `reproducible.py` computes other bits. For PowerSGD's P, accelerators and CPUs do too.
    Replicas of both kinds would drift.
    """
    if not has_float64(device):
        return {"device": f"{device.type} without float64"}
    if "PowerSGD" in full_texts(set_up).get("program", ""):
        return {"device for PowerSGD": "a CPU" if device.type == "cpu" else "an accelerator"}
    return {}


class Choice(NamedTuple):
    """The programs and memory of one bucket, chosen by a torch-named hook instead of the strategy."""

    programs: Programs
    memory: Memory
    undo: Callable[[], None] | None = None
    """Called if the step is rolled back."""


class AttachedRun:
    """The exchange of one model: its engine, its steps, and the strategy that runs now.

    It does not keep the model alive. Constructing one is collective, as strategies make process groups.

    Args:
        model: The model.
        connection: The process group and engine of its replicas. The run closes the engine.
        stages: The configurations to run.
        scaler: The GradScaler of the model's loss.
        rules: The rules that give some parameters another program.
        auditor: The auditor of exchanges. None audits nothing.
        check_every: Steps between two comparisons of replicas, or 0 for none. None for the default.
        optimizers: A function that returns the optimizers passed to `attach` that still exist.
        membership: A function that makes the membership of averaged models, as in `Context`.
    """

    def __init__(
        self,
        model: Model,
        connection: Connection,
        stages: Stages,
        *,
        scaler: ScalerOption = "auto",
        rules: Rules = (),
        auditor: Auditor | None = None,
        check_every: int | None = 0,
        optimizers: Callable[[], list[Optimizer]] = list,
        membership: Callable[[Any, Any, Context], Any] | None = None,
    ) -> None:
        self.model, self.stages = model, stages
        self.communicator, self.engine = connection
        self.steps = Steps(self.engine, model, Scales(scaler))
        self.context = Context(
            model=model,
            communicator=self.communicator,
            engine=self.engine,
            steps=self.steps,
            settle_leftover=self.settle_leftover,
            memory=Memory(),
            rules=rules,
            auditor=auditor or Auditor(0, None, "warn", 1),
            check_every=check_every,
            optimizers=optimizers,
            scaler=scaler,
            membership=membership,
        )
        self.schedule_ended = False
        """Whether a swap or an audit has ended a schedule."""
        self.awaits_optimizers = False
        """Whether each rank's own optimizer state is loaded after rank 0's, as `GatheredState` does."""
        self.programs = Programs(Exact())
        self.must_choose_programs = True
        """Whether the next step's first bucket must choose programs."""
        self._buckets = Buckets()
        self._accumulation: Accumulation | None = None
        self._findings: Findings | None = None
        self._gathered: torch.futures.Future[torch.Tensor] | None = None
        """All ranks' fingerprints, to be compared after the step's backward."""
        self._compared = False
        """Whether this rank's parameters take part in the comparison: not without inputs (Join)."""
        self._forwards: Any = None
        self._unreduced: dict[str, torch.nn.Parameter] = {}
        self._handles: list[Any] = []
        model.on_gone(self.engine.close)
        if model.reduces_gradients:
            held = {id(parameter) for parameter in model.parameters().values()}
            model.on_gone(remove_handles, self.steps.scales.watch(held))
        try:
            self.strategy: Strategy = self.bound(stages.at(0))
        except BaseException:
            self.engine.close()
            raise

    @property
    def config(self) -> Configuration:
        """The configuration that runs now."""
        config: Configuration = self.strategy.config
        return config

    @property
    def layout(self) -> BucketLayout:
        """The groups in which parameters are exchanged."""
        return self._buckets.layout

    def start(self) -> None:
        """Start the strategy. The model's hooks come afterwards, with `model.register(run)`."""
        self._unreduced = self.model.unreduced()
        if self._unreduced:
            self._handles.append(self.model.on_forward(self._check_frozen))
            self.model.on_gone(self._unreduced.clear)
        self._start_strategy()

    def watch_optimizers(self, optimizers: Sequence[Optimizer], *, skips: bool, obstacle: str | None) -> None:
        """Skip optimizer steps after overflows, and warn of accumulation without `no_sync`.

        Args:
            optimizers: The optimizers passed to `attach`.
            skips: Whether overflowed steps are skipped, or warned of.
            obstacle: The reason why no step can be skipped, for the warning.
        """
        parameters = self.model.parameters().values()
        self._accumulation = Accumulation(self.model, self.steps.skipping)
        handles = self.steps.skipping.watch(optimizers, parameters, skips=skips, obstacle=obstacle)
        self.model.on_gone(remove_handles, handles)

    def _start_strategy(self) -> None:
        """Start the strategy, and register the schedule's hook after the strategy's own.

        The strategy's own forward hook ends a training step that the loop skipped. The schedule's hook must
        run after it. Otherwise a rank that skipped a step would be one stage behind the others.
        """
        self.strategy.start()
        if self._forwards is not None:
            self._forwards.remove()
        if self.stages.schedule is not None:
            self._forwards = self.model.on_forward(self._follow_schedule)

    def close(self) -> None:
        """Stop at once, remove all hooks, and close the engine."""
        self.strategy.close()
        remove_handles(self._handles)
        if self._forwards is not None:
            self._forwards.remove()
        self.engine.close()

    def _check_frozen(self) -> None:
        """Raise if a parameter trains whose gradient is not exchanged, since ranks would diverge."""
        if not self.config.trains_locally:
            refuse_unfrozen(
                self._unreduced,
                "its gradient is not exchanged",
                "unfreeze it before DistributedDataParallel wraps the module, and attach to the new model",
            )

    # A step, from its first bucket to its end

    def bucket_ready(
        self,
        buffer: torch.Tensor,
        names: tuple[str, ...],
        shapes: tuple[torch.Size, ...],
        *,
        index: int,
        last: bool,
        strided_as: Sequence[torch.Tensor] = (),
        choice: Choice | None = None,
    ) -> "torch.futures.Future[torch.Tensor]":
        """Start to average a bucket of gradients. The step's first bucket begins it, the last one ends it.

        Args:
            buffer: The gradients, one after another. They are overwritten.
            names: Their parameters.
            shapes: Their shapes.
            index: The bucket's number in the step.
            last: Whether it is the step's last bucket.
            strided_as: The tensors whose strides the gradients have in the buffer. Empty: all are contiguous.
            choice: The programs of a torch-named hook. None takes the strategy's.

        Returns:
            A future of the means, in the buffer's layout.

        Raises:
            UnavailableError: The gradient is sparse and the program averages dense ones.
            WireError: A collective failed.
        """
        if not self.steps.is_open:
            self._open_step()
        programs, memory, undo = choice or (self.programs, self.context.memory, None)
        step = self.steps.current
        if undo is not None:
            step.undo.append(undo)
        rank, size, count = self.communicator.rank, self.communicator.size, self.steps.count
        part = self._buckets.whole(names, shapes, buffer.element_size(), programs, last, strided_as)
        if part is not None:
            bucket = Bucket(index, buffer, names, shapes, rank, size, count, exact=part.exact)
            if buffer.is_sparse:  # of a torch-named hook: attach accepts dense gradients only
                require_sparse(part.program, bucket)
            observed = step.observed(part.program, bucket, memory)
            means: torch.futures.Future[torch.Tensor] = self.engine.submit(
                observed, step=count, label=bucket, last=last, instead=buffer
            )
        else:
            bucket = Bucket(index, buffer, names, shapes, rank, size, count)
            pieces, pending = self._buckets.divide(bucket, programs, last, strided_as)
            for number, piece in enumerate(pieces, 1):
                observed, own = step.observed(piece.program, piece.bucket, memory), piece.bucket
                ends = last and number == len(pieces)
                done = self.engine.submit(observed, step=count, label=own, last=ends, instead=own.buffer)
                self._buckets.scatter_back(piece, done)
            means = pending.future
        if last:
            self._close_step()
        return means

    def _open_step(self) -> None:
        """Begin a step, and compare the replicas if a comparison is due."""
        self.model.check_finalization()
        self.settle_leftover()  # it may count a step
        if self.must_choose_programs:
            self._choose_programs()
        count, every = self.steps.count, self.context.check_every
        if every is None:
            every = _CHECK_EVERY
        # DDP starts from rank 0's parameters, so the first comparison comes after `every` steps.
        if every and count and count % every == 0 and self.strategy.replicas_equal:
            self._compare_replicas()
        self.steps.open()
        self._buckets.begin()

    def _choose_programs(self) -> None:
        if not self.strategy.supports_join and not in_backward():
            raise UnavailableError(
                f"a rank has run out of inputs (Join), and {self.config!r} cannot continue without it: give"
                " every rank the same number of batches"
            )
        self.strategy.begin_step()
        program, exceptions = as_program(self.config.gradient_program()), self.strategy.exceptions()
        exact = frozenset(name for name, other in exceptions.items() if isinstance(other, Exact))
        if self.context.auditor.every:
            equal = self.strategy.replicas_equal
            self._findings = self.context.auditor.begin(self.steps.count) if equal else None
            program, exceptions = watched_all(program, exceptions, self._findings)
        wrapped = {id(own): as_program(self.strategy.wrap(own)) for own in (program, *exceptions.values())}
        others = {name: wrapped[id(other)] for name, other in exceptions.items()}
        memory = self.context.memory
        # On an accelerator a slice would cost its kernels' launches again, and takes no time to encode.
        sliced = self.context.model.device.type == "cpu"
        self.programs = Programs(*carrying(memory, wrapped[id(program)], others), exact, sliced)
        always = self.strategy.begins_steps or not self.strategy.supports_join
        # A program that another one replaced may have left residuals, which the first exchange of a parameter
        # applies. They stay if the step is rolled back, and those of parameters that no rank used in it.
        self.must_choose_programs = always or bool(self.context.auditor.every) or memory.has_leftovers

    def _close_step(self) -> None:
        """Close the step after its last bucket, and settle it when backward ends.

        A rank without inputs (Join) calls hooks outside of backward, so no end of a backward can settle the
        step. It settles here, at the same collective as the other ranks: they wait for this rank's part in
        their final callback, and both then agree on whether the means are finite.
        """
        self._buckets.end()
        # From here on a second backward opens a new step, even if this one raises before it is settled: the
        # next bucket, or the next call between steps, then settles it (`settle_leftover`).
        self.steps.current.closed = True
        if in_backward():
            queue_callback(self._backward_computed)
        else:
            self.settle()

    def _backward_computed(self) -> None:
        """Start counting exposed time, and queue `settle`; runs before DDP's final callback.

        The hook of the last bucket queues this callback, then DDP queues its own, which waits for the futures
        and writes the gradients. So autograd calls this first, DDP's second, and `settle`, queued from here,
        third, when gradients are written.

        A failure in DDP's callback would lose the exception's type. So from `guard` on, futures of failed
        programs complete with harmless values, and `settle` raises. Under find_unused_parameters DDP also
        waits in its callback for a collective of its own, which would fail first, with an error that names
        no rank. So a failure is raised here instead.
        """
        self.engine.guard()
        if self.model.find_unused_parameters:
            self.engine.settle()
        queue_callback(self.settle)

    def settle_leftover(self) -> None:
        """Settle a step whose backward raised, or was interrupted, after its last bucket."""
        if self.steps.unsettled:
            self.settle()

    def settle(self) -> None:
        """Wait for the latest step, commit it or roll it back, then notify model, strategy and auditor.

        Raises:
            WireError: A collective failed, and the step was rolled back.
            ProgramError: A program failed, and the step was rolled back.
        """
        with span("settle"):
            try:
                committed = self.steps.settle(self._agree_finite, self.strategy.counts_backwards)
                if committed is not None:
                    self._end_backward(committed)
            except ThinwireError as error:
                self.model.report(error)
                raise

    def _agree_finite(self, finite: torch.Tensor) -> torch.Tensor:
        """Return whether the step's means are finite on all ranks. Conclude the comparison of replicas."""
        if self._gathered is not None:
            # Every rank comes here with the same fingerprints, so all of them raise or none does.
            self._check_replicas(self._gathered.wait())
            self._gathered = None
        agreed = self.strategy.agree_finite(finite)
        return self.model.agree_finite(agreed, self.steps.count, self.steps.overflowed)

    def _end_backward(self, committed: bool) -> None:
        self.model.write_means(self, committed)
        self.strategy.end_backward(committed)
        counts = self.strategy.counts_backwards
        if self._accumulation is not None and self._accumulation.watching and counts:
            self._accumulation.backward()  # averaged models have a check of their own
        if not committed or self._findings is None:
            return
        findings, self._findings = self._findings, None
        fallback = self.context.auditor.conclude(findings, self.steps.count - counts, GRADIENTS)
        if fallback is not None:
            self.change(self.config.with_gradient_program(fallback))

    def _compare_replicas(self) -> None:
        """Gather the fingerprints of all replicas with the step's gradients."""
        # A rank that skips optimizer.step() by itself is noticed by no exchange of gradients.
        own = fingerprints(self.model.tensors().values())
        self._compared = in_backward()
        gather = gather_fingerprints(own, active=self._compared)
        label = "the comparison of replicas"
        self._gathered = self.engine.submit(
            gather, step=self.steps.count, label=label, last=False, instead=own
        )

    def _check_replicas(self, gathered: torch.Tensor) -> None:
        """Compare the replicas, and end the wire if they differ, since the ranks have diverged."""
        tensors, step = self.model.tensors(), self.steps.count
        ranks = self.engine.world_ranks(range(len(gathered)))
        sizes = [tensor.numel() for tensor in tensors.values()]
        drift = find_drift(list(tensors), sizes, gathered, step, ranks)
        if drift is None:
            return
        if self.context.check_every is None and self._only_rounded([*tensors.values()][drift.smallest]):
            logger.warning(
                "%s. Rounding explains the difference, as between kinds of processors, so training continues",
                drift.error,
            )
        else:
            self.engine.fail(drift.error)

    def _only_rounded(self, tensor: torch.Tensor) -> bool:
        """Return whether rounding explains how far replicas of a parameter have drifted. Collective."""
        if not tensor.is_floating_point():
            return False
        communicator = self.communicator
        own = json.dumps(sample_of(tensor) if self._compared else None)
        samples = map(json.loads, communicator.rendezvous.gather("drift", own, communicator.limit))
        known = [sample for sample in samples if sample is not None]
        return only_rounded(known, tensor.dtype, self.steps.count)

    # Changes of strategy

    def _follow_schedule(self) -> None:
        if self.stages.schedule is None or self.steps.is_open:
            return
        # Every rank has counted the same steps when its forward begins: a step is settled inside backward,
        # or by the averager's own forward hook, which runs before this one. So all swap at the same step.
        self.stages.check_join(self.model.joins, self.steps.count)
        due = self.stages.at(self.steps.count)
        if not same_program(due, self.config):
            with at_work():
                self._swap(due)
                self.strategy.begin_forward()

    def swap(self, config: Configuration) -> None:
        """Run another configuration from the next step on, and end the schedule. Collective."""
        self._swap(config)
        self.end_schedule()

    def _swap(self, config: Configuration) -> None:
        communicator = self.communicator
        try:
            for each in (self.config, config):
                _check_swappable(each, config)
            config.validate(self.context.target())
        except ThinwireError as error:
            # The other ranks raise at once, instead of waiting for this one in `agree_on`.
            decline(str(error), communicator.rendezvous, _SWAP)
            raise
        # A backward that raised after its last bucket has not written its residuals yet.
        self.settle_leftover()
        self.strategy.end_open_step()
        agree_on({"program": described(config)}, communicator.rendezvous, communicator.limit, topic=_SWAP)
        new = self.bound(config)  # before the old strategy is retired, in case it raises
        try:
            self.strategy.retire()
        except BaseException:
            new.close()
            raise
        self.strategy, self.must_choose_programs = new, True
        set_aside(self.context.memory)
        self._start_strategy()

    def bound(self, config: Configuration) -> Strategy:
        """Return a new strategy for a configuration, not started yet. Collective."""
        strategy = config.bind(self.context)
        strategy.change = self.change
        program = as_program(config.gradient_program())
        for own in (program, *self.context.exceptions(program).values()):
            groups = own.subgroups(self.communicator.rank, self.communicator.size)
            self.communicator.connect_subgroups(groups)
        return strategy

    def change(self, config: Configuration) -> None:
        """Switch to a changed configuration of the same class, as an audit decides, and end the schedule."""
        self.settle_leftover()
        self.strategy.reconfigure(config)
        self.must_choose_programs = True
        for memory in (self.context.memory, self.context.memory.scoped(MODEL_SCOPE)):
            set_aside(memory)
        self.end_schedule()

    def resume(self, strategy: Strategy) -> None:
        """Run the strategy of a loaded state, without synchronising models as a swap does."""
        if strategy is self.strategy:
            return
        self.strategy.close()
        self.strategy, self.must_choose_programs = strategy, True
        if not any(same_program(self.config, stage) for stage in self.stages.all):
            self.end_schedule()
        self._start_strategy()

    def end_schedule(self) -> None:
        """Stop following the schedule, if there is one."""
        self.schedule_ended = self.schedule_ended or self.stages.schedule is not None
        self.stages = Stages({0: self.config})
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
        self.settle()


def _check_swappable(config: Configuration, wanted: Configuration) -> None:
    if not config.swappable:
        raise UnavailableError(
            f"swap to {short(wanted)}: {config!r} cannot be swapped, {config.fixed_because}"
        )
