"""ZeRO's `Sharder`, started by `attach`, against plain DDP with the same optimizer."""

import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.harness import run_ranks
from tests.models import batch, flat_parameters, late, mlp, own
from thinwire import BF16, Exact, Int8, ZeRO
from thinwire.telemetry.watch import as_row

VARIANTS = [
    ZeRO(),
    ZeRO(interleaved=True),
    ZeRO(shard_buckets=False),
    ZeRO(interleaved=True, shard_buckets=False),
]
SMALL = 0.001


def made(kind: str, model: nn.Module) -> Any:
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.02}]
    more = {"momentum": 0.9} if kind == "SGD" else {}
    return getattr(torch.optim, kind)(groups, lr=0.05 if kind == "SGD" else 0.003, **more)


def train(
    rank: int, program: Any, kind: str, steps: int, bucket_mb: float = SMALL, **options: Any
) -> tuple[DDP, Any, Any]:
    random.seed(rank)
    ddp = DDP(mlp(width=16, layers=4), bucket_cap_mb=bucket_mb, **options)
    for parameter in ddp.parameters():
        parameter.register_hook(late)
    optimizer = made(kind, ddp.module)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.5)
    wire = thinwire.attach(ddp, program, optimizer=optimizer, check_every=10)
    for step in range(steps):
        optimizer.zero_grad()
        ddp(batch(rank, step, 16)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    return ddp, optimizer, wire


def against_ddp(rank: int, world_size: int) -> None:
    for kind in {1: ["SGD"], 2: ["SGD", "AdamW"], 3: ["SGD"], 4: ["AdamW"]}[world_size]:
        expected = flat_parameters(train(rank, Exact(), kind, 50)[0].module)
        for program in VARIANTS[:2] if world_size > 2 else VARIANTS:
            ddp, optimizer, wire = train(rank, program, kind, 50)
            got = flat_parameters(ddp.module)
            if world_size <= 2 and kind == "SGD":
                assert torch.equal(got, expected), program
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6, msg=str(program))
            held = sum(
                p.numel() for group in optimizer.param_groups for p in group["params"] if p in optimizer.state
            )
            assert held <= expected.numel() / world_size + 16 * 16
            assert wire.stats().bytes_sent > 0 or world_size == 1


@pytest.mark.parametrize(
    "world_size", [1, pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)]
)
def test_training_equals_plain_ddp_from_the_first_step(world_size: int) -> None:
    assert run_ranks(against_ddp, world_size) == [None] * world_size


def modes(rank: int) -> None:
    expected = flat_parameters(train(rank, Exact(), "SGD", 6)[0].module)
    options: list[dict[str, Any]] = [
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"bucket_mb": 25},
        {"find_unused_parameters": True},
    ]
    for option in options:
        for interleaved in (False, True):
            if interleaved and "find_unused_parameters" in option:
                continue
            ddp, _, wire = train(rank, ZeRO(interleaved=interleaved), "SGD", 6, **option)
            last = as_row(wire.stats().records[-1])
            assert last["purpose"] == ("gradients" if interleaved else "parameters")
            assert last["step"] == (5 if interleaved else 6), "the training step, or how many are over"
            assert torch.equal(flat_parameters(ddp.module), expected), option


def sent_by_all(wire: thinwire.Wire) -> float:
    sent = torch.tensor(float(wire.stats().bytes_sent))
    dist.all_reduce(sent)
    return sent.item()


def compressed(rank: int) -> None:
    exact = flat_parameters(train(rank, Exact(), "SGD", 20)[0].module)
    _, _, plain = train(rank, ZeRO(), "SGD", 20, bucket_mb=25)
    for program, share in (
        (ZeRO(BF16()), 0.75),
        (ZeRO(Int8()), 0.68),
        (ZeRO(BF16(), parameters=torch.bfloat16), 0.5),
        (ZeRO(Int8(), interleaved=True), 0.68),
    ):
        ddp, _, wire = train(rank, program, "SGD", 20, bucket_mb=25)
        assert sent_by_all(wire) < (share + 0.02) * sent_by_all(plain)
        assert (flat_parameters(ddp.module) - exact).norm() < 0.02 * exact.norm()


def scaled(rank: int) -> None:
    """One rank's overflow is skipped by all, and residuals stay; then training is as without that step."""
    results = []
    for program, bad in ((ZeRO(), 3), (ZeRO(), None), (ZeRO(Int8()), 3), (ZeRO(Int8()), None)):
        ddp = DDP(mlp(width=16, layers=4), bucket_cap_mb=SMALL)
        optimizer = made("AdamW", ddp.module)
        thinwire.attach(ddp, program, optimizer=optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(8):
            if step == 3 and bad is None:
                continue
            optimizer.zero_grad()
            loss = ddp(batch(rank, step, 16)).square().mean()
            scaler.scale(loss * (torch.inf if step == bad and rank == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update(4.0)
        results.append(flat_parameters(ddp.module))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[2], results[3])


def clipped(rank: int) -> None:
    results = []
    for program in (Exact(), ZeRO()):
        ddp = DDP(mlp(width=16, layers=4))
        optimizer = made("SGD", ddp.module)
        wire = thinwire.attach(ddp, program, optimizer=optimizer)
        for step in range(4):
            optimizer.zero_grad()
            ddp(10 * batch(rank, step, 16)).square().sum().backward()
            norm = wire.clip_grad_norm_(0.1)
            optimizer.step()
        results.append((float(norm), flat_parameters(ddp.module)))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    torch.testing.assert_close(results[0][1], results[1][1])
    optimizer.zero_grad()
    ddp(10 * batch(rank, 9, 16)).square().sum().backward()
    torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
    with pytest.raises(thinwire.UnavailableError, match=r"use wire\.clip_grad_norm_"):
        optimizer.step()


def accumulated(rank: int) -> None:
    results = []
    for program in (Exact(), ZeRO(), ZeRO(interleaved=True)):
        ddp = DDP(mlp(width=16, layers=4))
        optimizer = made("SGD", ddp.module)
        thinwire.attach(ddp, program, optimizer=optimizer)
        for step in range(4):
            optimizer.zero_grad()
            with ddp.no_sync():
                ddp(batch(rank, 10 + step, 16)).square().mean().backward()
            ddp(batch(rank, step, 16)).square().mean().backward()
            optimizer.step()
        results.append(flat_parameters(ddp.module))
    assert torch.equal(results[1], results[0])
    assert torch.equal(results[2], results[0])
    ddp = DDP(mlp(width=16, layers=4))
    optimizer = made("SGD", ddp.module)
    thinwire.attach(ddp, ZeRO(), optimizer=optimizer)
    ddp(batch(rank, 0, 16)).square().mean().backward()
    ddp.zero_grad()
    ddp(batch(rank, 1, 16)).square().mean().backward()
    with pytest.raises(thinwire.UnavailableError, match="wrap all but the last backward"):
        ddp(batch(rank, 2, 16)).square().mean().backward()


def refused(rank: int) -> None:
    ddp = DDP(mlp(width=16, layers=4))
    optimizer = made("SGD", ddp.module)
    lbfgs = torch.optim.LBFGS(ddp.parameters())
    cases: list[tuple[Any, str]] = [
        (None, "shards one optimizer's state, and 0 were passed"),
        ([optimizer, made("SGD", ddp.module)], "and 2 were passed"),
        (lbfgs, "it cannot be sharded"),
    ]
    for given, said in cases:
        with pytest.raises(thinwire.OptionError, match=said):
            thinwire.attach(ddp, ZeRO(), optimizer=given)
    unused = DDP(mlp(width=16, layers=4), find_unused_parameters=True)
    with pytest.raises(thinwire.OptionError, match="use interleaved=False"):
        thinwire.attach(unused, ZeRO(interleaved=True), optimizer=made("SGD", unused.module))
    wire = thinwire.attach(ddp, ZeRO(interleaved=True), optimizer=optimizer)
    with pytest.raises(thinwire.UnavailableError, match="steps inside backward"):
        wire.clip_grad_norm_(1.0)
    with pytest.raises(thinwire.UnavailableError, match="the step is inside backward"):
        optimizer.step(lambda: ddp(batch(rank, 0, 16)).mean())
    with pytest.raises(thinwire.UnavailableError, match=r"swap to Int8\(\): .*ends with the DDP model"):
        wire.swap(thinwire.Int8())


def documented(rank: int) -> None:
    """The example of docs/zero.md."""
    page = (Path(__file__).parents[3] / "docs" / "zero.md").read_text()
    names: dict[str, Any] = {}
    exec(page.partition("```python\n")[2].partition("```")[0], names)
    batches = [batch(rank, step, 16) for step in range(4)]
    whole = names["train"](mlp(width=16, layers=2), batches, lambda model, x: model(x).square().mean())
    assert (whole is None) == (rank != 0)
    if whole is not None:
        torch.optim.AdamW(mlp(width=16, layers=2).parameters()).load_state_dict(whole)


def checks(rank: int, world_size: int) -> None:
    for check in (modes, compressed, scaled, clipped, accumulated, refused, documented):
        check(rank)


def test_modes_codecs_scalers_clipping_accumulation_and_refusals() -> None:
    assert run_ranks(checks, 2) == [None, None]


def save(rank: int, world_size: int) -> tuple[Any, Any, Any]:
    ddp, optimizer, wire = train(rank, ZeRO(Int8(), parameters=torch.bfloat16), "AdamW", 6)
    whole = wire.consolidate_optimizer_state(to=1)
    assert (whole is None) == (rank != 1)
    with pytest.raises(thinwire.OptionError, match="to=3 is not a rank"):
        wire.consolidate_optimizer_state(to=3)
    return ddp.module.state_dict(), (optimizer.state_dict(), whole), wire.state_dict()


def resume(rank: int, world_size: int, files: bytes, steps: int) -> tuple[torch.Tensor, Any]:
    """With the same number of ranks each loads its own; with another, all of them."""
    saved = pickle.loads(files)
    ddp = DDP(mlp(width=16, layers=4), bucket_cap_mb=SMALL)
    ddp.module.load_state_dict(saved[0][0])
    optimizer = made("AdamW", ddp.module)
    wire = thinwire.attach(ddp, ZeRO(Int8(), parameters=torch.bfloat16), optimizer=optimizer)
    if world_size == len(saved):
        optimizer.load_state_dict(saved[rank][1][0])
    else:
        optimizer.load_state_dict(thinwire.merge_optimizer_states([one[1][0] for one in saved]))
    wire.load_state_dict([one[2] for one in saved])
    kept = own(wire.state_dict())["sharding"]["masters"]
    assert kept
    assert all(
        torch.equal(kept[name], own(one[2])["sharding"]["masters"].get(name, kept[name]))
        for one in saved
        for name in kept
    )
    for step in range(6, 6 + steps):
        optimizer.zero_grad()
        ddp(batch(rank, step, 16)).square().mean().backward()
        optimizer.step()
    held = [p.numel() for group in optimizer.param_groups for p in group["params"] if p in optimizer.state]
    if steps:
        assert sum(held) < 0.75 * sum(p.numel() for p in ddp.parameters()), "others' state was dropped"
    return flat_parameters(ddp.module), wire.consolidate_optimizer_state()


def test_a_resumed_run_keeps_each_owners_state_and_another_world_size_all_of_it() -> None:
    saved = run_ranks(save, 3)
    whole = saved[1][1][1]
    assert sorted(whole["state"]) == list(range(8))
    files = pickle.dumps(saved)  # tensors would be shared with the ranks, who change them
    for world_size in (3, 2):
        results = run_ranks(resume, world_size, files, 0)
        again = results[0][1]
        for index, state in whole["state"].items():
            for key, value in state.items():
                assert torch.equal(again["state"][index][key], value)
        trained = run_ranks(resume, world_size, files, 4)
        assert all(torch.equal(one[0], trained[0][0]) for one in trained)


def bereft(rank: int, world_size: int, interleaved: bool) -> str:
    ddp, optimizer, _ = train(rank, ZeRO(interleaved=interleaved), "SGD", 2)
    if rank == 1:
        ddp(batch(rank, 2, 16))
        os._exit(3)
    try:
        ddp(batch(rank, 2, 16)).square().mean().backward()
        optimizer.step()
    except thinwire.WireError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_rank_that_dies_is_named(interleaved: bool) -> None:
    told, _ = run_ranks(bereft, 2, interleaved, dies=[1], group_timeout=6)
    assert "Rank 1 did not respond" in told
