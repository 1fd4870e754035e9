"""`torch.distributed.checkpoint` stores and brings back what each rank has of its own, bit by bit."""

import io
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.harness import quiet, run_ranks
from tests.models import batch, equal, flat_parameters, mlp, own
from thinwire import DiLoCo, Int4, Int8, PerRank, ZeRO, merge_optimizer_states, read_states
from thinwire.checkpoint.trees import copied
from thinwire.engine.comm.process_group import torch_version

ZERO = ZeRO(Int8(), parameters=torch.bfloat16)
PROGRAMS = {"int8": Int8(), "diloco": DiLoCo(4, program=Int4(), fragments=2, overlap=1), "zero": ZERO}


class Job:
    """A model, AdamW and a wire, and the names under which they are saved."""

    def __init__(self, program: Any) -> None:
        self.ddp = DDP(mlp(width=16, layers=3), bucket_cap_mb=0.001)
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=0.01)
        given = self.optimizer if isinstance(program, DiLoCo | ZeRO) else None
        self.wire = thinwire.attach(self.ddp, program, optimizer=given)
        self.parts = {
            "model": self.ddp.module,
            "optimizer": PerRank(self.optimizer, merge=merge_optimizer_states),
            "wire": self.wire,
        }

    def train(self, rank: int, begin: int, end: int) -> None:
        for step in range(begin, end):
            self.optimizer.zero_grad()
            self.ddp(batch(rank, step, width=16)).square().mean().backward()
            self.optimizer.step()

    def everything(self) -> Any:
        return [copied(part.state_dict()) for part in self.parts.values()]


def saved_and_loaded(rank: int, world_size: int, folder: str, name: str) -> None:
    job = Job(PROGRAMS[name])
    job.train(rank, 0, 6)
    with quiet():
        dcp.save(job.parts, checkpoint_id=f"{folder}/at-once")
        expected = job.everything()
        later = dcp.async_save(job.parts, checkpoint_id=f"{folder}/meanwhile")
        assert isinstance(later, Future)
        if torch_version() < (2, 9):
            later.result()  # torch 2.6 writes a CPU model's own tensors, without a copy
        job.train(rank, 6, 9)  # must not find its way into what is being saved
        later.result()
    final = flat_parameters(job.ddp.module)
    for kind in ("at-once", "meanwhile"):
        again = Job(PROGRAMS[name])
        with quiet():
            dcp.load(again.parts, checkpoint_id=f"{folder}/{kind}")
        assert equal(again.everything(), expected), kind
        again.train(rank, 6, 9)
        assert torch.equal(flat_parameters(again.ddp.module), final), kind


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_rank_gets_its_own_back_whether_saved_at_once_or_meanwhile(tmp_path: Path, name: str) -> None:
    assert run_ranks(saved_and_loaded, 2, str(tmp_path), name) == [None, None]


def loaded_in_inference_mode(rank: int, world_size: int) -> None:
    for name, program in PROGRAMS.items():
        job = Job(program)
        job.train(rank, 0, 6)
        file = io.BytesIO()
        torch.save([part.state_dict() for part in job.parts.values()], file)
        job.train(rank, 6, 12)
        again = Job(program)
        file.seek(0)
        model, optimizer, wire = torch.load(file)
        again.parts["model"].load_state_dict(model)
        again.parts["optimizer"].load_state_dict(optimizer)
        with torch.inference_mode():
            again.wire.load_state_dict(copied(wire))  # tensors of inference, too
        again.train(rank, 6, 12)
        assert torch.equal(flat_parameters(again.ddp.module), flat_parameters(job.ddp.module)), name


def test_a_wire_loaded_in_inference_mode_trains_on() -> None:
    assert run_ranks(loaded_in_inference_mode, 2) == [None, None]


def save(rank: int, world_size: int, folder: str, name: str) -> tuple[Any, Any]:
    job = Job(PROGRAMS[name])
    job.train(rank, 0, 6)
    with quiet():
        dcp.save(job.parts, checkpoint_id=folder)
    return copied(job.optimizer.state_dict()), job.wire.state_dict()


def load(rank: int, world_size: int, folder: str, name: str) -> tuple[Any, Any, torch.Tensor]:
    job = Job(PROGRAMS[name])
    model = {"model": job.ddp.module}
    with quiet():
        dcp.load(model, checkpoint_id=folder)
    for part in ("optimizer", "wire"):
        job.parts[part].load_state_dict(read_states(folder, part))
    optimizer, state = copied(job.optimizer.state_dict()), job.wire.state_dict()
    job.train(rank, 6, 8)
    job.wire.finalize()
    return optimizer, state, flat_parameters(job.ddp.module)


@pytest.mark.parametrize("name", PROGRAMS)
def test_another_number_of_ranks_reads_the_states_of_all(tmp_path: Path, name: str) -> None:
    """Residuals become their mean, so the sum that is owed is kept; optimizer state moves to new owners."""
    saved = run_ranks(save, 3, str(tmp_path), name)
    loaded = run_ranks(load, 2, str(tmp_path), name)
    key = "models: residual" if name == "diloco" else "residual"
    for optimizer, state, parameters in loaded:
        assert torch.equal(parameters, loaded[0][2]), "ranks differ"
        assert set(optimizer["state"]) == set(range(6))
        for name_, slots in own(state)["memory"].items():
            owed = sum(own(one)["memory"][name_][key] for _, one in saved) / 3
            assert owed.abs().max() > 0
            torch.testing.assert_close(slots[key], owed)
    for number in range(6):
        holders = [one["state"][number] for one, _ in saved if number in one["state"]]
        assert equal(loaded[0][0]["state"][number], holders[-1])
        assert len(holders) == (1 if name == "zero" else 3)


def refusals(rank: int, world_size: int, folder: str) -> None:
    job = Job(Int8())
    job.train(rank, 0, 1)
    with quiet():
        dcp.save({"wire": job.wire, "model": job.ddp.module.state_dict()}, checkpoint_id=f"{folder}/here")
    with pytest.raises(thinwire.StateError, match=r"nowhere' is missing or incomplete \(FileNotFound"):
        read_states(f"{folder}/nowhere")
    with pytest.raises(thinwire.StateError, match=r"no states by rank under 'wires', it has model, wire:"):
        read_states(f"{folder}/here", "wires")
    alone = [dist.new_group([each]) for each in range(world_size)][rank]
    assert list(PerRank(Counter(), group=alone).state_dict()) == ["rank 0 of 1"]
    dist.barrier()
    if rank == 0:
        for file in Path(folder, "here").glob("*.distcp"):
            file.write_bytes(file.read_bytes()[:100])
    dist.barrier()
    with pytest.raises(
        thinwire.StateError, match=r"'wire' of the checkpoint at .* cannot be read: it is dam"
    ):
        read_states(f"{folder}/here")


def test_what_is_not_there_or_damaged_is_named(tmp_path: Path) -> None:
    assert run_ranks(refusals, 2, str(tmp_path)) == [None, None]


def test_states_are_read_without_a_process_group(tmp_path: Path) -> None:
    saved = run_ranks(save, 2, str(tmp_path), "int8")
    states = read_states(tmp_path)
    assert sorted(states) == ["rank 0 of 2", "rank 1 of 2"]
    assert all(equal({key: states[key]}, one) for key, (_, one) in zip(sorted(states), saved, strict=True))


class Counter:
    """What each rank has of its own, that is no optimizer."""

    value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def test_per_rank_refuses_what_it_cannot_merge() -> None:
    counter = Counter()
    states = {f"rank {rank} of 2": ({"value": 3 + rank},) for rank in range(2)}
    with pytest.raises(thinwire.StateError, match="2 ranks saved and 1 load, and merge=None cannot merge"):
        PerRank(counter).load_state_dict(states)
    with pytest.raises(thinwire.StateError, match="that of rank 1 of 2, and this is rank 0 of 1"):
        PerRank(counter).load_state_dict({"rank 1 of 2": ({"value": 9},)})
    assert counter.value == 0
    PerRank(counter, merge=max_value).load_state_dict(states)
    assert counter.value == 4
    PerRank(counter).load_state_dict({"rank 0 of 1": ({"value": 7},)})
    assert counter.value == 7


def max_value(states: list[Any]) -> Any:
    return max(states, key=lambda state: int(state["value"]))
