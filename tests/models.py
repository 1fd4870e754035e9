"""Small models and programs that several tests use."""

import random
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from thinwire import AllGather, AllReduce, AllToAll, Bucket, Collectives, Memory, Outcome
from thinwire.engine.comm.process_group import torch_version

COMPLEX = torch.complex64 if torch_version() >= (2, 9) else torch.float32
"""The dtype of complex parameters; real for torch 2.6, whose DDP cannot broadcast complex ones by Gloo."""


def mlp(width: int = 24, layers: int = 6, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(module for _ in range(layers) for module in (nn.Linear(width, width), nn.Tanh())))


def batch(rank: int, step: int, width: int = 24, rows: int = 4) -> torch.Tensor:
    """Different data on every rank and step, the same in every run."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1000 * step + rank))


def late(gradient: torch.Tensor) -> None:
    """A hook on gradients, some of which are then computed late."""
    if random.random() < 0.05:
        time.sleep(random.random() * 0.002)


def own(state: dict[str, Any]) -> dict[str, Any]:
    """What a wire's state has of its rank."""
    ((inner,),) = state.values()
    assert isinstance(inner, dict)
    return inner


def changed(state: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A wire's state with other values in it."""
    (key,) = state
    return {key: ({**own(state), **changes},)}


def equal(one: Any, other: Any) -> bool:
    """Bit by bit, however deep."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def flat_gradients(model: nn.Module) -> torch.Tensor:
    parts = [
        torch.view_as_real(p.grad).flatten() if p.grad.is_complex() else p.grad.flatten().float()
        for p in model.parameters()
        if p.grad is not None
    ]
    return torch.cat(parts)


def flat_parameters(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@dataclass(frozen=True)
class Staged:
    """An exact mean that takes 1 to 4 collectives, by bucket, sleeping at random on its way."""

    longest_sleep: float = 0.0

    def __call__(self, bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
        for name, view in bucket.views().items():
            memory.slot(name, "steps", lambda: torch.zeros(1)).add_(1)
            memory.slot(name, "shape", lambda view=view: torch.zeros(view.shape))  # type: ignore[misc]
        stages = 1 + bucket.index % 4
        probe = torch.full((bucket.world_size, 3), float(bucket.rank))
        if stages >= 2:
            self._sleep(bucket)
            gathered = yield AllGather(probe)
            assert gathered[:, 0, 0].tolist() == list(range(bucket.world_size))
        if stages >= 3:
            self._sleep(bucket)
            received = yield AllToAll(probe)
            assert received[:, 0].tolist() == list(range(bucket.world_size))
        if stages >= 4:
            total = yield AllReduce(probe)
            assert total[0, 0] == sum(range(bucket.world_size))
        self._sleep(bucket)
        mean = yield AllReduce(bucket.buffer * (1 / bucket.world_size))
        self._sleep(bucket)
        return Outcome(mean)

    def _sleep(self, bucket: Bucket) -> None:
        if self.longest_sleep:
            time.sleep(random.random() ** 4 * self.longest_sleep)


class _SyncStatistics(torch.autograd.Function):
    """All-reduces in forward and in backward, on the user's own group, as SyncBatchNorm does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(0)
        dist.all_reduce(mean)
        return x - mean / dist.get_world_size()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (gradient,) = gradients
        mean = gradient.mean(0)
        dist.all_reduce(mean)
        return gradient - mean / dist.get_world_size()


class SyncCenter(nn.Module):
    """torch's SyncBatchNorm refuses CPU tensors; this has its communication pattern."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _SyncStatistics.apply(x)  # type: ignore[no-untyped-call]
        return result


class LossOfMLP(nn.Module):
    """A model as `thinwire bench` wants it: from a batch to its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(width=128, layers=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (self.inner(x) - x.roll(1, 1)).square().mean()
        return loss


def broken_for_bench() -> tuple[nn.Module, Any]:
    """Builds, and then fails in its third batch on rank 1."""

    def fails(rank: int, step: int) -> torch.Tensor:
        if rank == 1 and step == 2:
            raise ValueError("the data of rank 1 ended")
        return batch(rank, step, width=128)

    return LossOfMLP(), fails
