"""Auto on real ranks: all take rank 0's choice, it is checked, and it is in the state."""

import logging
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.harness import run_ranks
from tests.models import batch, flat_parameters, mlp
from tests.surface.test_docs import python_blocks
from thinwire import MismatchError, OptionError
from thinwire.plan import auto
from thinwire.plan.network import Link, Network
from thinwire.plan.probe import Probe, probe_group


def slow_network(probe: Any) -> Network:
    return Network(ranks=2, link=Link(up=1e5, down=1e5, latency=1e-3))


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


def train(wire: Any, ddp: DDP, rank: int, first: int, last: int) -> list[str]:
    ran = []
    for step in range(first, last):
        ddp(batch(rank, step)).square().mean().backward()
        ran.append(repr(wire.program.program) if isinstance(wire.program, thinwire.Auto) else "")
    return ran


def chosen(rank: int, world_size: int) -> dict[str, Any]:
    log = Lines()
    logging.getLogger("thinwire").addHandler(log)
    logging.getLogger("thinwire").setLevel(logging.INFO)
    original = Probe.run
    setattr(Probe, "run", slow_network)  # noqa: B010 - mypy does not allow the assignment
    options = thinwire.Auto(candidates=(thinwire.BF16(), thinwire.Int8()), after=4, check_after=5)
    ddp = DDP(mlp(layers=3))
    wire = thinwire.attach(ddp, options)
    ran = train(wire, ddp, rank, 0, 7)
    explained, state = wire.explain(), wire.state_dict()
    again = DDP(mlp(layers=3))
    again.module.load_state_dict(ddp.module.state_dict())
    resumed = thinwire.attach(again, options)
    resumed.load_state_dict(state)
    resumed_with = repr(resumed.program)
    wire._runner.strategy._baseline = 0.0  # type: ignore[attr-defined] # there is no gain then
    ran += train(wire, ddp, rank, 7, 12)
    setattr(Probe, "run", original)  # noqa: B010
    return {
        "ran": ran,
        "explained": explained,
        "resumed": resumed_with,
        "again": resumed.explain().splitlines()[0] == explained.splitlines()[0],
        "log": log.lines,
        "parameters": flat_parameters(ddp.module),
        "finally": wire.explain().splitlines()[0],
    }


def test_all_ranks_take_rank_0s_choice_check_it_and_fall_back() -> None:
    first, second = run_ranks(chosen, 2)
    assert first["ran"] == second["ran"] == ["None"] * 4 + ["Int8()"] * 5 + ["Exact()"] * 3
    assert torch.equal(first["parameters"], second["parameters"])
    assert first["explained"].startswith("Auto: On 2 hosts, 100kbit for data")
    assert "use Int8()" in first["explained"]
    assert "Expected loss gap: unknown for this kind of model; elsewhere" in first["explained"]
    assert "program=Int8()" in first["resumed"]
    assert first["again"]
    assert "Back to exact gradients after 5 steps" in first["finally"]
    assert [line.split(":")[0] for line in first["log"]] == ["INFO auto", "WARNING auto"]
    assert second["log"] == []


def stays(rank: int, world_size: int) -> tuple[str, str, Network]:
    names: dict[str, Any] = {"thinwire": thinwire}
    exec(python_blocks("docs/plan.md")[0], names)
    assert names["attach_auto"](DDP(mlp(layers=2))).program.max_gap == 0.005
    ddp = DDP(mlp(layers=2))
    wire = thinwire.attach(ddp, "auto")
    train(wire, ddp, rank, 0, 10)
    world = torch.distributed.group.WORLD
    assert world is not None
    return wire.explain(), repr(wire.program), probe_group(world)


def test_over_loopback_it_probes_and_says_dont() -> None:
    (explained, program, network), (_, _, other) = run_ranks(stays, 2)
    assert "Don't." in explained
    assert "program=Exact()" in program
    assert network == other, "ranks must derive the same network"
    assert network.link.up > 1e7
    assert 0 <= network.link.latency < 0.1


def unplannable(rank: int, world_size: int) -> str:
    def choice(strategy: Any, network: Network) -> dict[str, Any]:
        raise ValueError("this candidate cannot be planned")

    setattr(Probe, "run", slow_network)  # noqa: B010 - mypy does not allow the assignment
    setattr(auto.AutoStrategy, "_choice", choice)  # noqa: B010
    ddp = DDP(mlp(layers=1))
    wire = thinwire.attach(ddp, thinwire.Auto(after=3))
    with pytest.raises((ValueError, MismatchError)) as raised:
        train(wire, ddp, rank, 0, 5)
    return str(raised.value)


def test_a_plan_that_fails_on_rank_0_is_an_error_on_all() -> None:
    first, second = run_ranks(unplannable, 2)
    assert first == "this candidate cannot be planned"
    assert second == "rank 0 raised: ValueError: this candidate cannot be planned"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_gap": -1}, "max_gap=-1 must be at least 0"),
        ({"max_memory": 0}, "max_memory=0 must be positive"),
        ({"after": 1}, "after=1"),
        ({"candidates": [thinwire.Int8]}, "is not a program"),
    ],
)
def test_wrong_options(options: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        thinwire.Auto(**options)


def test_it_cannot_be_a_stage_of_a_schedule() -> None:
    with pytest.raises(OptionError, match="cannot be a stage: it chooses its program by itself"):
        thinwire.Schedule({0: thinwire.Exact(), 10: thinwire.Auto()})


def test_the_choices_are_variants_that_a_state_may_hold() -> None:
    config = thinwire.Auto()
    texts = [repr(one.gradient_program()) for one in config.variants()]
    assert texts == [
        "Exact()",
        "Exact()",
        "BF16()",
        "Int8()",
        "Int4()",
        "PowerSGD(rank=8, factor_dtype='int8', warmup=0)",
    ]
    assert auto.Auto is thinwire.Auto
