"""A strategy of a third party plugs in, as docs/strategies.md writes it; every strategy prints itself."""

import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.harness import run_ranks
from tests.models import batch, flat_parameters, mlp, own
from thinwire import Configuration, Strategy
from thinwire.programs.allreduce import Alone

PAGE = Path(__file__).parents[3] / "docs" / "strategies.md"


def third_party(rank: int, world_size: int) -> None:
    names: dict[str, Any] = {"ddp": DDP(mlp())}
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.S)
    exec(block, names)
    ddp, wire = names["ddp"], names["wire"]
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        ddp(batch(rank, step)).square().mean().backward()
        optimizer.step()
    sent = [record.bytes_sent for record in wire.stats().records]
    assert [count > 2 * sent[1] for count in sent] == [True, False, False, False, True, False]
    kinds = [set(record.bytes_by_kind) for record in wire.stats().records]
    assert kinds[0] == {"AllReduce"}
    assert kinds[1] == {"AllToAll", "AllGather"}, "biases are exact by default, in the same exchange"
    assert wire.step == 6
    written = r"Wire\(Refreshed\(period=4, program=Int8\(\)\), 2 ranks, step 6, [\d.]+ MB sent, .* DDP\)"
    assert re.fullmatch(written, repr(wire)), repr(wire)
    assert "Int8()" in wire.explain()
    assert "buckets of 25 MB" in wire.explain()
    resumed = DDP(mlp())
    again = thinwire.attach(resumed, names["Refreshed"](4, thinwire.Int8()))
    again.load_state_dict(wire.state_dict())
    assert again.step == 6
    wire.swap(thinwire.Exact())  # a strategy of theirs swaps like ours
    ddp(batch(rank, 6)).square().mean().backward()
    assert repr(wire).startswith("Wire(Exact(), 2 ranks, step 7")
    with pytest.raises(thinwire.OptionError, match="period=0 must be at least 1: try 4"):
        thinwire.attach(DDP(mlp()), names["Refreshed"](0, thinwire.Int8()))


def test_a_strategy_of_a_third_party_plugs_in() -> None:
    run_ranks(third_party, 2)


@dataclass(frozen=True, repr=False)
class Apart(Configuration):
    """A third party's configuration, by which every rank trains a model of its own."""

    merges: bool = True
    swappable: ClassVar[bool] = False

    def bind(self, context: Any) -> Strategy:
        return (ApartStrategy if self.merges else Unmerged)(self, context)


class Unmerged(Strategy):
    """Ranks that hold different models, and count in a state of their own."""

    counted = 0

    @property
    def replicas_equal(self) -> bool:
        return False

    def wrap(self, program: Any) -> Any:
        return Alone()

    def end_backward(self, committed: bool) -> None:
        self.counted += 1 + self.context.model.group.rank()

    def state_dict(self) -> dict[str, Any]:
        return {"counted": self.counted}

    def prepare(self, state: Any) -> Any:
        return lambda: setattr(self, "counted", state["counted"])


class ApartStrategy(Unmerged):
    def merge(self, entries: Any) -> dict[str, Any]:
        return {"counted": sum(one["counted"] for one in entries)}


class ApartJob:
    def __init__(self, merges: bool) -> None:
        self.ddp = DDP(mlp(width=8, layers=2))
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=0.01)
        self.wire = thinwire.attach(self.ddp, Apart(merges))
        self.held = (self.ddp, self.optimizer, self.wire)

    def train(self, rank: int, begin: int, end: int) -> torch.Tensor:
        for step in range(begin, end):
            self.optimizer.zero_grad()
            self.ddp(batch(rank, step, width=8)).square().mean().backward()
            self.optimizer.step()
        return flat_parameters(self.ddp.module)


def saved_apart(rank: int, world_size: int, folder: str) -> list[torch.Tensor]:
    warnings.simplefilter("ignore")  # DCP's
    for merges in (True, False):
        job = ApartJob(merges)
        saved = job.train(rank, 0, 3)
        path = thinwire.save_checkpoint(f"{folder}/{merges}", *job.held)
        expected = job.train(rank, 3, 6)
        again = ApartJob(merges)
        thinwire.load_checkpoint(path, *again.held)
        assert own(again.wire.state_dict())["counted"] == 3 * (1 + rank)
        assert torch.equal(again.train(rank, 3, 6), expected), "each rank has its model and its moments"
    with pytest.raises(thinwire.UnavailableError, match=r"Apart\(merges=False\) cannot be swapped, it"):
        job.wire.swap(thinwire.Exact())
    with pytest.raises(thinwire.OptionError, match=r"Apart\(\) cannot be a stage: it begins and ends"):
        thinwire.Schedule({0: Apart()})
    return [saved]


def loaded_alone(rank: int, world_size: int, folder: str, models: list[list[torch.Tensor]]) -> None:
    job = ApartJob(merges=True)
    thinwire.load_checkpoint(f"{folder}/True", *job.held)
    assert own(job.wire.state_dict())["counted"] == 3 * 1 + 3 * 2
    mean = torch.stack([one for (one,) in models]).mean(0)
    assert torch.allclose(flat_parameters(job.ddp.module), mean, rtol=0, atol=1e-7)
    with pytest.raises(thinwire.StateError, match=r"'counted' of Apart\(merges=False\) is not equal on"):
        thinwire.load_checkpoint(f"{folder}/False", *ApartJob(merges=False).held)


def test_a_third_partys_state_of_single_ranks_is_saved_and_merged(tmp_path: Path) -> None:
    models = run_ranks(saved_apart, 2, str(tmp_path))
    run_ranks(loaded_alone, 1, str(tmp_path), models)


class Taken(Unmerged):
    def state_dict(self) -> dict[str, Any]:
        return {"step": 0}


@dataclass(frozen=True, repr=False)
class TakenConfiguration(Configuration):
    def bind(self, context: Any) -> Strategy:
        return Taken(self, context)


def overwrites(rank: int, world_size: int) -> None:
    wire = thinwire.attach(DDP(mlp()), TakenConfiguration())
    with pytest.raises(thinwire.StateError, match="saves an entry 'step', which the wire's own state has"):
        wire.state_dict()


def test_a_third_partys_state_cannot_overwrite_the_wires() -> None:
    run_ranks(overwrites, 1)
