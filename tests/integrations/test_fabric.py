"""Lightning Fabric."""

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from lightning.fabric.strategies import ModelParallelStrategy

import thinwire
from examples import tiny, train_fabric
from tests.integrations.frameworks import (
    HALF,
    Run,
    check_half,
    new_scaler,
    of_int8_steps,
    on_ranks,
    plain,
    poison,
    refusal,
    run_all,
)
from tests.integrations.lightning_rows import Rows
from thinwire.integrations.fabric import State, attach

logging.getLogger("lightning.fabric").setLevel(logging.ERROR)


def runs(rank: int, folder: Path) -> tuple[list[Run], list[dict[str, Any]]]:
    found = run_all(rank, train_fabric.train, folder)
    rows = Rows()
    train_fabric.train(tiny.Options(accumulate=2, clip=0.1, compiled=True), loggers=rows)
    return found, rows.rows


def test_the_example_trains_saves_resumes_and_logs_as_plain_thinwire(tmp_path: Path) -> None:
    for found, rows in on_ranks(runs, 2, tmp_path):
        for run in found:
            assert run.differences() == [], run
        assert [row["step"] for row in rows] == list(range(8))
        assert of_int8_steps(rows)


class Job:
    """A model that is set up and attached as in a user's loop."""

    def __init__(self, program: Any, **options: Any) -> None:
        self.fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", **options)
        self.fabric.launch()
        model = tiny.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.model, self.optimizer = self.fabric.setup(model, optimizer)
        self.wire = attach(self.fabric, self.model, program, optimizer=self.optimizer)
        self.state = State(self.wire)
        self.objects = {"m": self.model, "o": self.optimizer, "w": self.state}

    def train(self, begin: int, end: int, **clip: Any) -> str:
        for step in range(begin, end):
            rows = tiny.Rows().rows[8 * (2 * step + self.fabric.global_rank) :][:8]
            self.fabric.backward(tiny.loss_of(self.model(rows), rows))
            if clip:
                self.fabric.clip_gradients(self.model, self.optimizer, **clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return tiny.digest(self.model)


def any_order(rank: int, folder: Path) -> tuple[str, dict[str, str], bool]:
    """Fabric loads in the order of a set, which differs from run to run and from rank to rank."""
    program = thinwire.DiLoCo(4, program=thinwire.Int8())
    job = Job(program)
    job.train(0, 3)
    job.fabric.save(folder / "a", job.objects)
    expected = job.train(3, 6)
    saved = torch.load(folder / "a")
    resumed, whole = {}, False
    for order in ("wmo", "mwo", "omw"):
        again = Job(program)
        for name in order[::-1] if rank else order:
            again.objects[name].load_state_dict(saved[name])
        if order == "omw":  # saved again before the first forward
            again.fabric.save(folder / "b", again.objects)
            whole = torch.load(folder / "b")["w"]["wire"].keys() == saved["w"]["wire"].keys()
        resumed[order] = again.train(3, 6)
    return expected, resumed, whole


def test_objects_may_be_loaded_in_any_order(tmp_path: Path) -> None:
    for expected, resumed, whole in on_ranks(any_order, 2, tmp_path):
        assert resumed == dict.fromkeys(("wmo", "mwo", "omw"), expected)
        assert whole, "a state that was loaded and not yet applied is saved"


def half(rank: int, folder: Path) -> list[Any]:
    poison(step=5, rank=1)
    results: list[Any] = []
    for name in HALF:
        options = tiny.Options(program=name, clip=0.1)
        clip = {"max_norm": 0.1, "error_if_nonfinite": False}
        job, again = (Job(tiny.program(options), plugins=[in_half()]) for _ in range(2))
        job.train(0, 3, **clip)
        job.fabric.save(folder / "a", job.objects)
        job.train(3, 8, **clip)
        again.fabric.load(folder / "a", again.objects)
        again.train(3, 8, **clip)
        scaler = new_scaler()
        expected = plain(rank, options, inside=False, lr_every=1000, scaler=scaler)
        scales = job.fabric.strategy.precision.scaler.get_scale(), scaler.get_scale()
        trained, resumed = (tiny.result(one.wire, one.model) for one in (job, again))
        results.append((trained, resumed, expected, scales))
    return results


def in_half() -> MixedPrecision:
    """What `precision="16-mixed"` is on a GPU. On CPU Fabric takes bf16 instead, and warns."""
    return MixedPrecision("16-mixed", "cpu", new_scaler())


def test_a_gradscaler_of_fabric_skips_an_overflow_on_all_ranks_and_is_resumed(tmp_path: Path) -> None:
    check_half(on_ranks(half, 2, tmp_path))


def no_half(rank: int) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", precision="16-mixed")
    return fabric.strategy.precision.scaler, [str(one.message) for one in caught]


def test_fp16_on_cpu_becomes_bf16_by_fabric_itself() -> None:
    for scaler, messages in on_ranks(no_half, 2):
        assert scaler is None
        assert any("fp16 is not supported on CPU. Using `precision='bf16-mixed'`" in one for one in messages)


def clipped(rank: int) -> tuple[list[str], str]:
    digests = [Job(program).train(0, 4, clip_val=0.001) for program in (thinwire.Exact(), thinwire.ZeRO())]
    poison(step=1, rank=1)
    return digests, refusal(RuntimeError, Job(thinwire.ZeRO()).train, 0, 2, max_norm=1.0)


def test_gradients_are_clipped_under_zero_as_without() -> None:
    for (exact, zero), message in on_ranks(clipped, 2):
        assert zero == exact, "by value"
        assert "the norm of the gradients is nan" in message, "as by default in Fabric"


def refused(rank: int, devices: int) -> str:
    strategy = "auto" if devices == 1 else ModelParallelStrategy(lambda model, mesh: model, 1, 2)
    fabric = Fabric(accelerator="cpu", devices=devices, strategy=strategy)
    fabric.launch()
    return refusal(thinwire.AttachError, attach, fabric, fabric.setup(tiny.model()), thinwire.Int8())


@pytest.mark.parametrize(("devices", "name"), [(1, "SingleDeviceStrategy"), (2, "ModelParallelStrategy")])
def test_what_has_no_ddp_is_refused_with_the_way_out(devices: int, name: str) -> None:
    for message in on_ranks(refused, devices, devices):
        assert f'the fabric\'s strategy is {name}: use Fabric(strategy="ddp", devices=2) or more' in message
