"""The same numbers as torch's PowerSGD, where torch's survives: one bucket, and no zero columns."""

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
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


SLOW = pytest.mark.slow


@pytest.mark.parametrize("approximation_rank", [2, pytest.param(1, marks=SLOW), pytest.param(4, marks=SLOW)])
def test_training_runs_are_equal(approximation_rank: int) -> None:
    first, second = run_ranks(both, 2, approximation_rank)
    for variant, (ours, theirs), (elsewhere, _) in zip(VARIANTS, first, second, strict=True):
        torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=1e-9, msg=f"{variant}: parameters differ")
        assert torch.equal(ours[0], elsewhere[0]), f"{variant}: ranks differ"
        assert ours[1] == theirs[1], f"{variant}: compression_stats"


def resumed(module: Any, rank: int, how: str, saved_by_0: bool) -> torch.Tensor:
    """Ten steps, and ten more: in a new DDP from a saved state, or on with the same one.

    With `saved_by_0` every rank goes on with rank 0's state: its residuals, where the DDP is the same. No
    biases: torch keeps residuals of what is not compressed too, and rank 0's do not cancel.
    """

    def start(state: Any, module_state: Any = None) -> tuple[DDP, Any, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(40, 40, bias=False) for _ in range(4))).double()
        model.load_state_dict(module_state or model.state_dict())
        ddp = DDP(model, bucket_cap_mb=ONE_BUCKET)
        ddp.register_comm_hook(state, module.powerSGD_hook)
        return ddp, state, torch.optim.SGD(ddp.parameters(), lr=0.05)

    ddp, state, optimizer = start(module.PowerSGDState(None, start_powerSGD_iter=2))
    for step in range(20):
        if step == 10 and how == "in a new DDP":
            file = io.BytesIO()
            torch.save(state, file)
            files = [file.getvalue()] * 2
            dist.all_gather_object(files, files[0])
            loaded = torch.load(io.BytesIO(files[0 if saved_by_0 else rank]), weights_only=False)
            ddp, state, optimizer = start(loaded, copy.deepcopy(ddp.module.state_dict()))
        elif step == 10 and saved_by_0:
            for residual in state.error_dict.values():
                dist.broadcast(residual, 0)
        optimizer.zero_grad()
        (ddp(batch(rank, step, width=40).double()) - 1).square().mean().backward()
        optimizer.step()
    return flat_parameters(ddp.module)


def resumed_by_both(rank: int, world_size: int) -> list[tuple[torch.Tensor, ...]]:
    return [
        (
            resumed(torch_powersgd, rank, "in the same DDP", saved_by_0),
            resumed(our_powersgd, rank, "in a new DDP", saved_by_0),
            resumed(torch_powersgd, rank, "in a new DDP", saved_by_0),
        )
        for saved_by_0 in (False, True)
    ]


def test_a_resumed_run_is_what_torchs_would_be_in_the_same_ddp() -> None:
    """Torch's own resumed run is not: a new DDP's first buckets put its errors and Q on other parameters."""
    for own_state, state_of_0 in run_ranks(resumed_by_both, 2):
        for right, ours, torchs in (own_state, state_of_0):
            torch.testing.assert_close(ours, right, rtol=0, atol=1e-9)
            assert (torchs - right).abs().max() > 1e-4
        assert (own_state[0] - state_of_0[0]).abs().max() > 1e-4, "rank 0's residuals are not the others'"
