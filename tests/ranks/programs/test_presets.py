"""Codecs, nodes and the battery for hooks on real Gloo ranks, with many buckets and random delays."""

import math
import os
import random
import signal
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.harness import run_ranks
from tests.models import batch, flat_gradients, flat_parameters, mlp, own
from thinwire.ddp_comm_hooks.quantization_hooks import (
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)
from thinwire.testing import check_hook

PROGRAMS: dict[str, tuple[thinwire.Program, float]] = {
    "Int8": (thinwire.Int8(), 0.01),
    "Int4": (thinwire.Int4(), 0.06),
    "Int2": (thinwire.Int2(), 0.2),
    "FP8": (thinwire.FP8(), 0.04),
    "Sign": (thinwire.Sign(keep=1.0), 0.7),
    "TopK": (thinwire.TopK(0.1), 0.9),
    "RandomK": (thinwire.RandomK(0.25), 1.0),
    "Partition": (thinwire.Partition([("*.bias", thinwire.Exact())], default=thinwire.Int8()), 0.01),
}
"""Programs, and how far the sum of their means over ten steps may be from that of the exact ones."""


def summed(rank: int, world_size: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Means over ten steps of the same model, exact and compressed; feedback makes their sums close."""
    random.seed(rank)
    results = {}
    for name, (program, _) in PROGRAMS.items():
        exact, wired = DDP(mlp(), bucket_cap_mb=0.002), DDP(mlp(), bucket_cap_mb=0.002)
        for parameter in wired.module.parameters():
            parameter.register_hook(lambda _: time.sleep(random.uniform(0, 0.001)))
        thinwire.attach(wired, program)
        totals = []
        for ddp in (exact, wired):
            total = torch.zeros(flat_parameters(ddp.module).numel())
            for step in range(10):
                ddp.zero_grad()
                ddp(batch(rank, step % 2)).square().mean().backward()
                total += flat_gradients(ddp.module)
            totals.append(total)
        results[name] = (totals[0], totals[1])
    return results


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_compressed_means_add_up_to_the_exact_ones(world_size: int) -> None:
    ranks = run_ranks(summed, world_size)
    for name, (_, allowed) in PROGRAMS.items():
        exact, wired = ranks[0][name]
        off = (wired - exact).norm() / exact.norm()
        assert off < allowed, f"{name} is off by {off:.2%}"
        assert all(torch.equal(results[name][1], wired) for results in ranks), f"{name}: ranks differ"


def across_nodes(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor, int, dict[str, Any]]:
    exact, wired = DDP(mlp(), bucket_cap_mb=0.002), DDP(mlp(), bucket_cap_mb=0.002)
    wire = thinwire.attach(wired, thinwire.AcrossNodes(thinwire.Int8(), node_size=2))
    for ddp in (exact, wired):
        for step in range(4):
            ddp.zero_grad()
            ddp(batch(rank, step)).square().mean().backward()
    last = wire.stats().last
    assert last is not None
    return (
        flat_gradients(exact.module),
        flat_gradients(wired.module),
        last.bytes_sent,
        own(wire.state_dict())["memory"]["0.weight"],
    )


def test_exact_in_the_node_and_compressed_between_nodes() -> None:
    results = run_ranks(across_nodes, 4)
    exact, wired, sent, _ = results[0]
    assert 0 < (wired - exact).norm() / exact.norm() < 0.03
    for rank, (_, other, other_sent, slots) in enumerate(results):
        assert torch.equal(other, wired)
        assert other_sent == sent
        assert list(slots) == [f"slice {rank % 2} of 2: residual"]
        assert slots[f"slice {rank % 2} of 2: residual"].shape == (12, 24)


@dataclass(frozen=True)
class DiesFirst:
    """One rank is killed before the ranks of its node connect."""

    victim: int

    def __call__(
        self, bucket: thinwire.Bucket, memory: thinwire.Memory
    ) -> thinwire.Collectives[thinwire.Outcome]:
        if bucket.rank == self.victim:
            os.kill(os.getpid(), signal.SIGKILL)
        return (yield from thinwire.AcrossNodes(thinwire.Exact(), node_size=2)(bucket, memory))


def bereft(rank: int, world_size: int) -> tuple[str, str]:
    ddp = DDP(mlp(), bucket_cap_mb=0.002)
    thinwire.attach(ddp, DiesFirst(victim=3), timeout=4.0)
    dist.barrier()  # all are connected, and have the victim's word
    try:
        ddp(batch(rank, 0)).square().mean().backward()
    except thinwire.ThinwireError as error:
        return type(error).__name__, str(error)
    raise AssertionError("no error came")


def test_a_rank_that_dies_before_its_node_connects_is_named() -> None:
    for kind, text in run_ranks(bereft, 4, dies={3})[:3]:
        assert kind == "WireError"
        assert "Rank 3 did not respond:" in text


def reloaded(rank: int, world_size: int) -> None:
    ddp = DDP(mlp(), bucket_cap_mb=0.002)
    wire = thinwire.attach(ddp, thinwire.Int8())
    ddp(batch(rank, 0)).square().mean().backward()
    states: list[Any] = [None] * world_size
    dist.all_gather_object(states, wire.state_dict())
    with pytest.raises((thinwire.StateError, thinwire.MismatchError), match="the state is that of rank"):
        wire.load_state_dict(states[1 - rank])
    wire.load_state_dict(states[rank])
    with pytest.raises((thinwire.StateError, thinwire.MismatchError), match=r"rank . of 3, and this is rank"):
        wire.load_state_dict({f"rank {rank} of 3": (own(states[rank]),)})


def test_the_residuals_of_another_rank_are_refused() -> None:
    run_ranks(reloaded, 2)


def halved(rank: int, world_size: int) -> None:
    """Large exchanges go as two collectives side by side: as if they were one."""
    ddp = DDP(torch.nn.Linear(300, 300))
    rows = torch.randn(world_size, 50_001, generator=torch.Generator().manual_seed(rank))
    everybody = [
        torch.randn(world_size, 50_001, generator=torch.Generator().manual_seed(peer))
        for peer in range(world_size)
    ]

    def exchange(bucket: thinwire.Bucket, memory: thinwire.Memory) -> thinwire.Collectives[thinwire.Outcome]:
        received = yield thinwire.AllToAll(rows)
        assert torch.equal(received, torch.stack([peer[rank] for peer in everybody]))
        gathered = yield thinwire.AllGather(rows[0])
        assert torch.equal(gathered, torch.stack([peer[0] for peer in everybody]))
        own = yield thinwire.ReduceScatter(rows)
        torch.testing.assert_close(own, torch.stack([peer[rank] for peer in everybody]).sum(0))
        odd = yield thinwire.AllGather(torch.complex(rows[0], rows[0]))
        assert torch.equal(odd, torch.stack([torch.complex(peer[0], peer[0]) for peer in everybody]))
        return thinwire.Outcome(bucket.buffer)

    thinwire.attach(ddp, exchange)
    ddp(torch.ones(2, 300)).sum().backward()


@pytest.mark.parametrize("world_size", [2, 3])
def test_large_exchanges_arrive_whole(world_size: int) -> None:
    run_ranks(halved, world_size)


def overflowing(rank: int, world_size: int) -> tuple[bool, bool, bool]:
    ddp = DDP(mlp(), bucket_cap_mb=100)
    wire = thinwire.attach(ddp, thinwire.Int4())
    ddp(batch(rank, 0)).square().mean().backward()
    before = own(wire.state_dict())["memory"]
    poisoned = batch(rank, 1)
    poisoned[0, 0] = math.inf if rank == 1 else 1.0
    ddp.zero_grad()
    ddp(poisoned).square().mean().backward()
    bad = not flat_gradients(ddp.module).isfinite().any()
    after = own(wire.state_dict())["memory"]
    same = all(torch.equal(before[name]["residual"], after[name]["residual"]) for name in before)
    ddp.zero_grad()
    ddp(batch(rank, 2)).square().mean().backward()
    return bad, same, bool(flat_gradients(ddp.module).isfinite().all())


def test_an_overflow_on_one_rank_reaches_all_and_leaves_residuals_alone() -> None:
    assert run_ranks(overflowing, 2) == [(True, True, True)] * 2


def unmatched(rank: int, world_size: int) -> None:
    ddp = DDP(mlp())
    with pytest.raises(thinwire.OptionError, match="the rule for 'embed' is never used"):
        thinwire.attach(ddp, thinwire.Partition([("embed", thinwire.Exact())]))
    wire = thinwire.attach(ddp, thinwire.Int8())
    with pytest.raises((thinwire.OptionError, thinwire.AttachError)):
        wire.swap(thinwire.Partition([("embed", thinwire.Exact())]))


def test_attach_refuses_rules_that_fit_nothing() -> None:
    run_ranks(unmatched, 2)


def register_pertensor(ddp: DDP) -> None:
    ddp.register_comm_hook(None, quantization_pertensor_hook)


def register_perchannel(ddp: DDP) -> None:
    ddp.register_comm_hook(None, quantization_perchannel_hook)


def local_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def halving_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    quartered: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: done.value()[0] / 4)
    return quartered


def stuck_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    if dist.get_rank() == 0 and bucket.index() == 1:
        time.sleep(60)
    return halving_hook(state, bucket)


def register_local(ddp: DDP) -> None:
    ddp.register_comm_hook(None, local_hook)


def register_halving(ddp: DDP) -> None:
    ddp.register_comm_hook(None, halving_hook)


def raising_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    if dist.get_rank() == 1:
        raise KeyError("a bug on rank 1")
    return halving_hook(state, bucket)


def register_raising(ddp: DDP) -> None:
    ddp.register_comm_hook(None, raising_hook)


def register_stuck(ddp: DDP) -> None:
    ddp.register_comm_hook(None, stuck_hook)


@pytest.mark.parametrize(
    "register", [register_pertensor, pytest.param(register_perchannel, marks=pytest.mark.slow)]
)
def test_hooks_pass_the_battery(register: Any) -> None:
    report = check_hook(register, ranks=2, seconds=600)
    assert len(report.errors) == 6
    assert all(0 < error < 0.02 for error in report.errors)


def test_the_battery_refuses_what_it_cannot_run() -> None:
    with pytest.raises(thinwire.OptionError, match="cannot be sent to other processes"):
        check_hook(lambda ddp: None)
    with pytest.raises(thinwire.OptionError, match="ranks=0 must be at least 1"):
        check_hook(register_local, ranks=0)


@pytest.mark.parametrize(
    ("register", "said"),
    [
        (register_local, "step 0: ranks 0 and 1 hold different gradients"),
        pytest.param(register_halving, "step 0: the gradients are off by 50.00%", marks=pytest.mark.slow),
        pytest.param(register_raising, "rank 1 raised:(.|\n)*a bug on rank 1", marks=pytest.mark.slow),
        pytest.param(register_stuck, r"ranks \[0, 1\] hang after 20 s", marks=pytest.mark.slow),
    ],
)
def test_the_battery_finds_wrong_hooks(register: Any, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        check_hook(register, ranks=2, steps=2, seconds=20 if register is register_stuck else 600)
