"""The same numbers as torch's own hooks, over whole training runs, where torch's are right."""

from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks as torch_debugging
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_default
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.harness import run_ranks
from tests.models import batch, flat_parameters, mlp
from thinwire.ddp_comm_hooks import debugging_hooks, default_hooks

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
