"""Which GradScaler a model's residuals follow: the one that steps its optimizer, or the one named."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim.optimizer import _global_optimizer_pre_hooks

from thinwire.amp.loss_scale import Scales
from thinwire.programs.memory import Memory
from thinwire.step.autograd import remove_handles


class Trained:
    """A model whose residual is 1 times the scale of the gradients at hand."""

    def __init__(self, scaler: Any = "auto") -> None:
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.memory, self.scales = Memory(), Scales(scaler)
        handles = self.scales.watch({id(one) for one in self.model.parameters()})
        weakref.finalize(self.model, remove_handles, handles)

    def backward(self, scaler: GradScaler | None = None) -> float:
        """One that exchanges gradients; the residual that it finds."""
        loss = self.model(torch.ones(1, 2)).sum()
        (loss if scaler is None else scaler.scale(loss)).backward()
        self.memory.convert(self.scales.units(False))
        memory = self.memory.staged()
        found = float(memory.read("weight", "residual", lambda: torch.zeros(1)))
        memory.put("weight", "residual", torch.tensor([1.0 if scaler is None else scaler.get_scale()]))
        memory.commit()
        return found

    def step(self, scaler: GradScaler | None = None) -> float:
        found = self.backward(scaler)
        self.optimizer.step() if scaler is None else scaler.step(self.optimizer)
        return found


def scaler_in_use(scale: float) -> GradScaler:
    scaler = GradScaler("cpu", init_scale=scale)
    scaler.scale(torch.ones(1))
    return scaler


@pytest.fixture(autouse=True)
def no_scalers() -> Iterator[None]:
    gc.collect()
    yield
    gc.unfreeze()


def changes(trained: Trained, scaler: GradScaler, own: bool) -> list[float]:
    """Residuals found while the scaler's scale changes with every step."""
    found = []
    for scale in (8.0, 16.0, 4.0, 32.0):
        scaler.update(scale)
        found.append(trained.step(scaler if own else None))
    return found


def test_another_models_scaler_is_not_followed() -> None:
    trained, other = Trained(), scaler_in_use(2.0)
    assert changes(trained, other, own=False) == [0.0, 1.0, 1.0, 1.0]
    assert trained.memory.scale is None, "nor saved"


@pytest.mark.parametrize("hidden", [False, True])
def test_the_scaler_that_steps_the_optimizer_is_followed(hidden: bool) -> None:
    trained, scaler, other = Trained(), scaler_in_use(2.0), scaler_in_use(2.0)
    if hidden:
        del other
        gc.freeze()
    assert changes(trained, scaler, own=True) == [0.0, 16.0, 4.0, 32.0]
    assert trained.memory.scale == 32.0


def test_one_that_only_unscales_is_followed() -> None:
    trained, scaler = Trained(), scaler_in_use(2.0)
    for scale, expected in ((8.0, 0.0), (4.0, 4.0), (16.0, 16.0)):
        scaler.update(scale)
        assert trained.backward(scaler) == expected
        scaler.unscale_(trained.optimizer)
        trained.optimizer.step()


def test_none_and_a_name_are_taken_as_said() -> None:
    scaler, other = scaler_in_use(2.0), scaler_in_use(2.0)
    assert changes(Trained(scaler), scaler, own=True) == [0.0, 16.0, 4.0, 32.0]
    assert changes(Trained(None), other, own=False) == [0.0, 1.0, 1.0, 1.0]
    del scaler
    gc.collect()
    trained = Trained(None)
    trained.memory.keep(("weight", "residual"), torch.ones(1))
    assert trained.backward() == 1.0


def test_loaded_residuals_wait_for_the_scaler_if_there_are_several() -> None:
    """Also where a loaded optimizer's state was made by a step, as torch.distributed.checkpoint does."""
    trained, scaler, other = Trained(), scaler_in_use(8.0), scaler_in_use(2.0)
    trained.optimizer.step()
    saved = Memory()
    saved.keep(("weight", "residual"), torch.tensor([8.0]))
    saved.scale = 8.0
    trained.memory.take_over(saved)
    assert trained.step(scaler) == 8.0
    scaler.update(16.0)
    assert trained.step(scaler) == 16.0
    assert other.get_scale() == 2.0


def test_a_model_that_is_gone_is_not_watched() -> None:
    before = len(_global_optimizer_pre_hooks)
    trained = Trained()
    assert len(_global_optimizer_pre_hooks) == before + 1
    del trained
    gc.collect()
    assert len(_global_optimizer_pre_hooks) == before
