"""What Accelerate and Fabric put around optimizers, imitated."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.harness import run_ranks
from tests.models import batch, flat_parameters, mlp
from thinwire.ddp_comm_hooks.optimizer_overlap_hooks import register_optimizer_overlap
from thinwire.models.ddp.model import parameters_of
from thinwire.step.options import optimizers_of

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


class Accelerated(torch.optim.Optimizer):
    """As Accelerate: never initialised; a step is skipped if the inner `step` was not called."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: Any = None) -> None:
        self.optimizer, self.scaler = optimizer, scaler
        self.step_was_skipped = False

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)
    defaults = property(lambda self: self.optimizer.defaults)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.scaler is None:
            self.optimizer.step(closure)
            return
        inner: Any = self.optimizer
        original, called = inner.step, []

        def patched(*args: Any, **kwargs: Any) -> Any:
            called.append(True)
            return original(*args, **kwargs)

        inner.step = patched
        self.scaler.step(inner)
        self.scaler.update()
        inner.step = original
        self.step_was_skipped = not called


class Fabric:
    """As Fabric: of the inner one's class, with its attributes, hooks among them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.__dict__ = dict(vars(optimizer))
        self.__class__ = type(f"Fabric{type(optimizer).__name__}", (type(self), type(optimizer)), {})
        self._optimizer = optimizer

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer

    def step(self, closure: Any = None) -> None:
        self._optimizer.step(closure)


class Lookahead(torch.optim.Optimizer):
    """An optimizer of its own right, which does more after the inner step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        super().__init__(optimizer.param_groups, optimizer.defaults)


class Bare(torch.optim.Optimizer):
    """Neither initialised nor around another one."""

    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": list(params)}]


def given(optimizer: Any, model: nn.Module) -> list[torch.optim.Optimizer]:
    class Wrapper:
        module, parameters_to_ignore = model, frozenset[str]()

    ddp: Any = Wrapper()
    return optimizers_of(optimizer, parameters_of(ddp))


def test_a_wrapped_optimizer_is_the_one_inside_whose_hooks_run() -> None:
    model = nn.Linear(2, 2)
    inner, other = SGD(model.parameters()), SGD(model.parameters())
    for wrapped in (Accelerated(inner), Fabric(inner), Fabric(Accelerated(inner))):
        assert given(wrapped, model) == [inner]
        assert given([inner, wrapped, other], model) == [inner, other]
    lookahead = Lookahead(inner)
    assert given(lookahead, model) == [lookahead], "averages belong after its own part of the step"
    with pytest.raises(thinwire.OptionError, match="optimizer=Bare runs no step hooks"):
        given(Bare(model.parameters()), model)


def trained(rank: int, program: Any, wrap: Any) -> list[torch.Tensor]:
    """The model after every step."""
    ddp = DDP(mlp(width=8, layers=2))
    optimizer = wrap(SGD(ddp.parameters()))
    if program is None:
        register_optimizer_overlap(ddp, optimizer)
    else:
        thinwire.attach(ddp, program, optimizer=optimizer)
    history = []
    for step in range(4):
        optimizer.zero_grad()
        ddp(batch(rank, step, width=8)).square().mean().backward()
        optimizer.step()
        history.append(flat_parameters(ddp.module))
    return history


def wrapped_training(rank: int, world_size: int) -> None:
    for program in (thinwire.LocalSGD(period=2), thinwire.ZeRO(), None):
        expected = trained(rank, program, lambda inner: inner)
        for wrap in (Accelerated, Fabric):
            assert all(map(torch.equal, trained(rank, program, wrap), expected)), (program, wrap)


def test_wrapped_optimizers_train_as_those_inside() -> None:
    run_ranks(wrapped_training, 2)


def overflowing(rank: int, world_size: int) -> tuple[list[bool], torch.Tensor]:
    """Rank 1 overflows alone, in a step after which models are averaged."""
    ddp = DDP(mlp(width=8, layers=2))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = Accelerated(SGD(ddp.parameters()), scaler)
    thinwire.attach(ddp, thinwire.DiLoCo(period=2), optimizer=optimizer)
    skipped = []
    for step in range(4):
        optimizer.zero_grad()
        loss = scaler.scale(ddp(batch(rank, step, width=8)).square().mean())
        (loss * (torch.inf if (rank, step) == (1, 3) else 1)).backward()
        optimizer.step()
        skipped.append(optimizer.step_was_skipped)
    return skipped, flat_parameters(ddp.module)


def test_a_step_that_a_rank_skips_is_seen_as_skipped_and_still_averaged() -> None:
    """Accelerate's LR scheduler waits for a step that was not skipped."""
    (skipped_0, model_0), (skipped_1, model_1) = run_ranks(overflowing, 2)
    assert (skipped_0, skipped_1) == ([False] * 4, [False] * 3 + [True])
    assert torch.equal(model_0, model_1), "averaged with the step that rank 1 skipped, not a forward later"
