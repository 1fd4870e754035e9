"""The user's model is tried once before anything is built for it."""

import time
from typing import Any

import pytest
import torch
from torch import nn

from tests.models import LossOfMLP, SyncCenter, batch
from thinwire import OptionError
from thinwire.tools.bench.workloads import check_workload, find_workload


def _batch(rank: int, step: int) -> torch.Tensor:
    return batch(rank, step, width=128, rows=4)


class Logits(nn.Linear):
    def __init__(self) -> None:
        super().__init__(128, 10)


class Pair(Logits):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x).mean(), x


class Frozen(LossOfMLP):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class TwoInputs(LossOfMLP):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x + y)


class Collective(LossOfMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(SyncCenter()(x))


def fine() -> Any:
    return LossOfMLP(), _batch


def collective() -> Any:
    return Collective(), _batch


def logits() -> Any:
    return Logits(), _batch


def pair() -> Any:
    return Pair(), _batch


def frozen() -> Any:
    return Frozen(), _batch


def two_inputs() -> Any:
    return TwoInputs(), _batch


def batch_of_step() -> Any:
    return LossOfMLP(), lambda step: _batch(0, step)


def no_data() -> Any:
    def fails(rank: int, step: int) -> torch.Tensor:
        raise FileNotFoundError("train.bin")

    return LossOfMLP(), fails


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("logits", r"has the shape \(4, 10\), as logits have: forward must .* return its loss"),
        ("pair", "is a tuple: forward must take a batch and return its loss"),
        ("frozen", "does not depend on a parameter"),
        ("two_inputs", "TypeError: .*'y'.*: forward takes one batch"),
        ("batch_of_step", r"batch\(0, 0\) does not work .TypeError.* batch takes a rank and a step"),
        ("no_data", r"batch\(0, 0\) does not work .FileNotFoundError: train.bin"),
        ("LossOfMLP", r"is a class: pass a function .* LossOfMLP\(\), batch"),
    ],
)
def test_a_model_that_cannot_train_is_one_clear_error(name: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        check_workload(f"tests.tools.bench.test_workloads:{name}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tests/models.py:build", "names a file: .* tests.models:build"),
        ("train.py:build", "names a file: .* train:build"),
        ("train.py", "names no function: .* train:build"),
    ],
)
def test_a_file_is_not_a_module(name: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        check_workload(name)


@pytest.mark.parametrize("name", ["fine", "collective"])
def test_a_model_that_trains_passes_even_if_it_communicates(name: str) -> None:
    check_workload(f"tests.tools.bench.test_workloads:{name}")
    assert not torch.distributed.is_initialized()


def test_the_sleeper_has_the_gradients_of_the_small_gpt_and_leaves_the_processor_free() -> None:
    workload, gpt = find_workload("sleep-1m"), find_workload("gpt-1m").model()
    model = workload.model()
    shapes = sorted(parameter.shape for parameter in model.parameters())
    assert shapes == sorted(parameter.shape for parameter in gpt.parameters())
    optimizer = workload.optimizer(model.parameters())
    losses = []
    for step in range(4):
        began, used = time.perf_counter(), time.process_time()
        loss = model(workload.batch(0, step))
        loss.backward()
        assert time.perf_counter() - began >= 0.07, "forward and backward take their time"
        slept = time.perf_counter() - began - (time.process_time() - used)
        assert slept > 0.035, "a sleeping processor is free"
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(parameter.grad is not None for parameter in model.parameters())
