"""The same numbers as torch's own hooks, over whole training runs, where torch's are right."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks as torch_debugging
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_default
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as torch_local
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.harness import run_ranks
from tests.models import batch, flat_parameters, mlp
from thinwire.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)

STEPS = 40


def trained(hook: Any, rank: int) -> torch.Tensor:
    ddp = DDP(mlp(), bucket_cap_mb=0.004)
    ddp.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        ddp(batch(rank, step)).square().mean().backward()
        optimizer.step()
    return flat_parameters(ddp.module)


def both(rank: int, world_size: int) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    pairs = {
        "allreduce_hook": (default_hooks.allreduce_hook, torch_default.allreduce_hook),
        "fp16_compress_hook": (default_hooks.fp16_compress_hook, torch_default.fp16_compress_hook),
        "fp16_compress_wrapper(allreduce_hook)": (
            default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
            torch_default.fp16_compress_wrapper(torch_default.allreduce_hook),
        ),
        "fp16_compress_wrapper(noop_hook)": (
            default_hooks.fp16_compress_wrapper(debugging_hooks.noop_hook),
            torch_default.fp16_compress_wrapper(torch_debugging.noop_hook),
        ),
        "noop_hook": (debugging_hooks.noop_hook, torch_debugging.noop_hook),
    }
    return [(name, trained(ours, rank), trained(theirs, rank)) for name, (ours, theirs) in pairs.items()]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_training_runs_are_equal(world_size: int) -> None:
    for results in zip(*run_ranks(both, world_size), strict=True):
        for name, ours, theirs in results:
            exact = "fp16" not in name or "noop" in name
            tolerance = 1e-6 if exact else 1e-4
            worst = (ours - theirs).abs().max()
            assert worst <= tolerance, f"{name}: parameters differ by {worst}"
            if world_size == 1 or (exact and world_size == 2):  # powers of two divide without rounding
                assert torch.equal(ours, theirs), name
            if "noop" not in name:
                assert torch.equal(ours, results[0][1]), f"{name}: ranks differ"


def with_embedding() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Linear(4, 4), nn.Linear(4, 3))


def rows(rank: int, step: int) -> torch.Tensor:
    """Different rows, some of them twice, and another number of them on every rank."""
    return torch.randint(0, 20, (3 + 2 * rank,), generator=torch.Generator().manual_seed(10 * step + rank))


def trained_on_rows(ddp: DDP, rank: int, steps: int) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        ddp(rows(rank, step)).square().sum().backward()
        embedding: Any = ddp.module[0]
        assert embedding.weight.grad.is_sparse
        optimizer.step()
    return [one.detach().clone() for one in ddp.parameters()]


def sparse_runs(rank: int, world_size: int) -> list[tuple[str, list[torch.Tensor], list[torch.Tensor]]]:
    """Each hook with which torch's DDP trains on sparse gradients."""
    warm = {"start_powerSGD_iter": 10, "matrix_approximation_rank": 1}
    pairs: dict[str, list[tuple[Any, Any]]] = {
        "allreduce_hook": [(None, one.allreduce_hook) for one in (default_hooks, torch_default)],
        "noop_hook": [(None, one.noop_hook) for one in (debugging_hooks, torch_debugging)],
        "fp16_compress_wrapper(noop_hook)": [
            (None, default_hooks.fp16_compress_wrapper(debugging_hooks.noop_hook)),
            (None, torch_default.fp16_compress_wrapper(torch_debugging.noop_hook)),
        ],
        "post_localSGD_hook": [
            (one.PostLocalSGDState(None, None, 10), one.post_localSGD_hook)
            for one in (post_localSGD_hook, torch_local)
        ],
        "powerSGD_hook before it starts": [
            (one.PowerSGDState(None, **warm), one.powerSGD_hook) for one in (powerSGD_hook, torch_powersgd)
        ],
    }
    found = []
    for name, registered in pairs.items():
        models = [DDP(with_embedding(), bucket_cap_mb=0.0001) for _ in registered]
        for ddp, (state, hook) in zip(models, registered, strict=True):
            ddp.register_comm_hook(state, hook)
        ours, theirs = (trained_on_rows(ddp, rank, 5) for ddp in models)
        found.append((name, ours, theirs))
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sparse_gradients_train_as_with_torch(world_size: int) -> None:
    for results in zip(*run_ranks(sparse_runs, world_size), strict=True):
        for name, ours, theirs in results:
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
            if world_size != 3:  # a power of two divides without rounding
                assert all(map(torch.equal, ours, theirs)), name
            if "noop_hook" not in name:
                assert all(map(torch.equal, ours, results[0][1])), f"{name}: ranks differ"


def sparse_overflow(rank: int, world_size: int) -> bool:
    ddp = DDP(with_embedding())
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    (ddp(rows(rank, 0)).square().sum() * (torch.inf if rank == 0 else 1.0)).backward()
    gradient: Any = ddp.module[0].weight.grad
    return bool(gradient.coalesce().values().isnan().all())


def test_an_overflow_spoils_sparse_gradients_too() -> None:
    assert run_ranks(sparse_overflow, 2) == [True, True]


def sparse_refused(rank: int, world_size: int) -> list[str]:
    said = []
    compressing = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=0)
    for state, hook in (
        (None, default_hooks.fp16_compress_hook),
        (None, default_hooks.bf16_compress_hook),
        (None, quantization_hooks.quantization_pertensor_hook),
        (compressing, powerSGD_hook.powerSGD_hook),
        (compressing, powerSGD_hook.batched_powerSGD_hook),
    ):
        ddp = DDP(with_embedding())
        ddp.register_comm_hook(state, hook)
        with pytest.raises(thinwire.UnavailableError) as caught:
            ddp(rows(rank, 0)).sum().backward()
        said.append(str(caught.value))
    return said


def test_hooks_that_cannot_average_sparse_gradients_say_so() -> None:
    for said in run_ranks(sparse_refused, 2):
        assert all("0.weight is sparse" in text and "allreduce_hook" in text for text in said)
