"""`save_checkpoint` and `load_checkpoint`: one line for every strategy, safe against crashes."""

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.checkpoint.test_untrusted import Hostile, Own
from tests.harness import quiet, run_ranks
from tests.models import batch, flat_parameters, mlp
from thinwire import (
    DiLoCo,
    Exact,
    Int4,
    Int8,
    PerRank,
    Schedule,
    ZeRO,
    load_checkpoint,
    read_states,
    save_checkpoint,
)
from thinwire.checkpoint.save import _found, _prepare, _replace

DILOCO = DiLoCo(4, program=Int4(), fragments=2, overlap=1)
PROGRAMS: dict[str, Any] = {
    "int8": Int8(),
    "diloco": DILOCO,
    "zero": ZeRO(Int8(), parameters=torch.bfloat16),
    "schedule": Schedule({0: Exact(), 4: DILOCO}),
}


class Seed:
    """What each rank has of its own."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def largest(states: list[Any]) -> Any:
    return max(states, key=lambda state: int(state["value"]))


class Job:
    """All that a checkpoint holds, and how to train it."""

    def __init__(self, program: Any, seed: int, width: int = 8, broadcast: bool = True) -> None:
        layers = [*mlp(width=width, layers=2), nn.BatchNorm1d(width), *mlp(width=width, layers=1)]
        with quiet():  # the option has another name in later versions of torch
            self.ddp = DDP(nn.Sequential(*layers), bucket_cap_mb=0.001, broadcast_buffers=broadcast)
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 7], gamma=0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**seed, growth_interval=5)
        self.seed = Seed(seed)
        self.wire = thinwire.attach(self.ddp, program, optimizer=self.optimizer, scaler=self.scaler)
        self.held = (self.ddp, self.optimizer, self.wire)
        self.extra: dict[str, Any] = {
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "seed": PerRank(self.seed, merge=largest),
        }

    def train(self, rank: int, begin: int, end: int) -> torch.Tensor:
        for step in range(begin, end):
            self.optimizer.zero_grad()
            self.scaler.scale(self.ddp(batch(rank, step, width=8) + rank).square().mean()).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
        return torch.cat([one.flatten() for one in self.ddp.module.state_dict().values()])


def saved_and_loaded(rank: int, world_size: int, folder: str, broadcast: bool) -> dict[str, Any]:
    """Saves twice to one folder, the second time in place of the first."""
    scales = {}
    with quiet():
        for name, program in PROGRAMS.items():
            job = Job(program, seed=4 + rank * (name == "diloco"), broadcast=broadcast)
            job.train(rank, 0, 2)
            save_checkpoint(f"{folder}/{name}", *job.held, **job.extra, step=2)
            job.train(rank, 2, 6)
            path = save_checkpoint(f"{folder}/{name}", *job.held, **job.extra, step=6)
            assert path.samefile(f"{folder}/{name}")
            seed, scale, running = job.seed.value, job.scaler.get_scale(), _running(job)
            scales[name] = scale
            expected = job.train(rank, 6, 10)
            again = Job(program, seed=1, broadcast=broadcast)
            with torch.inference_mode():
                assert load_checkpoint(path, *again.held, **again.extra) == {"step": 6}
            assert (again.seed.value, again.scaler.get_scale()) == (seed, scale)
            assert again.scheduler.last_epoch == 6
            own = not broadcast or name in ("diloco", "schedule")
            assert torch.equal(_running(again), running if own else _of_rank_0(running)), name
            assert torch.equal(again.train(rank, 6, 10), expected), name
    return scales


def _running(job: Job) -> torch.Tensor:
    """BatchNorm's statistics, which differ between ranks after every forward."""
    mean = job.ddp.module[4].running_mean
    assert isinstance(mean, torch.Tensor)
    return mean.clone()


def _of_rank_0(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.clone()
    dist.broadcast(copy, 0)
    return copy


def loaded_elsewhere(rank: int, world_size: int, folder: str, scales: list[dict[str, Any]]) -> None:
    for name, program in PROGRAMS.items():
        job = Job(program, seed=1)
        rest = load_checkpoint(f"{folder}/{name}", *job.held, seed=job.extra["seed"], scaler=job.scaler)
        assert rest["step"] == 6
        assert rest["scheduler"]["last_epoch"] == 6, "what is not loaded is returned"
        assert job.seed.value == 4 + (name == "diloco")
        assert job.scaler.get_scale() == min(one[name] for one in scales)
        assert len(job.optimizer.state_dict()["state"]) == 8, "all moments are there"
        assert job.wire.step == 6
        assert torch.equal(_running(job), _of_rank_0(_running(job)))
        job.train(rank, 6, 8)
        job.wire.finalize()
        own = flat_parameters(job.ddp.module)
        every = [torch.zeros_like(own) for _ in range(world_size)]
        dist.all_gather(every, own)
        assert all(torch.equal(one, own) for one in every)


@pytest.mark.parametrize("broadcast", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_every_strategy_comes_back_in_one_line_on_any_number_of_ranks(
    tmp_path: Path, broadcast: bool
) -> None:
    scales = run_ranks(saved_and_loaded, 2, str(tmp_path), broadcast)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(PROGRAMS), "nothing else is left"
    assert run_ranks(loaded_elsewhere, 3, str(tmp_path), scales) == [None] * 3


class Broken(Seed):
    """An object whose state cannot be saved on rank 1."""

    def state_dict(self) -> dict[str, int]:
        if self.value == 1:
            raise ValueError("the loader has no position yet")
        return super().state_dict()


def one_rank_raises(rank: int, world_size: int, folder: str) -> None:
    job = Job(Int8(), seed=1)
    began = time.monotonic()
    kind = ValueError if rank == 1 else thinwire.MismatchError
    with pytest.raises(kind, match="the loader has no position yet"):
        save_checkpoint(f"{folder}/broken", *job.held, loader=Broken(rank))
    assert time.monotonic() - began < 60  # the group waits for 180 s
    with quiet():
        save_checkpoint(f"{folder}/broken", *job.held, loader=Seed(rank))


def test_an_object_that_cannot_be_saved_on_one_rank_raises_on_all(tmp_path: Path) -> None:
    run_ranks(one_rank_raises, 2, str(tmp_path))


def refusals(rank: int, world_size: int, folder: str) -> None:
    job = Job(Int8(), seed=3 + rank)
    for name in ("nowhere", "foreign"):
        if name == "foreign":
            with quiet():
                dcp.save({"model": job.ddp.module.state_dict()}, checkpoint_id=f"{folder}/foreign")
        said = (
            "no checkpoint at .*thinwire.save_ch"
            if name == "nowhere"
            else "has no states by rank under 'optim"
        )
        with pytest.raises(thinwire.StateError, match=said):
            load_checkpoint(f"{folder}/{name}", *job.held)
    if rank == 0:
        Path(folder, "mine").mkdir()
        Path(folder, "mine", "notes").write_text("keep")
    kind = thinwire.StateError if rank == 0 else thinwire.MismatchError
    with pytest.raises(kind, match="is not a checkpoint, and saving would replace it"):
        save_checkpoint(f"{folder}/mine", *job.held)
    assert Path(folder, "mine", "notes").exists()
    with quiet():
        path = save_checkpoint(f"{folder}/right", *job.held, seed=job.seed, step=3)
    with pytest.raises(thinwire.OptionError, match=r"step=0 has no load_state_dict"):
        load_checkpoint(path, *job.held, step=0)
    with pytest.raises(thinwire.StateError, match=r"no 'scheduler': it has seed, step"):
        load_checkpoint(path, *job.held, scheduler=job.scheduler)
    with pytest.raises(thinwire.StateError, match=r"of another model: '0\.bias' is \(8,\) there and \(9,\)"):
        load_checkpoint(path, *Job(Int8(), seed=1, width=9).held)
    with pytest.raises(thinwire.StateError, match=r"the state belongs to Int8\(\), but Exact\(\) is running"):
        load_checkpoint(path, *Job(Exact(), seed=1).held)
    here = str(path) if rank == 0 else f"{folder}/nowhere"
    with pytest.raises(thinwire.MismatchError if rank == 0 else thinwire.StateError, match="no checkpoint"):
        load_checkpoint(here, *job.held)


def resumed_if_present(rank: int, world_size: int, folder: str) -> None:
    job = Job(Int8(), seed=3)
    Path(folder, "empty").mkdir(exist_ok=True)
    for name in ("nowhere", "empty"):
        assert load_checkpoint(f"{folder}/{name}", *job.held, missing_ok=True) == {}
    with quiet():
        path = save_checkpoint(f"{folder}/right", *job.held, step=3)
    assert load_checkpoint(path, *job.held, missing_ok=True) == {"step": 3}
    with pytest.raises(thinwire.MismatchError, match=r"checkpoint: .*none in .*one in|one in .*none in"):
        load_checkpoint(str(path) if rank == 0 else f"{folder}/nowhere", *job.held, missing_ok=True)
    dist.barrier()
    if rank == 0:
        (path / ".metadata").unlink()
    dist.barrier()
    with pytest.raises(thinwire.StateError, match="there is no checkpoint at"):  # an incomplete one
        load_checkpoint(path, *job.held, missing_ok=True)


def test_a_missing_checkpoint_is_none_on_all_ranks_and_an_incomplete_one_raises(tmp_path: Path) -> None:
    run_ranks(resumed_if_present, 2, str(tmp_path))


def other_ranks_differ(rank: int, world_size: int, folder: str) -> None:
    job = Job(Int8(), seed=1)
    with pytest.raises(thinwire.StateError, match=r"states of 'seed' differ: .* seed=PerRank"):
        load_checkpoint(f"{folder}/right", *job.held, seed=job.seed)


def test_what_does_not_fit_is_named_on_all_ranks(tmp_path: Path) -> None:
    assert run_ranks(refusals, 2, str(tmp_path)) == [None, None]
    assert run_ranks(other_ranks_differ, 1, str(tmp_path)) == [None]


def test_a_crash_at_any_moment_of_a_save_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    path, unfinished = tmp_path / "checkpoint", tmp_path / "checkpoint.unfinished"

    def write(folder: Path, text: str) -> None:
        folder.mkdir()
        (folder / ".metadata").write_text(text)

    def found() -> str:
        return (_found(path) / ".metadata").read_text()

    write(path, "first")
    write(unfinished, "half")
    assert found() == "first"
    _prepare(path, unfinished)
    assert not unfinished.exists()
    with pytest.raises(FileNotFoundError):
        _replace(path, unfinished)  # lost between the two renames
    assert found() == "first"
    _prepare(path, unfinished)
    assert found() == "first"
    write(unfinished, "second")
    _replace(path, unfinished)
    assert found() == "second"
    assert list(tmp_path.iterdir()) == [path]


class Crash(BaseException):
    """Ends a save, as a kill does."""


def crash_after(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let some changes of the file system through, and raise at the next."""
    left = iter(range(calls))

    def counted(change: Any) -> Any:
        def step(*args: Any, **options: Any) -> Any:
            if next(left, None) is None:
                raise Crash
            return change(*args, **options)

        return step

    for owner, name in ((Path, "rename"), (os, "link"), (os, "mkdir"), (os, "unlink"), (os, "rmdir")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))


def write_checkpoint(folder: Path, text: str) -> None:
    folder.mkdir(parents=True)
    for name in (".metadata", "__0_0.distcp"):
        (folder / name).write_text(text)


def assert_complete(path: Path, texts: set[str]) -> None:
    """The folder that would be loaded has both files of one checkpoint, and all that the user put there."""
    here = _found(path)
    assert (here / "__0_0.distcp").read_text() == (here / ".metadata").read_text()
    assert (here / ".metadata").read_text() in texts
    assert (here / "tokenizer.json").read_text() == "mine"
    assert (here / "latest").is_symlink()
    assert (here / "latest").read_text() == "mine too"


def assert_removable(path: Path, copy: Path) -> None:
    """A user who removes the folder starts over, or from a complete checkpoint, but not from half of one."""
    shutil.copytree(path.parent, copy, symlinks=True)
    shutil.rmtree(copy / path.name, ignore_errors=True)
    if _found(copy / path.name).exists():
        assert_complete(copy / path.name, {"old"})


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
def test_a_users_files_in_the_folder_outlive_a_save_and_a_crash_at_any_moment_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    if not links:
        monkeypatch.setattr(os, "link", lambda *args, **options: os.stat(tmp_path / "not supported"))
    crashed = []
    for calls in range(20):
        path = tmp_path / str(calls) / "checkpoint"
        unfinished = path.with_name("checkpoint.unfinished")
        write_checkpoint(path, "old")
        write_checkpoint(unfinished, "new")
        (path / "samples").mkdir()
        (path / "tokenizer.json").write_text("mine")
        (path / "samples" / "first").write_text("mine too")
        (path / "latest").symlink_to("samples/first")
        with monkeypatch.context() as patch:
            crash_after(calls, patch)
            try:
                _replace(path, unfinished)
            except Crash:
                crashed.append(calls)
        assert_complete(path, {"old", "new"} if calls in crashed else {"new"})
        assert_removable(path, tmp_path / "removed" / str(calls))
        _prepare(path, unfinished)
        write_checkpoint(unfinished, "newer")
        _replace(path, unfinished)
        assert_complete(path, {"newer"})
        assert list(path.parent.iterdir()) == [path]
    assert 5 < len(crashed) < 20, "every moment was tried, and the last saves were not interrupted"


def keeps_a_users_file(rank: int, world_size: int, folder: str) -> None:
    job, path = Job(Int8(), seed=1), Path(folder, "checkpoint")
    with quiet():
        save_checkpoint(path, *job.held, step=1)
        (path / "tokenizer.json").write_text("mine")
        save_checkpoint(path, *job.held, step=2)
    assert (path / "tokenizer.json").read_text() == "mine"
    assert load_checkpoint(path, *job.held) == {"step": 2}


def hostile_states(rank: int, world_size: int, folder: str) -> None:
    job, sentinel = Job(Int8(), seed=1), Path(folder, "ran")
    hostile = (Hostile(sentinel),)
    with pytest.raises(thinwire.StateError, match=r"'args' contains .*Own, which is not plain data"):
        save_checkpoint(f"{folder}/args", *job.held, args=Own())
    assert not Path(folder, "args").exists()
    for name in ("optimizer", "extra", "wire"):
        with quiet():
            path = save_checkpoint(f"{folder}/{name}", *job.held, scheduler=job.scheduler)
            state = {key: read_states(path, key) for key in ("optimizer", "extra", "wire")}
            state[name] = dict.fromkeys(state[name], hostile)
            dcp.save({"model": job.ddp.module.state_dict(), **state}, checkpoint_id=path)
        with pytest.raises(thinwire.StateError, match=rf"'{name}\.rank 0 of 1' contains \w+\.system"):
            load_checkpoint(path, *job.held, scheduler=job.scheduler)
    assert not sentinel.exists()


def one_rank(rank: int, world_size: int, folder: str) -> None:
    keeps_a_users_file(rank, world_size, folder)
    hostile_states(rank, world_size, folder)


def test_a_users_file_in_the_folder_is_kept_and_a_hostile_state_runs_nothing(tmp_path: Path) -> None:
    run_ranks(one_rank, 1, str(tmp_path))
