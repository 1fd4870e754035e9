"""Averaged models without DDP: each rank trains a module of its own."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.harness import run_ranks
from tests.models import batch, equal, flat_parameters, mlp
from tests.ranks.averaging.test_averaging import STEPS, diloco, local_sgd, loss
from thinwire import DiLoCo, Exact, Int8, LocalSGD, OptionError


def job(rank: int, policy: Any, seed: int = 0, **options: Any) -> tuple[Any, Any, Any]:
    model = mlp(width=8, layers=3, seed=seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    return model, optimizer, thinwire.attach(model, policy, optimizer=optimizer, **options)


def train(rank: int, model: Any, optimizer: Any, steps: range = range(STEPS)) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        optimizer.step()


def finals(rank: int, world_size: int) -> list[torch.Tensor]:
    found = []
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("replicate",))
    for policy, replicas in ((LocalSGD(4), None), (DiLoCo(4, overlap=2, mixing=0.25), mesh["replicate"])):
        model, optimizer, wire = job(rank, policy, seed=rank, replicas=replicas)  # the first rank's is taken
        train(rank, model, optimizer)
        wire.finalize()
        found.append(flat_parameters(model))
        assert wire.step == STEPS
        assert wire.stats().bytes_sent > 0
        assert "given to attach" in wire.explain()
    return found


def test_models_are_what_a_plain_computation_gives() -> None:
    results = run_ranks(finals, 3)
    for index, expected in enumerate((local_sgd(3, 4), diloco(3, 4, overlap=2, mixing=0.25))):
        for found in results:
            assert torch.equal(found[index], results[0][index])
        torch.testing.assert_close(results[0][index], expected, rtol=1e-5, atol=1e-6)


def micro_batches(rank: int, world_size: int) -> tuple[int, int]:
    """Every optimizer step is one training step, however many backward passes it has."""
    model, optimizer, wire = job(rank, LocalSGD(2))
    for step in range(4):
        optimizer.zero_grad()
        for micro in range(3):
            model(batch(rank, 3 * step + micro, width=8)).square().mean().backward()
        optimizer.step()
    stats = wire.stats()
    assert stats.steps == wire.step, "a step without gradients on the wire is a step"
    return wire.step, stats.exchanges - stats.steps


def test_micro_batches_need_no_context() -> None:
    for steps, exchanges in run_ranks(micro_batches, 2):
        assert (steps, exchanges) == (4, 2)


def resumed(rank: int, world_size: int, folder: Path) -> bool:
    policy = DiLoCo(3, program=Int8(), overlap=1)
    model, optimizer, wire = job(rank, policy)
    train(rank, model, optimizer, range(7))  # one exchange is in flight, and models differ
    thinwire.save_checkpoint(folder, model, optimizer, wire, step=7)
    train(rank, model, optimizer, range(7, 12))
    again, its_optimizer, its_wire = job(rank, policy, seed=5)
    saved = thinwire.load_checkpoint(folder, again, its_optimizer, its_wire)
    assert saved["step"] == its_wire.step == 7
    train(rank, again, its_optimizer, range(7, 12))
    assert torch.equal(flat_parameters(model), flat_parameters(again))
    return equal(wire.state_dict(), its_wire.state_dict())


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    assert run_ranks(resumed, 2, tmp_path / "checkpoint") == [True, True]


def refused(rank: int, world_size: int) -> list[str]:
    model = mlp(width=8, layers=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    errors: list[str] = []
    mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("replicate", "shard"))
    for program, options in (
        (LocalSGD(2, warmup_steps=3), {}),
        (LocalSGD(2, within=2), {}),
        (LocalSGD(2), {"replicas": mesh}),
        (LocalSGD(2), {"replicas": "all"}),
        (Exact(), {"replicas": dist.group.WORLD}),
    ):
        with pytest.raises(OptionError) as caught:
            thinwire.attach(model, program, optimizer=optimizer, **options)
        errors.append(str(caught.value))
    return errors


def test_what_a_module_alone_cannot_do_is_refused() -> None:
    for errors in run_ranks(refused, 2):
        assert [error.split("=")[0] for error in errors] == [
            "warmup_steps",
            "within",
            "replicas",
            "replicas",
            "replicas",
        ]
        assert "DistributedDataParallel" in errors[0]
        assert "mesh['replicate']" in errors[2]


def wrapped_later(rank: int, world_size: int) -> None:
    model, optimizer, wire = job(rank, DiLoCo(4))
    train(rank, model, optimizer, range(2))
    ddp = DDP(model)
    with torch.no_grad():
        ddp(batch(rank, 0, 8))
    with pytest.raises(thinwire.AttachError, match=r"inside DistributedDataParallel.* then call attach\(ddp"):
        ddp(batch(rank, 0, 8))
    del ddp
    train(rank, model, optimizer, range(2, 4))  # it still trains without DDP
    assert wire.step == 4

    model, optimizer, _ = job(rank, DiLoCo(4))
    with pytest.raises(thinwire.AttachError, match="inside DistributedDataParallel"):
        DDP(torch.nn.Sequential(model, torch.nn.Linear(8, 8)))(batch(rank, 0, 8))  # part of another model
    model, optimizer, _ = job(rank, DiLoCo(4))
    replicate(model)
    with pytest.raises(thinwire.AttachError, match="inside DistributedDataParallel"):
        model(batch(rank, 0, 8))

    model, optimizer, _ = job(rank, DiLoCo(4))
    alone = [dist.new_group([one]) for one in range(world_size)][rank]
    train(rank, DDP(model, process_group=alone), optimizer)  # each replica on ranks of its own


def test_a_replica_that_ddp_averages_in_every_step_raises() -> None:
    run_ranks(wrapped_later, 2)
