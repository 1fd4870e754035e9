"""The entry point, which sets up the exchange between a model's ranks: `wire = attach(ddp, BF16())`."""

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Literal

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from thinwire.amp.loss_scale import ScalerOption
from thinwire.engine.comm.agreement import decline, set_up_of
from thinwire.engine.comm.rendezvous import StoreRendezvous
from thinwire.engine.meter import Meter
from thinwire.errors import OptionError, ThinwireError
from thinwire.models.ddp.model import DDPModel
from thinwire.models.ddp.unwrap import ddp_of, find_ddp, is_wrapper
from thinwire.models.fsdp.gradients import ShardedGradients
from thinwire.models.fsdp.internals import is_sharded
from thinwire.models.local import LocalModel, replica_group
from thinwire.monitors.auditor import Auditor, OnExcess
from thinwire.plan.auto import Auto
from thinwire.programs.description import described
from thinwire.programs.rules import Rules, checked_rules
from thinwire.step.autograd import remove_handles
from thinwire.step.loading import check_loaded_states
from thinwire.step.model import Model, check_device
from thinwire.step.options import Options, optimizers_of, time_limit_of
from thinwire.step.runner import AttachedRun, connect
from thinwire.step.skip_overflows import STEPPED_IN_BACKWARD
from thinwire.step.strategy import Attachable, Stages
from thinwire.strategies.averaging.replica import start_equal
from thinwire.strategies.schedule import Schedule, stages_of
from thinwire.wire import Wire


def attach(
    model: nn.Module,
    program: Attachable | Schedule | Literal["auto"],
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
        AttachError: There is no DistributedDataParallel model in `model`, or it has a communication hook, or
            its parameters are on several devices.
        OptionError: An option is not valid, or does not fit the model or the program.
        UnavailableError: DDP does not end backward itself, or has no buckets (`python_reducer`). Or torch has
            no streams for the model's device (MPS).
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
    stages = stages_of(Auto() if program == "auto" else program)
    handle = _model(model, replicas, stages)
    with _validating(handle, options):
        handle.check_hooks()
        handle.check_finalization()
        check_device(handle)
        options.validate(handle, stages)
    return _start(handle, stages, options)


def _model(model: nn.Module, replicas: object, stages: Stages) -> Model:
    """Return the handle of a model: of DDP, of FSDP2, or of a module that each rank trains on its own."""
    ddp = find_ddp(model)
    if ddp is None and any(map(is_sharded, model.modules() if isinstance(model, nn.Module) else ())):
        if replicas is None:
            raise OptionError(
                f"{type(model).__name__} is sharded by fully_shard, and replicas=None: pass the ranks that"
                " hold the same shard of the other replicas, as attach(model, program,"
                " replicas=mesh['replicate']), with a mesh of dimensions 'replicate' and 'shard'"
            )
        sharded = ShardedGradients(model, replica_group(replicas))
        sharded.check_replicas()
        return sharded
    if ddp is None and not is_wrapper(model) and all(stage.trains_locally for stage in stages.all):
        return LocalModel(model, replica_group(replicas))
    if replicas is not None and (ddp is not None or not is_wrapper(model)):
        raise OptionError(
            f"replicas={replicas!r} is for models without DDP: a DistributedDataParallel model has a process"
            " group of its own, and gradient programs need one; pass it as process_group to DDP"
        )
    return DDPModel(ddp_of(model))


@contextlib.contextmanager
def _validating(model: Model, options: Options) -> Iterator[None]:
    """Report an error on this rank to the others, so that they raise at once instead of waiting."""
    try:
        yield
    except ThinwireError as error:
        decline(str(error), StoreRendezvous(model.group, options.limit_if_valid()))
        raise


def _start(model: Model, stages: Stages, options: Options) -> Wire:
    """Connect to the other ranks, start the strategy, then register the hooks that call it."""
    optimizers = optimizers_of(options.optimizer, model.parameters())
    references = [weakref.ref(optimizer) for optimizer in optimizers]
    connection = connect(
        model,
        set_up_of({}, described(stages.passed), **options.shared(model, stages)),
        limit=time_limit_of(options.timeout),
        meter=Meter(options.history, model.ddp_bytes()),
    )
    run = AttachedRun(
        model,
        connection,
        stages,
        scaler=options.scaler,
        rules=checked_rules(options.rules),
        auditor=Auditor(options.audit_every, options.max_error, options.on_excess, options.history),
        check_every=options.check_every,
        optimizers=lambda: [living for reference in references if (living := reference()) is not None],
    )
    try:
        run.start()
        model.on_gone(remove_handles, check_loaded_states(run))
        run.watch_optimizers(
            optimizers,
            skips=options.skip_overflows is not False,
            obstacle=STEPPED_IN_BACKWARD if run.config.steps_in_backward else None,
        )
        if not isinstance(model, DDPModel):
            start_equal(model)  # DDP has broadcast rank 0's parameters itself
        model.register(run)
    except BaseException:
        run.close()
        raise
    return Wire(run)
