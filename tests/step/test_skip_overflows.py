"""Which optimizer steps are skipped after an overflow, and what a skipped step leaves as it was."""

import gc
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from tests.models import equal, flat_parameters
from thinwire.step.skip_overflows import Skipping

MADE: list[Callable[[Any], Optimizer]] = [
    lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
    lambda parameters: AdamW(parameters, lr=0.1),
    lambda parameters: AdamW(parameters, lr=0.1, fused=True),
    lambda parameters: Counting(parameters),
]


class Counting(Optimizer):
    """Counts its steps in its groups, with or without gradients, as some optimizers do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "count": 0})

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            group["count"] += 1
            for one in group["params"]:
                if one.grad is not None:
                    one.data.sub_(group["lr"] / group["count"] * one.grad)
        return loss


class Trained:
    """A model whose overflows are set by the test, as the exchange of gradients does."""

    def __init__(self, made: Callable[[Any], Optimizer] = MADE[0], **options: Any) -> None:
        torch.manual_seed(0)
        self.model, self.skipping = nn.Linear(3, 3), Skipping()
        self.optimizer = made(self.model.parameters())
        known = [self.optimizer] if options.pop("known", True) else []
        self.handles = self.skipping.watch(known, self.model.parameters(), **options)

    def backward(self, bad: bool = False) -> torch.Tensor:
        self.skipping.in_backward = True
        loss: torch.Tensor = self.model(torch.ones(1, 3)).square().sum()
        loss.backward()
        if bad:
            for one in self.model.parameters():
                assert one.grad is not None
                one.grad.fill_(math.nan)
        self.skipping.in_backward = False
        self.skipping.settled(0, not bad, lambda: dict(self.model.named_parameters()))
        return loss

    def step(self, bad: bool = False, *, closure: bool = False) -> None:
        def run() -> Any:
            self.optimizer.zero_grad()
            return self.backward(bad)

        if closure:
            self.optimizer.step(run)
        else:
            run()
            self.optimizer.step()

    def state(self) -> list[Any]:
        return [flat_parameters(self.model), self.optimizer.state_dict()]

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


@given(st.sampled_from(MADE), st.booleans(), st.booleans(), st.lists(st.booleans(), min_size=1, max_size=6))
def test_training_with_overflows_is_training_without_those_steps(
    made: Callable[[Any], Optimizer], known: bool, closure: bool, bads: list[bool]
) -> None:
    job, plain = Trained(made, known=known), Trained(made)
    for bad in bads:
        job.step(bad, closure=closure)
        if not bad:
            plain.step(closure=closure)
    assert equal(job.state(), plain.state())
    job.remove()
    plain.remove()


def test_gradients_that_the_loop_has_cleared_or_mended_are_stepped_with() -> None:
    """A loop that checks for itself and tries again must not find its next step skipped."""
    job = Trained()
    before = flat_parameters(job.model)
    job.backward(bad=True)
    for one in job.model.parameters():
        one.grad = torch.ones_like(one)
    job.optimizer.step()
    assert not torch.equal(flat_parameters(job.model), before)
    job.remove()


def test_an_option_of_false_steps_as_plain_ddp_does() -> None:
    job = Trained(skips=False)
    job.step(bad=True)
    assert flat_parameters(job.model).isnan().all()
    job.remove()


def test_a_step_that_raised_gets_its_gradients_back() -> None:
    job = Trained()
    job.backward(bad=True)

    def fail(*_: object) -> None:
        raise KeyError("a user's hook")

    raising = job.optimizer.register_step_pre_hook(fail)
    with pytest.raises(KeyError):
        job.optimizer.step()
    raising.remove()
    job.step()
    assert flat_parameters(job.model).isfinite().all()
    job.remove()


def test_neither_the_model_nor_its_optimizer_is_kept_alive() -> None:
    job = Trained(known=False)
    job.step()
    skipping, handles = job.skipping, job.handles
    del job
    gc.collect()
    assert not skipping._known
    for handle in handles:
        handle.remove()


def test_a_loop_that_skips_the_step_itself_is_not_warned(caplog: pytest.LogCaptureFixture) -> None:
    job = Trained(known=False)
    with caplog.at_level(logging.WARNING, "thinwire"):
        for _ in range(3):
            job.backward(bad=True)
            job.optimizer.zero_grad()
        assert not caplog.records
        with torch.no_grad():
            job.model.weight.fill_(math.nan)  # by an update that has no hooks
        job.backward(bad=True)
        job.backward(bad=True)
    (record,) = caplog.records
    assert "step 0 overflowed" in record.getMessage()
    job.remove()
