"""Thinwire's process groups: other users of torch.distributed, and forked processes, do not notice them."""

import gc
import os
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.harness import run_ranks
from tests.models import batch, flat_gradients, mlp


def in_a_cycle(rank: int, program: thinwire.Program) -> None:
    """Train a model, and drop it so that only the garbage collector finds it."""
    ddp = DDP(mlp(), bucket_cap_mb=0.002)
    thinwire.attach(ddp, program)
    ddp(batch(rank, 0)).square().mean().backward()
    ddp.module.itself = [ddp]


def exit_code_of(child: int, seconds: float) -> int | None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return None


def forked(rank: int, world_size: int) -> int | None:
    """A DataLoader's worker, say, collects the dropped model; then the process itself does."""
    gc.collect()
    gc.disable()
    in_a_cycle(rank, thinwire.BF16())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn about forks beside threads
        child = os.fork()
    if child == 0:
        gc.collect()
        os._exit(0)
    code = exit_code_of(child, 120)
    gc.enable()
    gc.collect()
    ddp = DDP(mlp(), bucket_cap_mb=0.002)
    thinwire.attach(ddp, thinwire.Exact())
    ddp(batch(rank, 1)).square().mean().backward()
    return code


def test_a_forked_process_that_collects_a_model_leaves_its_groups_alone() -> None:
    assert run_ranks(forked, 2) == [0, 0]


def other_groups(rank: int, world_size: int) -> torch.Tensor:
    """Ranks collect a model at different times; meanwhile the user makes a group of some ranks."""
    ddp = DDP(mlp(), bucket_cap_mb=0.002)
    thinwire.attach(ddp, thinwire.Exact())
    if rank == 0:
        del ddp
        gc.collect()
    group = dist.new_group([0, 1], use_local_synchronization=True)
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    assert len(dist.distributed_c10d._world.pg_config_info) == 2  # which torch.profiler writes down
    return total


def test_a_users_group_of_some_ranks_meets_although_models_end_at_different_times() -> None:
    assert run_ranks(other_groups, 2) == [torch.full((1,), 2.0)] * 2


class Unregistered(dist.ProcessGroup):
    """As torchft's, which torch.distributed does not know."""


def unknown_group(rank: int, world_size: int) -> None:
    ddp = DDP(mlp())
    before = ddp.process_group
    ddp.process_group = Unregistered(rank, world_size)  # type: ignore[call-arg]
    for program in (thinwire.Exact(), "no program"):
        with pytest.raises(thinwire.AttachError, match=r"not one of torch\.distributed's own"):
            thinwire.attach(ddp, program)  # type: ignore[arg-type]
    ddp.process_group = before
    thinwire.attach(ddp, thinwire.Exact())
    ddp(batch(rank, 0)).square().mean().backward()
    assert flat_gradients(ddp.module).isfinite().all()


def test_a_process_group_that_torch_does_not_know_is_refused() -> None:
    run_ranks(unknown_group, 2)
