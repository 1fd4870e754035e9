"""Set-ups of training that run on the CPU and on the shadow device, to be compared.

Both runs are in one process of each rank, on the same data. Gradients have the same bits on both, because the
shadow device computes with torch's CPU kernels. thinwire takes different ways: native kernels and the wire
thread on the CPU, torch's operations and the inline engine on a device.
"""

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.shadow import device

WIDTH = 24
STEPS = 5


@dataclass(frozen=True, kw_only=True)
class SetUp:
    """A model, a program and the way they train.

    Args:
        program: The second argument of attach; None for plain DDP.
        options: Further arguments of attach.
        ddp: Further arguments of DistributedDataParallel.
        dtype: The dtype of the parameters.
        micro_batches: The number of backward passes in a step, all but the last without synchronisation.
        scaled: Whether a GradScaler scales the loss.
        close: The largest difference from the CPU's numbers; 0 asks for the same bits.
    """

    program: Any
    options: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    micro_batches: int = 1
    scaled: bool = False
    close: float = 0.0


PROGRAMS: dict[str, SetUp] = {
    "plain DDP": SetUp(program=None),
    "Exact": SetUp(program=thinwire.Exact()),
    "Int8": SetUp(program=thinwire.Int8()),
    "PowerSGD": SetUp(program=thinwire.PowerSGD(rank=2, warmup=0), close=1e-4),
}


@dataclass(frozen=True)
class Found:
    """What one rank found.

    Args:
        parameters: The parameters after training on the shadow device.
        difference: The largest difference of a parameter or buffer from training on the CPU.
        races: The races on the shadow device.
        waits: What the host waited for on it, and how often.
    """

    parameters: torch.Tensor
    difference: float
    races: list[str]
    waits: dict[str, int]


def run(rank: int, world_size: int, name: str) -> Found:
    """Train a set-up on the CPU, then on the shadow device."""
    set_up = PROGRAMS[name]
    on_cpu = train(set_up, "cpu", rank)
    device.reset()
    on_shadow = train(set_up, "shadow", rank)
    waits = {what: count for what, count in device.operations().items() if what.startswith("host waits")}
    difference = max(float((own - other).abs().max()) for own, other in zip(on_shadow, on_cpu, strict=True))
    return Found(on_shadow[0], difference, device.races(), waits)


class Net(nn.Module):
    """Layers of several sizes, statistics that DDP broadcasts, and a parameter that some steps do not use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = nn.BatchNorm1d(2 * WIDTH)
        self.second = nn.Linear(2 * WIDTH, 2 * WIDTH)
        self.gain = nn.Parameter(torch.ones(2 * WIDTH))
        self.last = nn.Linear(2 * WIDTH, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.second(torch.relu(self.norm(self.first(x)))) * self.gain
        result: torch.Tensor = self.last(torch.tanh(hidden)).float().square().mean()
        return result


def batches(rank: int, dtype: torch.dtype, where: str) -> Iterable[torch.Tensor]:
    data = torch.Generator().manual_seed(rank + 1)
    while True:
        yield torch.randn(6, WIDTH, generator=data).to(dtype).to(where)


def train(set_up: SetUp, where: str, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the parameters and the buffers after some steps, on the CPU."""
    ddp = DDP(Net().to(set_up.dtype).to(where), bucket_cap_mb=0.004, **set_up.ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler(where, init_scale=2.0**10, growth_interval=2) if set_up.scaled else None
    options = {"timeout": 120, **set_up.options}
    if scaler is not None:
        options["scaler"] = scaler
    wire = None if set_up.program is None else thinwire.attach(ddp, set_up.program, **options)
    data = iter(batches(rank, set_up.dtype, where))
    for _ in range(STEPS):
        optimizer.zero_grad()
        for micro in range(set_up.micro_batches):
            last = micro + 1 == set_up.micro_batches
            with contextlib.nullcontext() if last else ddp.no_sync():
                loss = ddp(next(data))
                (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    if wire is not None:
        wire.finalize()
    return flat(ddp.parameters()), flat(ddp.buffers())


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().cpu().double().flatten() for tensor in tensors])
