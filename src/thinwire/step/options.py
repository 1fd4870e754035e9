"""The options of `attach`, validated on this rank before anything is changed or sent."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.amp import GradScaler
from torch.nn import Embedding, EmbeddingBag
from torch.optim import Optimizer

from thinwire.amp.loss_scale import ScalerOption
from thinwire.codecs.checks import check_whole
from thinwire.errors import OptionError
from thinwire.monitors.auditor import OnExcess, check_audit
from thinwire.programs.description import describe, described
from thinwire.programs.rules import Rules, check_used, checked_rules, parameters_by_rule
from thinwire.step.autograd import step_hooks
from thinwire.step.model import Model
from thinwire.step.strategy import Stages, Target, configuration_of


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options that `attach` takes besides the program."""

    rules: Rules
    optimizer: Optimizer | Sequence[Optimizer] | None
    timeout: timedelta | float | None
    check_every: int | None
    audit_every: int
    max_error: float | None
    on_excess: OnExcess
    skip_overflows: bool | None
    scaler: ScalerOption
    history: int

    def validate(self, model: Model, stages: Stages) -> None:
        """Validate all options.

        Raises:
            OptionError: An option is not valid, or does not fit the model or the program.
            StateError: An optimizer holds a shard of its state that ZeRO saved on another rank.
        """
        optimizers = optimizers_of(self.optimizer, model.parameters())
        check_dense(model)
        check_rules(self.rules, model)
        check_scaler(self.scaler)
        target = Target(model, optimizers, audits=bool(self.audit_every), scaler=self.scaler)
        for stage in stages.all:
            stage.validate(target)
            target.check_states(stage)
        in_backward = any(stage.steps_in_backward for stage in stages.all)
        check_skipping(self.skip_overflows, optimizers, in_backward=in_backward)
        if self.check_every is not None:
            check_whole("check_every", self.check_every, 0, "0 never compares the replicas")
        check_whole("history", self.history, 1, "stats() shows the latest steps")
        check_audit(self.audit_every, self.max_error, self.on_excess)
        if not isinstance(self.on_excess, str):
            configuration_of(self.on_excess).validate(target)
            for stage in stages.all:
                stage.with_gradient_program(self.on_excess)  # raises where it cannot take over
        time_limit_of(self.timeout)

    def limit_if_valid(self) -> timedelta | None:
        """Return the time limit, or None for the process group's if the one given is not valid."""
        try:
            return time_limit_of(self.timeout)
        except OptionError:
            return None

    def shared(self, model: Model, stages: Stages) -> dict[str, object]:
        """Return the options that must be equal on all ranks."""
        shared: dict[str, object] = {
            "check_every": self.check_every,
            "rules": described(checked_rules(self.rules)),
            "audits": described((self.audit_every, self.max_error, self.on_excess)),
        }
        if model.shard_key is not None or any(stage.exchanges_parameters for stage in stages.all):
            # Frozen parameters are not exchanged then, so ranks must agree on which are frozen. (DDP compares
            # itself what it reduces.)
            parameters = model.parameters().items()
            shared["frozen"] = [name for name, parameter in parameters if not parameter.requires_grad]
        return shared


def optimizers_of(passed: object, parameters: Mapping[str, torch.Tensor]) -> list[Optimizer]:
    """Return the optimizers passed, each once; raise OptionError unless all are optimizers of this model."""
    listed: list[Any] = [] if passed is None else [*passed] if isinstance(passed, Sequence) else [passed]
    for item in listed:
        if not isinstance(item, Optimizer):
            raise OptionError(
                f"optimizer={item!r} must be a torch.optim.Optimizer, or a list of them: thinwire registers"
                " step hooks on it"
            )
    optimizers = list({id(inner): inner for inner in map(unwrapped, listed)}.values())
    own = set(map(id, parameters.values()))
    for optimizer in optimizers:
        if not own & {id(held) for group in optimizer.param_groups for held in group["params"]}:
            raise OptionError(
                f"optimizer={type(optimizer).__name__} holds none of the model's parameters: pass the one"
                " that steps this model"
            )
    return optimizers


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """Return the innermost optimizer, whose step hooks run.

    A framework's wrapper has no step hooks, or shares those of the optimizer inside. Accelerate's is an
    Optimizer that was never initialised. Fabric's is a copy of the inner one's attributes.

    Raises:
        OptionError: It has no step hooks.
    """
    hooks = step_hooks(optimizer)
    for name in ("optimizer", "_optimizer"):
        inner = getattr(optimizer, name, None)
        if isinstance(inner, Optimizer) and (hooks is None or hooks is step_hooks(inner)):
            return unwrapped(inner)
    if hooks is None:
        raise OptionError(
            f"optimizer={type(optimizer).__name__} runs no step hooks, so thinwire cannot detect its steps:"
            " pass the optimizer that it wraps, or call super().__init__() in its constructor"
        )
    return optimizer


def check_dense(model: Model) -> None:
    """Raise OptionError if a layer has sparse gradients, which programs cannot exchange."""
    trained = {id(tensor): name for name, tensor in model.parameters().items() if tensor.requires_grad}
    for module in model.module("attach").modules():
        name = trained.get(id(getattr(module, "weight", None)))
        if name is not None and isinstance(module, Embedding | EmbeddingBag) and module.sparse:
            raise OptionError(
                f"{name} has sparse gradients ({type(module).__name__} with sparse=True), which thinwire does"
                " not exchange: make it with sparse=False, or make DDP ignore it with"
                " DistributedDataParallel._set_params_and_buffers_to_ignore_for_model"
            )


def check_rules(rules: Rules, model: Model) -> None:
    """Raise OptionError if a rule fits no parameter, or its program does not fit its parameters."""
    shapes = model.shapes()
    check_used(rules, shapes)
    members = parameters_by_rule(rules, shapes)
    for number, (_, program) in enumerate(checked_rules(rules)):
        describe(program)
        program.check(members[number], model.group.size())


def check_skipping(
    skip_overflows: object, optimizers: Sequence[Optimizer], *, in_backward: bool = False
) -> None:
    """Raise OptionError if overflowed steps of these optimizers must be skipped, and cannot be."""
    if skip_overflows is not None and not isinstance(skip_overflows, bool):
        raise OptionError(
            f"skip_overflows={skip_overflows!r} must be True, False, or None to skip where it is possible"
        )
    if skip_overflows and in_backward:
        raise OptionError(
            "skip_overflows=True cannot skip steps that ZeRO(interleaved=True) takes inside backward: use"
            " interleaved=False"
        )
    if skip_overflows and not optimizers:
        raise OptionError(
            "skip_overflows=True needs the optimizer whose steps to skip: pass it, as in"
            " attach(ddp, ..., optimizer=optimizer)"
        )
    if skip_overflows and any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
        raise OptionError(
            "skip_overflows=True does not work with LBFGS, whose step takes several backward passes: check"
            " the loss in its closure instead"
        )


def check_scaler(scaler: object) -> None:
    """Raise OptionError unless the option is a GradScaler, None or "auto"."""
    if scaler not in (None, "auto") and not isinstance(scaler, GradScaler):
        raise OptionError(
            f"scaler={scaler!r} must be the torch.amp.GradScaler that scales the loss, or None if none does,"
            ' or "auto"'
        )


def time_limit_of(timeout: timedelta | float | None) -> timedelta | None:
    """Return the time limit as a timedelta, or None for the limit of the process group."""
    return None if timeout is None else duration_of("timeout", timeout)


def duration_of(name: str, value: timedelta | float) -> timedelta:
    """Return an option as a timedelta; raise OptionError unless it is a positive number of seconds."""
    try:
        limit = value if isinstance(value, timedelta) else timedelta(seconds=value)
    except (TypeError, ValueError, OverflowError):
        limit = timedelta(0)
    if limit <= timedelta(0):
        raise OptionError(f"{name}={value!r} must be a positive number of seconds: it limits every wait")
    return limit
