"""One line decides what a DDP model's ranks exchange: `wire = attach(ddp, BF16())`."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from thinwire.averaging.policy import Averaging
from thinwire.bridge import Bridge, parameters_of
from thinwire.checks import (
    check_at_least,
    check_audits,
    check_program,
    check_rules,
    check_scaler,
    check_skipping,
    optimizers_of,
    time_limit_of,
)
from thinwire.errors import AttachError, ThinwireError
from thinwire.handle import Wire, thinwire_hook
from thinwire.programs.auditor import Auditor, OnExcess, check_audit
from thinwire.programs.rules import Rules, checked_rules
from thinwire.scalers import Scales
from thinwire.schedules import Runs, Schedule, stages_of
from thinwire.set_ups import decline, set_up_of
from thinwire.sharding.zero import ZeRO
from thinwire.skipping import skip
from thinwire.wire.agree import Meeting
from thinwire.wire.meter import Meter


def attach(
    ddp: DistributedDataParallel,
    program: Runs | Schedule,
    *,
    rules: Rules = (),
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    timeout: timedelta | float | None = None,
    check_every: int = 0,
    audit_every: int = 0,
    max_error: float | None = None,
    on_excess: OnExcess = "warn",
    skip_overflows: bool = False,
    scaler: GradScaler | None = None,
    history: int = 1000,
) -> Wire:
    """Average `ddp`'s gradients by `program` from now on; or its models, every so many steps.

    Every rank of the model's process group must call it, at the same point: ranks compare versions,
    program, options and parameters, and a difference raises on all of them.

    Args:
        ddp: A DistributedDataParallel model that has no communication hook yet.
        program: What to do with each bucket, such as `Exact()` or `BF16()`; or when to average models
            instead, such as `LocalSGD(period=8)` or `DiLoCo(period=32)`; or a `Schedule` of these.
        rules: Other programs for some parameters, as `[("embed.*", BF16()), (Size(below=4096), Exact())]`;
            the first that fits holds. Tensors of at most one dimension go by `Exact()` unless a rule says
            otherwise. `wire.explain()` shows what follows.
        optimizer: The optimizer, or all of them, that step this model. `LocalSGD` and its like need it: they
            average after its steps.
        timeout: Seconds (or a timedelta) that a collective may take before it is an error on this rank.
            Default: the time limit of the model's process group. Choose it well above the longest pause
            of any rank within a step.
        check_every: Every so many steps, compare a fingerprint of all parameters across ranks, and raise
            `DriftError` naming the first that differs. Costs one pass over the parameters and 8 bytes
            per parameter tensor and rank. Where models are averaged: every so many averages among all ranks.
            0: never.
        audit_every: Every so many steps, compare the compressed mean with the exact one, which that step
            exchanges on top; `wire.audits()` keeps the errors by parameter. 0: never.
        max_error: The relative error that an audit lets pass for every parameter. 0.5: half of the exact
            mean. With error feedback more is no loss by itself, see `AuditRecord`.
        on_excess: What follows from a larger one, on all ranks: `"warn"` in the log, `"raise"` an
            `AuditError`, or a program to go on with, such as `Exact()`.
        skip_overflows: Without a GradScaler: have the optimizer leave out a step whose gradients are infinite
            or NaN on any rank. (A GradScaler does that by itself.)
        scaler: The GradScaler that scales this model's loss. Residuals are kept in its units, so they follow
            when its scale changes. Needed only where a process has several: a single one is found.
        history: How many steps `wire.stats()` keeps in full.

    Returns:
        The wire. Keep it for `stats`, `swap` and `state_dict`; dropping it changes nothing.

    Example::

        wire = thinwire.attach(ddp, thinwire.BF16())
        ...  # train as before
        print(wire.stats())
    """
    options = _Options(
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
    return _attach(ddp, program, options)


@dataclass(frozen=True, kw_only=True)
class _Options:
    """What was asked for, and what all ranks must have asked for alike."""

    rules: Rules
    optimizer: Optimizer | Sequence[Optimizer] | None
    timeout: timedelta | float | None
    check_every: int
    audit_every: int
    max_error: float | None
    on_excess: OnExcess
    skip_overflows: bool
    scaler: GradScaler | None
    history: int

    def check(self, ddp: DistributedDataParallel, program: Runs | Schedule) -> None:
        """Refuse what does not fit, before anything is changed or sent."""
        _check_hooks(ddp)
        optimizers = optimizers_of(self.optimizer, ddp)
        check_rules(checked_rules(self.rules), ddp)
        for stage in stages_of(program):
            check_program(stage, ddp, optimizers)
            check_audits(stage, self.audit_every)
        check_skipping(self.skip_overflows, optimizers)
        check_at_least("check_every", self.check_every, 0, "0 never compares the replicas")
        check_at_least("history", self.history, 1, "stats() shows the latest steps")
        check_audit(self.audit_every, self.max_error, self.on_excess)
        if not isinstance(self.on_excess, str):
            check_program(self.on_excess, ddp, optimizers)
        time_limit_of(self.timeout)
        check_scaler(self.scaler)

    def shared(self) -> dict[str, object]:
        """What must be equal on all ranks."""
        audits = (self.audit_every, self.max_error, self.on_excess)
        return {"check_every": self.check_every, "rules": checked_rules(self.rules), "audits": audits}


def _attach(ddp: DistributedDataParallel, program: Runs | Schedule, options: _Options) -> Wire:
    if not isinstance(ddp, DistributedDataParallel):
        raise AttachError(
            f"attach needs a DistributedDataParallel model, not a {type(ddp).__name__}: wrap it with"
            " torch.nn.parallel.DistributedDataParallel(model) first"
        )
    try:
        options.check(ddp, program)
    except ThinwireError as error:
        decline(str(error), Meeting(ddp.process_group))
        raise
    optimizers = optimizers_of(options.optimizer, ddp)
    bridge = Bridge(
        ddp,
        ddp.process_group,
        set_up_of(parameters_of(ddp), program, **options.shared(), **_frozen(program, ddp)),
        limit=time_limit_of(options.timeout),
        meter=Meter(options.history),
        resumes=True,
        scales=Scales(options.scaler),
    )
    auditor = Auditor(options.audit_every, options.max_error, options.on_excess, options.history)
    wire = None
    try:
        rules = checked_rules(options.rules)
        wire = Wire(bridge, program, ddp, optimizers, options.check_every, rules, auditor)
        if options.skip_overflows:
            skip(optimizers, bridge, ddp)
        ddp.register_comm_hook(wire, thinwire_hook)
    except BaseException as error:
        if wire is not None:
            wire._close()
        bridge.engine.close()
        if wire is not None and isinstance(error, RuntimeError):
            raise AttachError(f"DDP did not accept the hook: {error}") from error
        raise
    return wire


def _frozen(program: Runs | Schedule, ddp: DistributedDataParallel) -> dict[str, object]:
    """Parameters that do not train do not travel, so all ranks must have the same ones."""
    frozen = [name for name, one in parameters_of(ddp).items() if not one.requires_grad]
    averages = any(isinstance(stage, Averaging | ZeRO) for stage in stages_of(program))
    return {"frozen": frozen} if averages else {}


def _check_hooks(ddp: DistributedDataParallel) -> None:
    for hook, _ in ddp._comm_hooks:
        if hook is thinwire_hook:
            raise AttachError("this model has a wire already: use wire.swap(program) to change it")
        raise AttachError(
            f"this model has the communication hook {hook.__qualname__!r} already, and DDP keeps one for"
            " life: wrap the module in a new DistributedDataParallel"
        )
