"""The devices of a model, before anything is exchanged."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import thinwire
from thinwire.engine.streams import require_streams
from thinwire.errors import AttachError, UnavailableError
from thinwire.step.model import check_device


@pytest.mark.usefixtures("alone")
def test_a_model_on_two_devices_cannot_be_attached() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(
        AttachError, match=r"on 2 devices \('0.weight' on cpu, '1.weight' on meta\).*fully_shard"
    ):
        thinwire.attach(module, thinwire.LocalSGD(2), optimizer=optimizer)


def test_a_device_without_streams_is_an_error_with_the_way_out() -> None:
    with pytest.raises(UnavailableError, match=r"on mps, and torch.mps has no streams.*move the model"):
        require_streams(torch.device("mps"))
    model: Any = SimpleNamespace(tensors=lambda: {"w": SimpleNamespace(device=torch.device("mps"))})
    with pytest.raises(UnavailableError, match="no streams"):
        check_device(model)


@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu"])
def test_a_device_with_streams_is_none(device: str) -> None:
    require_streams(torch.device(device))
