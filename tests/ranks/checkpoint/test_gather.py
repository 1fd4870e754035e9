"""One mapping of all ranks' state, as frameworks save it: by rank 0, and loaded by every rank."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.harness import run_ranks
from tests.models import batch, equal, flat_parameters, mlp

PROGRAMS = {
    "Int8": thinwire.Int8(),
    "DiLoCo": thinwire.DiLoCo(4, program=thinwire.Int4(), overlap=1),
    "LocalSGD": thinwire.LocalSGD(4),
    "ZeRO": thinwire.ZeRO(thinwire.Int8(), parameters=torch.bfloat16),
    "interleaved": thinwire.ZeRO(interleaved=True),
}


class Job:
    def __init__(self, program: Any, **options: Any) -> None:
        self.ddp = DDP(mlp(width=16, layers=3), bucket_cap_mb=0.001)
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=0.01)
        self.wire = thinwire.attach(self.ddp, program, optimizer=self.optimizer)
        self.gathered = thinwire.GatheredState(self.wire, **options)

    def train(self, rank: int, begin: int, end: int) -> torch.Tensor:
        for step in range(begin, end):
            self.optimizer.zero_grad()
            self.ddp(batch(rank, step, width=16)).square().mean().backward()
            self.optimizer.step()
        return flat_parameters(self.ddp.module)

    def save(self, rank: int, path: str) -> None:
        gathered = self.gathered.state_dict()
        if rank == 0:
            parts = {"model": self.ddp.module.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save(parts | {"thinwire": gathered}, path)
        torch.distributed.barrier()

    def load(self, path: str, *, gathered: bool = True) -> None:
        saved = torch.load(path)  # weights_only is its default
        self.ddp.module.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        if gathered:
            self.gathered.load_state_dict(saved["thinwire"])


def resumed(rank: int, world_size: int, path: str, program: Any) -> None:
    job = Job(program)
    job.train(rank, 0, 3)
    job.save(rank, path)
    expected, state = job.train(rank, 3, 6), job.wire.state_dict()
    again = Job(program)
    again.load(path)
    assert again.wire.step == 3
    assert torch.equal(again.train(rank, 3, 6), expected)
    assert equal(again.wire.state_dict(), state)
    assert equal(again.optimizer.state_dict(), job.optimizer.state_dict())


def grown(rank: int, world_size: int, path: str, program: Any) -> Any:
    job = Job(program)
    job.load(path)
    job.train(rank, 3, 6)
    job.wire.finalize()
    return job.wire.step, flat_parameters(job.ddp.module)


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_rank_0_saves_continues_every_rank_bit_by_bit_and_on_more_ranks(
    name: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "job.pt")
    run_ranks(resumed, 2, path, PROGRAMS[name])
    steps, models = zip(*run_ranks(grown, 3, path, PROGRAMS[name]), strict=True)
    assert steps == (6, 6, 6)
    assert all(torch.equal(model, models[0]) for model in models)


def shards_alone(rank: int, world_size: int, path: str) -> None:
    program = thinwire.ZeRO()
    job = Job(program)
    job.train(rank, 0, 3)
    job.save(rank, path)
    again = Job(program)
    again.load(path, gathered=False)
    with pytest.raises(thinwire.StateError, match=r"one rank's part under ZeRO|another rank's optimizer"):
        again.train(rank, 3, 4)


def test_a_shard_that_no_other_follows_is_an_error_at_the_step_on_every_rank(tmp_path: Path) -> None:
    run_ranks(shards_alone, 2, str(tmp_path / "job.pt"))


def mistaken(rank: int, world_size: int) -> None:
    job = Job(thinwire.Int8())
    job.train(rank, 0, 2)
    saved = job.gathered.state_dict()
    assert sorted(saved["wire"]) == (["rank 0 of 2", "rank 1 of 2"] if rank == 0 else ["rank 1 of 2"])
    again = Job(thinwire.Int8())
    for wrong, message in (
        (saved if rank == 1 else None, r"1 of 2 ranks: save the result of state_dict\(\) on rank 0|NoneType"),
        ({**saved, "format": 9}, "format 9 is not 1"),
        (job.wire.state_dict(), "without 'wire' is not a state of GatheredState"),
    ):
        with pytest.raises(thinwire.ThinwireError, match=message):
            again.gathered.load_state_dict(wrong)  # type: ignore[arg-type]
    assert again.wire.step == 0
    everywhere = thinwire.GatheredState(job.wire, everywhere=True).state_dict()
    again.gathered.load_state_dict(everywhere)
    assert again.wire.step == 2
    assert equal(again.wire.state_dict(), job.wire.state_dict())


def test_what_is_not_the_state_of_all_ranks_raises_on_all_and_changes_nothing() -> None:
    run_ranks(mistaken, 2)


def scaled(rank: int, world_size: int, path: str) -> float:
    """Each rank's GradScaler has a scale of its own."""
    job = Job(thinwire.LocalSGD(4))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (4 + rank))
    scaler.scale(torch.zeros(1))
    gathered = thinwire.GatheredState(job.wire, scaler=scaler)
    saved = gathered.state_dict()
    if rank == 0:
        torch.save(saved, path)
    torch.distributed.barrier()
    again = torch.amp.GradScaler("cpu")
    other = Job(thinwire.LocalSGD(4))
    thinwire.GatheredState(other.wire, scaler=again).load_state_dict(torch.load(path))
    return again.get_scale()


def test_further_objects_are_each_ranks_own(tmp_path: Path) -> None:
    assert run_ranks(scaled, 2, str(tmp_path / "job.pt")) == [16.0, 32.0]
