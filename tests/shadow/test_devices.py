"""Devices of models and tensors, and what the host waits for, on the shadow device."""

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.harness import run_ranks
from tests.shadow import device
from tests.shadow.device import SHADOW
from thinwire.codecs.codec import Parts
from thinwire.engine.comm.agreement import set_up_of
from thinwire.errors import AttachError, MismatchError
from thinwire.programs.description import described
from thinwire.step import runner

LIMIT = 120
WIDTH = 16


class TwoDevices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, device="shadow:0"), nn.Linear(4, 4, device="shadow:1")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.first(x).to("shadow:1"))
        return result


def two_devices(rank: int, world_size: int) -> str:
    with pytest.raises(AttachError) as caught:
        thinwire.attach(DDP(TwoDevices()), thinwire.Int8(), timeout=LIMIT)
    return str(caught.value)


def test_a_model_on_two_devices_is_rejected_on_every_rank() -> None:
    """The engine has one stream beside backward's. On the second device, no event would order its work."""
    for message in run_ranks(two_devices, 2, backend=SHADOW):
        assert "'first.weight' on shadow:0, 'second.weight' on shadow:1" in message


@dataclass(frozen=True)
class Half(thinwire.Codec):
    wire_bits = 16

    def encode(self, x: torch.Tensor) -> Parts:
        return (x.flatten().to(torch.float16, copy=True),)

    def decode(self, parts: Parts, into: torch.Tensor) -> torch.Tensor:
        return into.copy_(parts[0].view_as(into))


SET_UPS: dict[str, tuple[Any, dict[str, Any]]] = {
    "RandomK": (thinwire.RandomK(0.25), {}),
    "PowerSGD that starts afresh": (
        thinwire.PowerSGD(rank=2, min_compression=1, warmup=0, warm_start=False),
        {},
    ),
    "a custom codec": (thinwire.ErrorFeedback(thinwire.TwoShot(Half())), {}),
    "unused parameters": (thinwire.Int8(), {"find_unused_parameters": True}),
    "a static graph": (thinwire.Int8(), {"static_graph": True}),
}


def host_waits(rank: int, world_size: int) -> dict[str, list[dict[str, int]]]:
    """Return what the host waited for in each backward."""
    found: dict[str, list[dict[str, int]]] = {}
    for name, (program, options) in SET_UPS.items():
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        ddp = DDP(layers.to("shadow"), bucket_cap_mb=0.001, **options)
        wire = thinwire.attach(ddp, program, timeout=LIMIT)
        found[name] = []
        for step in range(4):
            ddp.zero_grad()
            loss = ddp(torch.full((3, WIDTH), float(rank + step), device="shadow")).square().mean()
            device.reset()
            loss.backward()
            waits = device.operations().items()
            found[name].append({what: count for what, count in waits if what.startswith("host waits")})
        assert device.races() == []
        wire.finalize()
    return found


def test_the_host_waits_once_per_backward() -> None:
    for found in run_ranks(host_waits, 2, backend=SHADOW):
        for name, waits in found.items():
            # DDP lays out its buckets in the first two backward passes, with waits of its own.
            assert [sum(step.values()) for step in waits[2:]] == [1, 1], (name, waits)


def without_pieces(rank: int, world_size: int) -> torch.Tensor:
    """Three ranks average two numbers, so that one of them has none to average."""
    ddp = DDP(nn.Linear(2, 1, bias=False).to("shadow"))
    thinwire.attach(ddp, thinwire.ErrorFeedback(thinwire.TwoShot(Half())), timeout=LIMIT)
    ddp(torch.full((1, 2), float(rank), device="shadow")).sum().backward()
    gradient = ddp.module.weight.grad
    assert isinstance(gradient, torch.Tensor)
    return gradient.cpu()


def test_a_custom_codec_works_where_a_rank_has_no_pieces() -> None:
    for gradient in run_ranks(without_pieces, 3, backend=SHADOW):
        assert torch.equal(gradient, torch.ones(1, 2))


def unlike_devices(rank: int, world_size: int) -> str:
    """Train where rank 1's device computes in float64 and rank 0's does not."""
    with (
        patch.object(runner, "has_float64", lambda device: rank == 1),
        pytest.raises(MismatchError) as caught,
    ):
        thinwire.attach(DDP(nn.Linear(2, 2).to("shadow")), thinwire.PowerSGD(), timeout=LIMIT)
    return str(caught.value)


def test_ranks_with_and_without_float64_cannot_train_together() -> None:
    for message in run_ranks(unlike_devices, 2, backend=SHADOW):
        assert "shadow without float64" in message


def test_powersgd_on_a_cpu_and_on_an_accelerator_differ_in_their_set_up() -> None:
    """Their bases have other bits. Other programs have the same bits on both."""
    powersgd, int8 = (
        [
            runner.arithmetic(torch.device(kind), set_up_of({}, described(program)))
            for kind in ("cpu", "cuda", "hpu")
        ]
        for program in (thinwire.Warmup(thinwire.PowerSGD(), steps=1), thinwire.Int8())
    )
    assert powersgd[0] != powersgd[1] == powersgd[2]
    assert int8 == [{}, {}, {}]
