"""Lightning Fabric."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric

import thinwire
from examples import tiny, train_fabric
from tests.integrations.frameworks import check_metrics, check_runs, on_ranks
from tests.integrations.lightning_rows import Rows
from thinwire.integrations.fabric import State, attach

logging.getLogger("lightning.fabric").setLevel(logging.ERROR)


def runs(rank: int, folder: Path) -> None:
    check_runs(rank, train_fabric.train, folder)
    rows = Rows()
    train_fabric.train(tiny.Options(accumulate=2, clip=0.1, compiled=True), loggers=rows)
    assert [row["step"] for row in rows.rows] == list(range(8))
    check_metrics(rows.rows)


def test_the_example_trains_saves_resumes_and_logs_as_plain_thinwire(tmp_path: Path) -> None:
    on_ranks(runs, 2, tmp_path)


class Job:
    def __init__(self, program: Any) -> None:
        self.fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
        self.fabric.launch()
        model = tiny.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.model, self.optimizer = self.fabric.setup(model, optimizer)
        self.wire = attach(self.fabric, self.model, program, optimizer=self.optimizer)
        self.state = State(self.wire)

    def train(self, begin: int, end: int) -> str:
        for step in range(begin, end):
            rows = tiny.Rows().rows[8 * (2 * step + self.fabric.global_rank) :][:8]
            self.fabric.backward(tiny.loss_of(self.model(rows), rows))
            self.optimizer.step()
            self.optimizer.zero_grad()
        return tiny.digest(self.model)


def any_order(rank: int, folder: Path) -> None:
    """Fabric loads in the order of a set, which differs from run to run and from rank to rank."""
    program = thinwire.DiLoCo(4, program=thinwire.Int8())
    job = Job(program)
    job.train(0, 3)
    job.fabric.save(folder / "a", {"m": job.model, "o": job.optimizer, "w": job.state})
    expected = job.train(3, 6)
    saved = torch.load(folder / "a")
    for order in ("wmo", "mwo", "omw"):
        again = Job(program)
        objects = {"m": again.model, "o": again.optimizer, "w": again.state}
        for name in order[::-1] if rank else order:
            objects[name].load_state_dict(saved[name])
        if order == "omw":  # saved again before the first forward
            again.fabric.save(folder / "b", objects)
            assert torch.load(folder / "b")["w"]["wire"].keys() == saved["w"]["wire"].keys()
        assert again.train(3, 6) == expected, order


def test_objects_may_be_loaded_in_any_order(tmp_path: Path) -> None:
    on_ranks(any_order, 2, tmp_path)


def refused(rank: int) -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    model = fabric.setup(tiny.model())
    message = r'strategy is SingleDeviceStrategy: give Fabric\(strategy="ddp", devices=2\) or more'
    with pytest.raises(thinwire.AttachError, match=message):
        attach(fabric, model, thinwire.Int8())


def test_no_ddp_is_refused_with_the_way_out() -> None:
    on_ranks(refused, 1)
