"""Large buckets, exchanged in slices of the size that a program prefers."""

import copy
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.harness import run_ranks
from tests.models import batch, flat_gradients, flat_parameters, mlp, own
from thinwire.kernels.library import switched_off


@dataclass(frozen=True, repr=False)
class Fine(thinwire.TwoShot):
    """TwoShot in slices of about one layer of the tests' model."""

    preferred_bytes = 2400


INT8 = thinwire.ErrorFeedback(Fine(thinwire.Quantize(block=64)))
WHOLE = thinwire.ErrorFeedback(thinwire.TwoShot(thinwire.Quantize(block=64)))


class Job:
    """A model that trains with one large bucket, or several."""

    def __init__(self, program: Any, bucket_cap_mb: float = 25, model: nn.Module | None = None) -> None:
        self.ddp = DDP(model or mlp(), bucket_cap_mb=bucket_cap_mb)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1, momentum=0.9)
        self.wire = thinwire.attach(self.ddp, program)

    def train(self, rank: int, begin: int, end: int) -> None:
        for step in range(begin, end):
            self.optimizer.zero_grad()
            self.ddp(batch(rank, step)).square().mean().backward()
            self.optimizer.step()


def sliced(rank: int, world_size: int) -> torch.Tensor:
    job, whole, exact = Job(INT8), Job(WHOLE), Job(thinwire.Exact())
    for one in (job, whole, exact):
        one.train(rank, 0, 5)
    last, before = job.wire.stats().last, whole.wire.stats().last
    assert last is not None
    assert before is not None
    assert len(before.ops) == 2
    assert len(last.ops) == 2 * 6, "a slice for each layer"
    assert last.bytes_sent <= 1.2 * before.bytes_sent, "an odd number of blocks in every slice"
    found = flat_parameters(job.ddp.module)
    torch.testing.assert_close(found, flat_parameters(exact.ddp.module), rtol=0.02, atol=0.002)
    return found


@pytest.mark.parametrize("world_size", [2, 3])  # one rank exchanges nothing
def test_a_bucket_is_exchanged_in_slices(world_size: int) -> None:
    ranks = run_ranks(sliced, world_size)
    assert all(torch.equal(found, ranks[0]) for found in ranks)


def resumed(rank: int, world_size: int) -> None:
    """A run that is resumed, with buckets of another size too, is the run that never stopped."""
    job = Job(INT8)
    job.train(rank, 0, 4)
    model = copy.deepcopy(job.ddp.module.state_dict())
    optimizer, wire = copy.deepcopy(job.optimizer.state_dict()), job.wire.state_dict()
    assert len(own(wire)["buckets"]) == 1, "slices are no part of the state: they follow from the buckets"
    job.train(rank, 4, 8)
    for cap in (25, 0.003):
        again = Job(INT8, bucket_cap_mb=cap)
        again.ddp.module.load_state_dict(model)
        again.optimizer.load_state_dict(copy.deepcopy(optimizer))
        again.wire.load_state_dict(copy.deepcopy(wire))
        again.train(rank, 4, 8)
        assert torch.equal(flat_parameters(again.ddp.module), flat_parameters(job.ddp.module)), cap


def test_a_sliced_run_resumes_bit_by_bit() -> None:
    run_ranks(resumed, 2)


def overflowing(rank: int, world_size: int) -> None:
    """An infinite gradient in one layer rolls all slices back."""
    job = Job(INT8)
    job.train(rank, 0, 2)
    before = own(job.wire.state_dict())["memory"]
    handle = None
    if rank == 1:
        last: Any = job.ddp.module[10]
        handle = last.weight.register_hook(lambda gradient: gradient * math.inf)
    job.optimizer.zero_grad()
    job.ddp(batch(rank, 2)).square().mean().backward()
    assert not flat_gradients(job.ddp.module).isfinite().any()
    after = own(job.wire.state_dict())["memory"]
    assert all(torch.equal(before[name]["residual"], after[name]["residual"]) for name in before)
    if handle is not None:
        handle.remove()
    job.train(rank, 3, 5)
    assert flat_gradients(job.ddp.module).isfinite().all()


def test_an_overflow_in_one_slice_is_one_of_the_step() -> None:
    run_ranks(overflowing, 2)


class Convolved(nn.Module):
    """Parameters in channels_last between contiguous ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(24, 48), nn.Linear(48, 24)
        self.conv = nn.Conv2d(3, 3, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.conv(self.first(x).view(-1, 3, 4, 4)).flatten(1))
        return found


def laid_out(rank: int, world_size: int) -> None:
    job, exact = Job(INT8, model=Convolved()), Job(thinwire.Exact(), model=Convolved())
    for one in (job, exact):
        one.train(rank, 0, 4)
    torch.testing.assert_close(
        flat_parameters(job.ddp.module), flat_parameters(exact.ddp.module), rtol=0.05, atol=0.005
    )
    assert own(job.wire.state_dict())["memory"]["conv.weight"]["residual"].is_contiguous()


def test_slices_with_parameters_in_other_layouts() -> None:
    run_ranks(laid_out, 2)


def on_unlike_hosts(rank: int, world_size: int) -> torch.Tensor:
    """Ranks with and without native code."""
    job = Job(thinwire.Int4())
    if rank == 1:
        with switched_off():
            job.train(rank, 0, 5)
    else:
        job.train(rank, 0, 5)
    return flat_parameters(job.ddp.module)


def test_ranks_with_and_without_native_code_train_together() -> None:
    ranks = run_ranks(on_unlike_hosts, 3)
    assert all(torch.equal(found, ranks[0]) for found in ranks)
