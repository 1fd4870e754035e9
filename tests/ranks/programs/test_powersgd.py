"""PowerSGD on real ranks: many buckets, resume, overflow, and torch's names."""

import logging
import pickle
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.harness import run_ranks
from tests.models import batch, flat_gradients, flat_parameters, mlp, own
from thinwire.ddp_comm_hooks import DDPCommHookType, register_ddp_comm_hook
from thinwire.ddp_comm_hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook, powerSGD_hook

MANY = 0.004  # MB: every layer of 32 x 32 has a bucket of its own
WIDTH = 32


def step_of(ddp: DDP, rank: int, step: int) -> None:
    ddp.zero_grad()
    (ddp(batch(rank, step, WIDTH)) - 1).square().mean().backward()


def late(gradient: torch.Tensor) -> None:
    if random.random() < 0.05:
        time.sleep(random.random() * 0.003)


def trained(rank: int, world_size: int, steps: int) -> tuple[torch.Tensor, int, list[Any]]:
    random.seed(rank)
    model = mlp(width=WIDTH, layers=24)
    for parameter in model.parameters():
        parameter.register_hook(late)
    ddp = DDP(model, bucket_cap_mb=MANY)
    wire = thinwire.attach(ddp, thinwire.PowerSGD(rank=2, factor_dtype="bf16", warmup=0), check_every=50)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-3)
    for step in range(steps):
        step_of(ddp, rank, step)
        optimizer.step()
    last = wire.stats().last
    assert last is not None
    return (
        flat_parameters(model),
        len({op.bucket for op in last.ops}),
        [r.order for r in wire.stats().records],
    )


@pytest.mark.parametrize(
    ("world_size", "steps"),
    [pytest.param(2, 60, marks=pytest.mark.slow), (3, 20), pytest.param(4, 30, marks=pytest.mark.slow)],
)
def test_many_buckets_and_random_delays_leave_ranks_equal_to_the_bit(world_size: int, steps: int) -> None:
    results = run_ranks(trained, world_size, steps)
    parameters, buckets, orders = results[0]
    assert buckets >= 20
    for own_parameters, _, own_orders in results[1:]:
        assert torch.equal(own_parameters, parameters)
        assert own_orders == orders


def one_or_many(rank: int, world_size: int) -> list[torch.Tensor]:
    """The same training with one bucket and with many."""
    results = []
    for bucket_mb in (100.0, MANY):
        ddp = DDP(mlp(width=WIDTH, layers=8).double(), bucket_cap_mb=bucket_mb)
        thinwire.attach(ddp, thinwire.PowerSGD(rank=2, warmup=0))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(30):
            ddp.zero_grad()
            ddp(batch(rank, step, WIDTH).double()).square().mean().backward()
            optimizer.step()
        results.append(flat_parameters(ddp.module))
    return results


def test_many_buckets_train_as_one_does() -> None:
    for one, many in run_ranks(one_or_many, 2):
        torch.testing.assert_close(many, one, rtol=0, atol=1e-9)


def resumed(rank: int, world_size: int, folder: str) -> bool:
    """Six steps at once, or three, a checkpoint, other buckets, and three more."""

    def start(bucket_mb: float) -> tuple[DDP, thinwire.Wire, torch.optim.Optimizer]:
        ddp = DDP(mlp(width=WIDTH), bucket_cap_mb=bucket_mb)
        wire = thinwire.attach(ddp, thinwire.PowerSGD(rank=2, warmup=0))
        return ddp, wire, torch.optim.SGD(ddp.parameters(), lr=0.1)

    whole, _, optimizer = start(MANY)
    for step in range(6):
        step_of(whole, rank, step)
        optimizer.step()

    first, wire, optimizer = start(MANY)
    for step in range(3):
        step_of(first, rank, step)
        optimizer.step()
    path = Path(folder) / f"{rank}.pt"
    torch.save({"model": first.module.state_dict(), "wire": wire.state_dict()}, path)

    second, wire, optimizer = start(100.0)
    state = torch.load(path, weights_only=True)
    second.module.load_state_dict(state["model"])
    wire.load_state_dict(state["wire"])
    for step in range(3, 6):
        step_of(second, rank, step)
        optimizer.step()
    return torch.equal(flat_parameters(second.module), flat_parameters(whole.module))


def test_a_resumed_run_is_the_run_that_never_stopped(tmp_path: Path) -> None:
    assert all(run_ranks(resumed, 2, str(tmp_path)))


def overflowing(rank: int, world_size: int) -> tuple[bool, bool]:
    ddp = DDP(mlp(width=WIDTH), bucket_cap_mb=MANY)
    wire = thinwire.attach(ddp, thinwire.PowerSGD(rank=2, warmup=0))
    for step in range(3):
        step_of(ddp, rank, step)
    ddp.zero_grad()
    loss = ddp(batch(rank, 3, WIDTH)).square().mean()
    (loss * (float("inf") if rank == 1 else 1)).backward()
    bad = not flat_gradients(ddp.module).isfinite().any()
    step_of(ddp, rank, 4)
    finite = flat_gradients(ddp.module).isfinite().all()
    memory = own(wire.state_dict())["memory"]
    return bad, bool(finite and all(t.isfinite().all() for slots in memory.values() for t in slots.values()))


def test_one_inf_is_seen_by_all_and_gone_in_the_next_step() -> None:
    assert run_ranks(overflowing, 2) == [(True, True)] * 2


def hooked(
    rank: int, world_size: int, batched: bool
) -> tuple[torch.Tensor, tuple[float, int, int], list[str]]:
    """Torch's names, many buckets, from step 0, with a scalar and a parameter whose gradient is zero."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger = logging.getLogger("thinwire.ddp_comm_hooks.powerSGD_hook")
    logger.addHandler(Keep())
    logger.setLevel(logging.INFO)
    model = mlp(width=WIDTH, layers=12)
    model.scale, model.idle = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(WIDTH, WIDTH))
    ddp = DDP(model, bucket_cap_mb=MANY)
    state = PowerSGDState(None, 1, start_powerSGD_iter=0, compression_stats_logging_frequency=5)
    ddp.register_comm_hook(state, batched_powerSGD_hook if batched else powerSGD_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(12):
        ddp.zero_grad()
        loss = (ddp(batch(rank, step, WIDTH)) * model.scale - 1).square().mean() + 0 * model.idle.sum()
        loss.backward()
        optimizer.step()
    assert state.iter == 12
    saved = pickle.dumps(state)
    assert lines[-1] == "NOTE: Process group is not serializable and excluded from a saved state."
    again = pickle.loads(saved)
    assert lines[-1].startswith("NOTE: Process group will be set to a default group (i.e. the world size).")
    assert again.process_group is dist.group.WORLD
    assert again.iter == 12
    assert torch.equal(again.error_dict["0.weight"], state.error_dict["0.weight"])
    assert again.rng.randint(1000) == state.rng.randint(1000)
    return flat_parameters(model), state.compression_stats(), lines


@pytest.mark.parametrize("batched", [False, True])
def test_torchs_names_run_where_torch_cannot(batched: bool) -> None:
    results = run_ranks(hooked, 3, batched)
    parameters, (rate, before, after), lines = results[0]
    assert parameters.isfinite().all()
    assert all(torch.equal(own, parameters) for own, _, _ in results)
    assert rate == before / after > 1
    assert before == 12 * len(parameters)
    assert any("matrix_approximation_rank" in line for line in lines)
    assert sum(line.startswith("Compression stats: iter ") for line in lines) == 3
    assert sum("Process group" in line for line in lines) == 2


def registered(rank: int, world_size: int) -> list[str]:
    names = []
    for kind in DDPCommHookType:
        if "POWER" in kind.name:
            ddp = DDP(mlp(width=WIDTH), bucket_cap_mb=MANY)
            register_ddp_comm_hook(kind, ddp, None)
            step_of(ddp, rank, 0)
            plain = DDP(mlp(width=WIDTH), bucket_cap_mb=MANY)
            step_of(plain, rank, 0)
            assert torch.equal(flat_gradients(ddp.module), flat_gradients(plain.module)), (
                "exact before the start"
            )
            names.append(kind.name)
    return names


def test_every_powersgd_member_of_the_enum_registers() -> None:
    expected = ["POWER_SGD", "POWER_SGD_RANK2", "BATCHED_POWER_SGD", "BATCHED_POWER_SGD_RANK2"]
    assert run_ranks(registered, 2) == [expected] * 2


def test_bad_options_are_errors() -> None:
    with pytest.raises(ValueError, match="start_powerSGD_iter=-1 must not be negative"):
        PowerSGDState(None, start_powerSGD_iter=-1)
    with pytest.raises(ValueError, match="rank=0 must be at least 1"):
        PowerSGDState(None, matrix_approximation_rank=0)
