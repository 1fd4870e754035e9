"""torch's profiler shows thinwire's phases by name."""

from collections import Counter
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import ProfilerActivity, profile

import thinwire
from tests.harness import run_ranks
from tests.models import batch, mlp


def ranges(rank: int, world_size: int) -> dict[str, dict[str, int]]:
    found = {}
    for name, program, stages in (
        ("Exact", thinwire.Exact(), 1),
        ("PowerSGD", thinwire.PowerSGD(rank=2, min_compression=1, warmup=0), 2),
        ("LocalSGD", thinwire.LocalSGD(1), 0),
    ):
        ddp = DDP(mlp())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        options: dict[str, Any] = {"optimizer": optimizer} if stages == 0 else {}
        wire = thinwire.attach(ddp, program, rules=(), **options)
        wire._runner.engine._inline = True  # the profiler sees this thread
        for step in range(3):
            with profile(activities=[ProfilerActivity.CPU]) as seen:
                ddp(batch(rank, step)).square().mean().backward()
                optimizer.step()
            names = [event.name for event in seen.events() or ()]
        found[name] = dict(Counter(one for one in names if one.startswith("thinwire::")))
        del wire, ddp
    return found


def test_every_phase_of_a_step_has_a_range() -> None:
    for found in run_ranks(ranges, 2):
        exact, powersgd, averaged = found["Exact"], found["PowerSGD"], found["LocalSGD"]
        assert exact == {
            "thinwire::encode": 1,
            "thinwire::issue": 1,
            "thinwire::wait": 1,
            "thinwire::decode": 1,
            "thinwire::settle": 1,
        }
        assert "thinwire::combine" in powersgd, "Q is computed and sent between two collectives"
        assert powersgd["thinwire::issue"] == powersgd["thinwire::wait"]
        assert powersgd["thinwire::encode"] == powersgd["thinwire::decode"]
        stages = powersgd["thinwire::encode"] + powersgd["thinwire::combine"]
        assert stages == powersgd["thinwire::issue"]
        assert averaged["thinwire::averaging"] == 1
