"""The same numbers as torch's PowerSGD, where torch's survives: one bucket, and no zero columns."""

from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.harness import run_ranks
from tests.models import batch, flat_parameters, mlp
from thinwire.ddp_comm_hooks import powerSGD_hook as our_powersgd

STEPS = 36
ONE_BUCKET = 100.0


VARIANTS: list[dict[str, Any]] = [
    {},
    {"use_error_feedback": False},
    {"warm_start": False},
    {"use_error_feedback": False, "warm_start": False},
    {"batch_tensors_with_same_shape": True},
    {"warm_start": False, "random_seed": 7, "batch_tensors_with_same_shape": True},
    {"orthogonalization_epsilon": 1e-12, "min_compression_rate": 1},
]


def trained(module: Any, rank: int, **options: Any) -> tuple[torch.Tensor, tuple[float, int, int]]:
    """In double precision, so that equal means equal and not just as chaotic."""
    ddp = DDP(mlp(width=40, layers=4).double(), bucket_cap_mb=ONE_BUCKET)
    state = module.PowerSGDState(None, start_powerSGD_iter=2, **options)
    ddp.register_comm_hook(state, module.powerSGD_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        (ddp(batch(rank, step, width=40).double()) - 1).square().mean().backward()
        optimizer.step()
    return flat_parameters(ddp.module), state.compression_stats()


def both(rank: int, world_size: int, approximation_rank: int) -> list[tuple[Any, Any]]:
    options = [{"matrix_approximation_rank": approximation_rank, **variant} for variant in VARIANTS]
    return [(trained(our_powersgd, rank, **own), trained(torch_powersgd, rank, **own)) for own in options]


@pytest.mark.parametrize("approximation_rank", [1, 2, 4])
def test_training_runs_are_equal(approximation_rank: int) -> None:
    first, second = run_ranks(both, 2, approximation_rank)
    for variant, (ours, theirs), (elsewhere, _) in zip(VARIANTS, first, second, strict=True):
        torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=1e-9, msg=f"{variant}: parameters differ")
        assert torch.equal(ours[0], elsewhere[0]), f"{variant}: ranks differ"
        assert ours[1] == theirs[1], f"{variant}: compression_stats"
