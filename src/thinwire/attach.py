"""The entry point, which sets up the exchange between a model's ranks: `wire = attach(ddp, BF16())`."""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Literal

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from thinwire.amp.loss_scale import ScalerOption, Scales
from thinwire.engine.comm.agreement import decline, set_up_of
from thinwire.engine.comm.rendezvous import StoreRendezvous
from thinwire.engine.meter import Meter
from thinwire.errors import AttachError, OptionError, ThinwireError
from thinwire.models.ddp.internals import comm_hooks, uses_python_reducer
from thinwire.models.ddp.model import Model, remove_handles
from thinwire.models.ddp.reducer import Reducer, raise_python_reducer
from thinwire.models.ddp.unwrap import ddp_of, find_ddp, is_wrapper
from thinwire.models.fsdp.internals import is_sharded
from thinwire.models.fsdp.model import ShardedModel
from thinwire.models.fsdp.reducer import ShardReducer
from thinwire.models.local.group import replica_group
from thinwire.models.local.model import ReplicaModel
from thinwire.models.local.reducer import ReplicaReducer
from thinwire.monitors.auditor import Auditor, OnExcess
from thinwire.options import Options, optimizers_of, time_limit_of
from thinwire.plan.auto import Auto
from thinwire.programs.description import described
from thinwire.programs.memory import Memory
from thinwire.programs.rules import Rules, checked_rules
from thinwire.step.connection import Connection
from thinwire.step.loading import check_loaded_states
from thinwire.step.model import AttachedModel, AttachedReducer
from thinwire.step.runner import AttachedRun, run_group, thinwire_hook
from thinwire.step.skip_overflows import STEPPED_IN_BACKWARD
from thinwire.step.strategy import Context
from thinwire.strategies.averaging.start import start_equal
from thinwire.strategies.schedule import Schedule, Stage, StagePlan
from thinwire.wire import Wire


def attach(
    model: nn.Module,
    program: Stage | Schedule | Literal["auto"],
    *,
    replicas: dist.ProcessGroup | DeviceMesh | None = None,
    rules: Rules = (),
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    timeout: timedelta | float | None = None,
    check_every: int | None = None,
    audit_every: int = 0,
    max_error: float | None = None,
    on_excess: OnExcess = "warn",
    skip_overflows: bool | None = None,
    scaler: ScalerOption = "auto",
    history: int = 1000,
) -> Wire:
    """Exchange a model's gradients, or its parameters, with `program` from now on.

    Every rank of the model's process group must call it, at the same point. Ranks compare versions, program,
    options and parameters, and a difference raises on all of them.

    Args:
        model: A DistributedDataParallel model that has no communication hook yet. Wrappers of `torch.compile`
            and Lightning Fabric around it are unwrapped, and so is a module of `replicate`. Configurations
            that average models, such as `LocalSGD`, also accept a module without DDP. Each rank then trains
            its own replica, and all replicas start from the first rank's parameters and buffers.
        program: The program that averages each bucket, such as `Exact()` or `BF16()`. Or a configuration that
            averages models instead, such as `LocalSGD(period=8)` or `DiLoCo(period=32)`. Or a `Schedule`. Or
            `"auto"` for `Auto()`, which plans on the real network.
        replicas: The ranks that hold replicas of a model without DDP, as a process group or a mesh of one
            dimension. Default: all ranks. A DDP model has a process group of its own.
        rules: Other programs for some parameters, as `[("embed.*", BF16()), (Size(below=4096), Exact())]`.
            The first rule that fits a parameter is used. Tensors of at most one dimension use `Exact()`
            unless a rule fits them. `wire.explain()` shows the result.
        optimizer: The optimizer that steps this model, or a list of them. Configurations that average models,
            such as `LocalSGD`, need it, because they average after its steps.
        timeout: Seconds (or a timedelta) that this rank waits for the others, in a collective or at the
            store, before it raises `WireError`. The job must then be restarted. A rank that evaluates, saves
            a checkpoint or loads data keeps the others waiting in backward, so choose a limit well above the
            longest such pause. Default: the time limit of the model's process group, 30 minutes with Gloo.
        check_every: Compare a fingerprint of all parameters across ranks every `check_every` steps, and raise
            `DriftError` with the name of the first that differs in any bit. Costs one pass over the
            parameters and 8 bytes per parameter tensor and rank. With averaged models, it counts averages
            among all ranks instead of steps. 0: never. None: every 1000 steps in which ranks hold the same
            model. Differences that rounding explains, as between kinds of processors, are then logged
            instead. Larger ones raise, such as after a rank has skipped `optimizer.step()` on its own.
        audit_every: Compare the compressed mean with the exact one every `audit_every` steps. An audited step
            also sends the exact mean. `wire.audits()` keeps the errors by parameter. 0: never.
        max_error: The largest relative error that an audit accepts for any parameter. 0.5 is half of the
            exact mean. With error feedback a larger error does not imply lost gradients, see `AuditRecord`.
        on_excess: The action on all ranks when `max_error` is exceeded: `"warn"` in the log, `"raise"` an
            `AuditError`, or a program to continue with, such as `Exact()`.
        skip_overflows: Whether optimizers skip a step whose gradients are non-finite on any rank, where no
            GradScaler is used. (A GradScaler skips such steps itself.) None does so for `optimizer` and for
            every other optimizer that is found to step the model. If a step cannot be skipped, as of LBFGS,
            the first overflow is a warning in the log. True raises at once if it cannot. False lets the
            optimizer step with gradients of NaN, as plain DDP does.
        scaler: The GradScaler that scales this model's loss, or None if none does. Residuals are rescaled
            when its scale changes. `"auto"` takes the one whose `step` calls that of an optimizer of this
            model's parameters. Before the first such step, `"auto"` takes the only one in use in the process.
            If there are several, loaded residuals keep the scale that they were saved with.
        history: The number of steps that `wire.stats()` keeps in full.

    Returns:
        The wire. Keep it for `stats`, `swap` and `state_dict`. Dropping it changes nothing.

    Raises:
        AttachError: There is no DistributedDataParallel model in `model`, or it has a communication hook.
        OptionError: An option is not valid, or does not fit the model or the program.
        UnavailableError: DDP does not end backward itself, or has no buckets (`python_reducer`).
        StateError: An optimizer was loaded with one rank's shard of a state that was saved under `ZeRO`.
        MismatchError: Ranks differ, or another rank raised. Raised on every other rank.
        WireError: A rank did not call it in time.

    Example::

        wire = thinwire.attach(ddp, thinwire.BF16())
        ...  # train as before
        print(wire.stats())
    """
    options = Options(
        rules=rules,
        optimizer=optimizer,
        timeout=timeout,
        check_every=check_every,
        audit_every=audit_every,
        max_error=max_error,
        on_excess=on_excess,
        skip_overflows=skip_overflows,
        scaler=scaler,
        history=history,
    )
    plan = StagePlan(Auto() if program == "auto" else program)
    ddp = find_ddp(model)
    if ddp is None and any(map(is_sharded, model.modules() if isinstance(model, nn.Module) else ())):
        return _attach_sharded(_sharded_model(model, replicas), plan, options)
    if ddp is None and not is_wrapper(model) and all(stage.trains_locally for stage in plan.stages):
        return _attach_replica(ReplicaModel(model, replica_group(replicas)), plan, options)
    if replicas is not None and (ddp is not None or not is_wrapper(model)):
        raise OptionError(
            f"replicas={replicas!r} is for models without DDP: a DistributedDataParallel model has a process"
            " group of its own, and gradient programs need one; pass it as process_group to DDP"
        )
    return _attach_ddp(ddp_of(model), plan, options)


def _attach_ddp(ddp: DistributedDataParallel, plan: StagePlan, options: Options) -> Wire:
    model = Model(ddp)
    with _validating(model, options):
        _check_hooks(ddp)
        model.check_finalization()
        options.validate(model, plan)
    reducer = Reducer(ddp, ddp.process_group, _connection(model, plan, options), resumes=True)
    return _start(reducer, plan, options, lambda runner: _register(runner, ddp))


def _attach_replica(model: ReplicaModel, plan: StagePlan, options: Options) -> Wire:
    with _validating(model, options):
        options.validate(model, plan)
    reducer = ReplicaReducer(model, _connection(model, plan, options))
    return _start(reducer, plan, options, lambda runner: start_equal(model))


def _sharded_model(model: nn.Module, replicas: object) -> ShardedModel:
    if replicas is None:
        raise OptionError(
            f"{type(model).__name__} is sharded by fully_shard, and replicas=None: pass the ranks that hold"
            " the same shard of the other replicas, as attach(model, program, replicas=mesh['replicate']),"
            " with a mesh of dimensions 'replicate' and 'shard'"
        )
    sharded = ShardedModel(model, replica_group(replicas))
    sharded.check_replicas()
    return sharded


def _attach_sharded(model: ShardedModel, plan: StagePlan, options: Options) -> Wire:
    with _validating(model, options):
        model.check_no_hooks()
        model.check_finalization()
        options.validate(model, plan)
    common = set_up_of({}, described(plan.given), **options.shared(model, plan))
    reducer = ShardReducer(model, _connection(model, plan, options, shard=str(model.shard_key)), common)

    def register(runner: AttachedRun) -> None:
        start_equal(model)
        reducer.register(partial(run_group, runner, reducer))

    return _start(reducer, plan, options, register)


@contextlib.contextmanager
def _validating(model: AttachedModel, options: Options) -> Iterator[None]:
    """Report an error on this rank to the others, so that they raise at once instead of waiting."""
    try:
        yield
    except ThinwireError as error:
        decline(str(error), StoreRendezvous(model.group, options.limit_if_valid()))
        raise


def _connection(model: AttachedModel, plan: StagePlan, options: Options, **subjects: str) -> Connection:
    """Return how to connect to the other ranks, which must agree on the options and on `subjects`."""
    set_up = set_up_of(model.tensors(), described(plan.given), **options.shared(model, plan))
    return Connection(
        set_up={**set_up, **subjects},
        limit=time_limit_of(options.timeout),
        meter=Meter(options.history, model.ddp_bytes()),
        scales=Scales(options.scaler),
    )


def _start(
    reducer: AttachedReducer, plan: StagePlan, options: Options, register: Callable[[AttachedRun], None]
) -> Wire:
    """Start the strategy, then register the hooks that call it."""
    model, runner = reducer.model, None
    try:
        optimizers = optimizers_of(options.optimizer, model.parameters())
        runner = AttachedRun(_context(reducer, options, optimizers), plan)
        runner.start()
        model.on_gone(remove_handles, check_loaded_states(runner))
        skipping = reducer.steps.skipping
        handles = skipping.watch(
            optimizers,
            model.parameters().values(),
            skips=options.skip_overflows is not False,
            obstacle=STEPPED_IN_BACKWARD if runner.config.steps_in_backward else None,
        )
        model.on_gone(remove_handles, handles)
        register(runner)
    except BaseException:
        if runner is not None:
            runner.close()
        reducer.engine.close()
        raise
    return Wire(runner)


def _context(reducer: AttachedReducer, options: Options, optimizers: Sequence[Optimizer]) -> Context:
    references = [weakref.ref(one) for one in optimizers]
    return Context(
        reducer=reducer,
        memory=Memory(),
        rules=checked_rules(options.rules),
        auditor=Auditor(options.audit_every, options.max_error, options.on_excess, options.history),
        check_every=options.check_every,
        optimizers=lambda: [one for reference in references if (one := reference()) is not None],
        scaler=options.scaler,
    )


def _register(runner: AttachedRun, ddp: DistributedDataParallel) -> None:
    try:
        ddp.register_comm_hook(runner, thinwire_hook)
    except RuntimeError as error:
        raise AttachError(f"DDP did not accept the hook: {error}") from error


def _check_hooks(ddp: DistributedDataParallel) -> None:
    if uses_python_reducer(ddp):
        raise_python_reducer("torch._dynamo.config.optimize_ddp was 'python_reducer' when DDP was made")
    for hook in comm_hooks(ddp):
        if hook is thinwire_hook:
            raise AttachError("this model has a wire already: use wire.swap(program) to change it")
        raise AttachError(
            f"this model has the communication hook {hook.__qualname__!r} already, and DDP"
            " accepts only one: wrap the module in a new DistributedDataParallel"
        )
