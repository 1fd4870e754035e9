"""Wires of FSDP2 models in checkpoints of torch.distributed.checkpoint."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh

import thinwire
from tests.harness import run_ranks
from tests.models import equal
from tests.ranks.fsdp.test_fsdp import loss, sharded, site_mesh, whole
from thinwire import DiLoCo, Int4, Int8, StateError


def job(mesh: DeviceMesh, program: Any) -> tuple[Any, Any, Any]:
    model = sharded(mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, thinwire.attach(model, program, replicas=mesh["replicate"], optimizer=optimizer)


def train(rank: int, model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        optimizer.step()


def save(folder: Path, model: Any, optimizer: Any, wire: Any) -> None:
    tensors, moments = get_state_dict(model, optimizer)
    dcp.save({"model": tensors, "optimizer": moments, "wire": wire}, checkpoint_id=folder)


def load(folder: Path, model: Any, optimizer: Any) -> None:
    tensors, moments = get_state_dict(model, optimizer)
    dcp.load({"model": tensors, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=tensors, optim_state_dict=moments)


def resumed(rank: int, world_size: int, folder: Path) -> list[bool]:
    mesh, found = site_mesh(), []
    for program in (Int4(), DiLoCo(3, program=Int8(), overlap=1)):
        model, optimizer, wire = job(mesh, program)
        again, its_optimizer, its_wire = job(mesh, program)
        train(rank, model, optimizer, range(4))
        if isinstance(program, DiLoCo):  # replicas differ: the wire's state has this rank's model
            its_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            its_wire.load_state_dict(wire.state_dict())
        else:
            save(folder, model, optimizer, wire)
            load(folder, again, its_optimizer)
            dcp.load({"wire": its_wire}, checkpoint_id=folder)
        assert its_wire.step == 4
        train(rank, model, optimizer, range(4, 8))
        train(rank, again, its_optimizer, range(4, 8))
        same = equal(its_wire.state_dict(), wire.state_dict())
        found.append(same and torch.equal(whole(again), whole(model)))
    return found


def fewer(rank: int, world_size: int, folder: Path) -> float:
    """One replica continues from the states of two: its residuals are their mean."""
    mesh = site_mesh(1, 2)
    model, optimizer, wire = job(mesh, Int4())
    load(folder, model, optimizer)
    key = f"wire.shard {rank} of 2"
    wire.load_state_dict(thinwire.read_states(folder, key))
    assert wire.step == 4
    (state,) = wire.state_dict()[f"shard {rank} of 2"].values()
    saved = [one[0]["memory"]["0.weight"]["residual"] for one in thinwire.read_states(folder, key).values()]
    assert len(saved) == 2
    train(rank, model, optimizer, range(4, 5))
    return float((state[0]["memory"]["0.weight"]["residual"] - sum(saved) / 2).abs().max())


def other_shards(rank: int, world_size: int, folder: Path) -> str:
    held = job(site_mesh(2, 1), Int4())  # a wire does not keep its model alive
    wire = held[2]
    state = {f"shard {one} of 2": thinwire.read_states(folder, f"wire.shard {one} of 2") for one in range(2)}
    with pytest.raises(StateError) as caught:
        wire.load_state_dict(state)
    return str(caught.value)


def test_checkpoints_of_shards(tmp_path: Path) -> None:
    """A resumed run is the uninterrupted one, bit by bit; another number of replicas loads it too."""
    folder = tmp_path / "checkpoint"
    assert run_ranks(resumed, 4, folder) == [[True, True]] * 4
    assert max(run_ranks(fewer, 2, folder)) < 1e-7
    assert all("as many shards as saved" in text for text in run_ranks(other_shards, 2, folder))
