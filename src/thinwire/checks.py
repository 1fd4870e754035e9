"""What `attach` refuses before anything is changed or sent."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from thinwire.averaging.policy import Averaging
from thinwire.bridge import parameters_of
from thinwire.errors import OptionError
from thinwire.programs.program import Program, check_fit, describe, require_program
from thinwire.programs.rules import Rules, check_used, rule_of
from thinwire.sharding.zero import ZeRO


def check_at_least(name: str, value: object, least: int, why: str) -> None:
    """Refuse what is no whole number, or too small a one."""
    if not isinstance(value, int) or value < least:
        raise OptionError(f"{name}={value!r} must be a whole number, at least {least}: {why}")


def check_program(
    program: Program | Averaging | ZeRO, ddp: DistributedDataParallel, optimizers: Sequence[Optimizer]
) -> None:
    """Refuse what is no program, or does not fit the model, its ranks or its optimizers."""
    if isinstance(program, ZeRO):
        _check_zero(program, ddp, optimizers)
    elif not isinstance(program, Averaging):
        require_program(program)
    elif not optimizers:
        raise OptionError(
            f"{program!r} averages models after the optimizer's steps: give it, as in"
            " attach(ddp, ..., optimizer=optimizer)"
        )
    describe(program)
    shapes = {
        name: parameter.shape
        for name, parameter in parameters_of(ddp).items()
        if parameter.requires_grad or not isinstance(program, Averaging | ZeRO)
    }
    check_fit(program, shapes, ddp.process_group.size())


def _check_zero(program: ZeRO, ddp: DistributedDataParallel, optimizers: Sequence[Optimizer]) -> None:
    if len(optimizers) != 1:
        raise OptionError(
            f"{program!r} shards one optimizer's state, and {len(optimizers)} were given: give it, as in"
            " attach(ddp, ..., optimizer=optimizer), with parameter groups for what differs"
        )
    if isinstance(optimizers[0], torch.optim.LBFGS):
        raise OptionError("optimizer=LBFGS searches along all parameters at once: it cannot be sharded")
    if program.interleaved and ddp.find_unused_parameters:
        raise OptionError(
            "interleaved=True cannot tell unused parameters from zero gradients, as DDP does after backward:"
            " use interleaved=False with find_unused_parameters"
        )


def optimizers_of(given: object, ddp: DistributedDataParallel) -> list[Optimizer]:
    """The optimizers given, each once; OptionError for what are none of this model's."""
    listed: list[Any] = [] if given is None else [*given] if isinstance(given, Sequence) else [given]
    optimizers = list({id(one): one for one in listed}.values())
    own = set(map(id, parameters_of(ddp).values()))
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise OptionError(
                f"optimizer={optimizer!r} must be a torch.optim.Optimizer, or a list of them: its hooks tell"
                " when a step is over"
            )
        if not own & {id(one) for group in optimizer.param_groups for one in group["params"]}:
            raise OptionError(
                f"optimizer={type(optimizer).__name__} holds none of the model's parameters: give the one"
                " that steps this model"
            )
    return optimizers


def check_rules(rules: Rules, ddp: DistributedDataParallel) -> None:
    """Refuse rules that nobody follows, and programs that do not fit those who do."""
    shapes = {name: parameter.shape for name, parameter in parameters_of(ddp).items()}
    check_used(rules, shapes)
    for number, (_, program) in enumerate(rules):
        own = {name: shape for name, shape in shapes.items() if rule_of(rules, name, shape) == number}
        check_fit(program, own, ddp.process_group.size())


def check_audits(program: object, audit_every: int) -> None:
    """Refuse to audit what no rank sees whole."""
    if audit_every and isinstance(program, ZeRO):
        raise OptionError(
            f"audit_every={audit_every} cannot look at {program!r}, whose means are spread over their owners:"
            " audit the same program without ZeRO"
        )


def check_skipping(skip_overflows: object, optimizers: Sequence[Optimizer]) -> None:
    """Refuse to skip the steps of nobody."""
    if not isinstance(skip_overflows, bool):
        raise OptionError(f"skip_overflows={skip_overflows!r} must be True or False")
    if skip_overflows and not optimizers:
        raise OptionError(
            "skip_overflows=True needs the optimizer whose steps to skip: give it, as in"
            " attach(ddp, ..., optimizer=optimizer)"
        )
    if skip_overflows and any(isinstance(one, torch.optim.LBFGS) for one in optimizers):
        raise OptionError(
            "skip_overflows=True cannot leave out what overflows in a step of LBFGS, which takes several"
            " backward passes: look at the loss in its closure"
        )


def check_scaler(scaler: object) -> None:
    """Refuse what is no GradScaler."""
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise OptionError(f"scaler={scaler!r} must be a torch.amp.GradScaler: the one that scales the loss")


def time_limit_of(timeout: timedelta | float | None) -> timedelta | None:
    """The time limit as a timedelta; None for that of the process group."""
    if timeout is None:
        return None
    try:
        limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    except (TypeError, ValueError, OverflowError):
        limit = timedelta(0)
    if limit <= timedelta(0):
        raise OptionError(f"timeout={timeout!r} must be a positive number of seconds: it limits every wait")
    return limit
