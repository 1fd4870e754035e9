"""Random delays everywhere, collectives of the user's beside ours: the order and the bits stay the same."""

import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.harness import run_ranks
from tests.models import Staged, SyncCenter, batch, flat_parameters

WIDTH = 16


class Sleepy(nn.Module):
    """A layer that takes its time, in forward and in backward, differently on every rank."""

    def __init__(self, inner: nn.Module, rng: random.Random) -> None:
        super().__init__()
        self.inner = inner
        self._rng = rng

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x)
        if result.requires_grad:
            result.register_hook(self._sleep)
        return result

    def _sleep(self, gradient: torch.Tensor) -> None:
        if self._rng.random() < 0.1:
            time.sleep(self._rng.random() * 0.004)


def user_collective(gradient: torch.Tensor) -> None:
    dist.all_reduce(gradient.sum())


def chaos(rank: int, world_size: int, steps: int) -> tuple[torch.Tensor, list[Any]]:
    random.seed(f"rank {rank} of {world_size}")
    rng = random.Random(rank)
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for index in range(24):
        layers += [Sleepy(nn.Linear(WIDTH, WIDTH), rng), nn.Tanh()]
        if index % 8 == 4:
            layers.append(SyncCenter())
    ddp = DDP(nn.Sequential(*layers), bucket_cap_mb=0.0005)
    wire = thinwire.attach(ddp, Staged(longest_sleep=0.003), check_every=50)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        output = ddp(batch(rank, step, WIDTH))
        output.register_hook(user_collective)
        output.square().mean().backward()
        optimizer.step()
    return flat_parameters(ddp.module), [record.order for record in wire.stats().records]


@pytest.mark.parametrize(
    ("world_size", "steps"),
    [pytest.param(2, 200, marks=pytest.mark.slow), (3, 20), pytest.param(4, 30, marks=pytest.mark.slow)],
)
def test_order_and_bits_are_the_same_on_every_rank(world_size: int, steps: int) -> None:
    results = run_ranks(chaos, world_size, steps)
    parameters, orders = results[0]
    assert len(orders) == steps
    assert len({bucket for bucket, _, _ in orders[-1]}) >= 20
    assert {stage for _, stage, _ in orders[-1]} == {0, 1, 2, 3}
    for other_parameters, other_orders in results[1:]:
        assert torch.equal(parameters, other_parameters)
        assert orders == other_orders
