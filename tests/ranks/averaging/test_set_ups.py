"""Averaging models: buffers, unused parameters, scalers, optimizers' states, swaps, what is refused."""

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.harness import run_ranks
from tests.models import batch, flat_parameters, mlp
from tests.ranks.averaging.test_averaging import loss, train
from thinwire import DiLoCo, Exact, Int4, Int8, LocalSGD
from thinwire.strategies.averaging.policy import Averaging, Buffers, OptimizerState


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x)
        return result


def normed(rank: int, world_size: int, buffers: Buffers) -> tuple[list[torch.Tensor], float, float]:
    ddp = DDP(Normed())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    wire = thinwire.attach(ddp, LocalSGD(4, buffers=buffers), optimizer=optimizer)
    losses = []
    for step in range(60):
        x = batch(rank, step, width=8, rows=16) + rank
        optimizer.zero_grad()
        error = (ddp(x) - x.sum(1, keepdim=True) / 8).square().mean()
        error.backward()
        optimizer.step()
        losses.append(float(error.detach()))
    wire.finalize()
    ddp.eval()
    x = torch.cat([batch(peer, 99, width=8, rows=64) + peer for peer in range(world_size)])
    with torch.no_grad():
        evaluated = float((ddp.module(x) - x.sum(1, keepdim=True) / 8).square().mean())
    return [buffer.clone() for buffer in ddp.module.buffers()], losses[0], evaluated


def all_buffers(rank: int, world_size: int) -> list[Any]:
    return [normed(rank, world_size, buffers) for buffers in ("mean", "rank0", "local")]


def test_batch_norm_converges_and_buffers_are_what_was_asked_for() -> None:
    one, other = run_ranks(all_buffers, 2)
    means = [[way[0][0] for way in rank] for rank in (one, other)]  # running means
    assert torch.equal(means[0][0], means[1][0])
    assert torch.equal(means[0][1], means[1][1])
    assert not torch.equal(means[0][2], means[1][2])
    assert not torch.equal(means[0][0], means[0][1])
    assert int(one[0][0][2]) == 60, "batches were counted"
    _, first, evaluated = one[0]
    assert evaluated < 0.1 * first, "mean statistics serve all ranks' data"


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        result: torch.Tensor = self.branches[branch](x)
        return result


def unused(rank: int, world_size: int, policy: Averaging) -> torch.Tensor:
    ddp = DDP(Branches(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    wire = thinwire.attach(ddp, policy, optimizer=optimizer, check_every=1)
    for step in range(9):
        optimizer.zero_grad()
        ddp(batch(rank, step, width=8), rank % 2).square().mean().backward()
        optimizer.step()
    wire.finalize()
    return flat_parameters(ddp.module)


@pytest.mark.parametrize("state", ["local", "mean", "reset"])
def test_ranks_whose_unused_parameters_differ_neither_hang_nor_drift(state: OptimizerState) -> None:
    results = run_ranks(unused, 2, DiLoCo(2, optimizer_state=state, program=Int8()))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], flat_parameters(Branches()))


def overflowing(rank: int, world_size: int, policy: Averaging) -> tuple[torch.Tensor, int]:
    """A GradScaler that skips steps on one rank alone, also steps after which models are averaged."""
    ddp = DDP(mlp(width=8, layers=3))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    wire = thinwire.attach(ddp, policy, optimizer=optimizer)
    skipped = 0
    for step in range(12):
        optimizer.zero_grad()
        scaler.scale(loss(ddp, rank, step)).backward()
        if (rank, step) in ((1, 3), (1, 4), (0, 6), (1, 11)):
            next(ddp.parameters()).grad[0, 0] = torch.inf  # type: ignore[index]
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < before
        scheduler.step()
    wire.finalize()
    return flat_parameters(ddp.module), skipped


@pytest.mark.filterwarnings("ignore:Detected call")
@pytest.mark.parametrize("policy", [LocalSGD(4), DiLoCo(4, fragments=2, overlap=1, program=Int4())])
def test_steps_that_one_rank_skips_are_counted_by_all(policy: Averaging) -> None:
    (one, skipped_0), (other, skipped_1) = run_ranks(overflowing, 2, policy)
    assert (skipped_0, skipped_1) == (1, 3)
    assert torch.equal(one, other)
    assert one.isfinite().all()


def in_place(rank: int, world_size: int) -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 16, 2))
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    ddp = DDP(module)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    wire = thinwire.attach(ddp, DiLoCo(2), optimizer=optimizer)
    where = [(p.data_ptr(), p.stride()) for p in ddp.parameters()]
    for step in range(4):
        optimizer.zero_grad()
        x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        ddp(x).square().mean().backward()
        optimizer.step()
    wire.finalize()
    assert [(p.data_ptr(), p.stride()) for p in ddp.parameters()] == where
    _ = copy.deepcopy(ddp.module)  # hooks are the wire's, the module stays a plain one


def states_of_optimizers(rank: int, world_size: int) -> None:
    for how in ("local", "mean", "reset"):
        ddp = DDP(mlp(width=8, layers=3))
        bodies, heads = list(ddp.module.children())[:-2], list(ddp.module.children())[-2:]
        optimizers = [
            torch.optim.AdamW(nn.Sequential(*modules).parameters(), lr=0.01) for modules in (bodies, heads)
        ]
        wire = thinwire.attach(ddp, LocalSGD(3, optimizer_state=how), optimizer=optimizers)
        for step in range(6):
            loss(ddp, rank, step).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        moments = [
            optimizer.state[p]["exp_avg"]
            for optimizer in optimizers
            for group in optimizer.param_groups
            for p in group["params"]
            if p in optimizer.state
        ]
        assert len(moments) == (0 if how == "reset" else 6)
        for moment in moments:
            both = [torch.zeros_like(moment) for _ in range(world_size)]
            dist.all_gather(both, moment)
            assert torch.equal(both[0], both[1]) == (how == "mean")
        assert wire.stats().records[-1].purpose == "models"


def diverged(rank: int, world_size: int) -> None:
    ddp, optimizer, _ = train(rank, DiLoCo(4), steps=3)
    if rank == 1:
        next(ddp.parameters()).data[0] = torch.nan
    before = flat_parameters(ddp.module)
    with pytest.raises(
        thinwire.DivergedError, match=r"after step 4 the ranks' average of '0.weight' is not finite"
    ):
        optimizer.step()
    assert rank == 1 or flat_parameters(ddp.module).isfinite().all()
    assert len(before) == len(flat_parameters(ddp.module))


def swapped(rank: int, world_size: int) -> None:
    """Exact, compressed, local, streaming and back, in one run; models are one after each swap."""
    ddp, optimizer, wire = train(rank, Exact(), steps=2)
    for policy in (Int8(), LocalSGD(3), DiLoCo(4, fragments=2, overlap=1), Exact()):
        wire.swap(policy)
        for step in range(5):
            optimizer.zero_grad()
            loss(ddp, rank, step).backward()
            optimizer.step()
    assert wire.program == Exact()
    both = [torch.zeros_like(flat_parameters(ddp.module)) for _ in range(world_size)]
    dist.all_gather(both, flat_parameters(ddp.module))
    assert torch.equal(both[0], both[1])


def refused(rank: int, world_size: int) -> None:
    ddp = DDP(mlp(width=8, layers=3))
    foreign = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "averages models after the optimizer's steps: pass it"),
        ({"optimizer": foreign}, "optimizer=SGD holds none of the model's parameters"),
        ({"optimizer": ddp}, "must be a torch.optim.Optimizer"),
    ]
    for options, said in cases:
        with pytest.raises(thinwire.OptionError, match=said):
            thinwire.attach(ddp, LocalSGD(4), **options)
    wire = thinwire.attach(ddp, Exact())
    with pytest.raises(thinwire.OptionError, match="pass it, as in"):
        wire.swap(LocalSGD(4))


def frozen(rank: int, world_size: int) -> None:
    """What does not train is not sent."""
    model = mlp(width=8, layers=3)
    for parameter in list(model.parameters())[:4]:
        parameter.requires_grad_(False)
    ddp = DDP(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with pytest.raises(thinwire.OptionError, match="fragments=3 exceeds the model's 2 parameters that train"):
        thinwire.attach(ddp, DiLoCo(4, fragments=3), optimizer=optimizer)
    wire = thinwire.attach(ddp, LocalSGD(1), optimizer=optimizer)
    loss(ddp, rank, 0).backward()
    optimizer.step()
    assert wire.stats().bytes_sent == 4 * (8 * 8 + 8) + 8, "and 8 bytes that say which exchange it is"


def documented(rank: int, world_size: int) -> None:
    """The example of docs/averaging.md."""
    page = (Path(__file__).parents[3] / "docs" / "averaging.md").read_text()
    names: dict[str, Any] = {}
    exec(page.partition("```python\n")[2].partition("```")[0], names)
    batches = [batch(rank, step, width=8) for step in range(20)]
    sent = names["train"](mlp(width=8, layers=3), batches, lambda model, x: model(x).square().mean())
    assert 0 < sent < 2 * 2 * 4 * 216, "an average and a half in place of 20 exchanges"


def exchanges(wire: Any) -> int:
    return sum(record.purpose == "models" for record in wire.stats().records)


def closures_and_accumulation(rank: int, world_size: int) -> None:
    """Backward passes are not what is counted: LBFGS runs many in a step, micro-batches under no_sync too."""
    ddp = DDP(mlp(width=8, layers=3))
    optimizer = torch.optim.LBFGS(ddp.parameters(), lr=0.1, max_iter=2 + rank)
    wire = thinwire.attach(ddp, LocalSGD(2), optimizer=optimizer)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        result = loss(ddp, rank, 0)
        result.backward()
        return result

    for _ in range(4):
        optimizer.step(closure)
    assert exchanges(wire) == 2

    ddp = DDP(mlp(width=8, layers=3))
    plain = torch.optim.SGD(ddp.parameters(), lr=0.1)
    wire = thinwire.attach(ddp, LocalSGD(3), optimizer=plain)
    for step in range(12):
        plain.zero_grad()
        with ddp.no_sync():
            loss(ddp, rank, step).backward()
        loss(ddp, rank, step).backward()
        plain.step()
    assert exchanges(wire) == 4

    for as_view in (False, True):  # without no_sync each micro-batch counts, and the user is told
        ddp = DDP(mlp(width=8, layers=3), gradient_as_bucket_view=as_view)
        plain = torch.optim.SGD(ddp.parameters(), lr=0.1)
        wire = thinwire.attach(ddp, LocalSGD(4), optimizer=plain)
        with pytest.warns(UserWarning, match="several backward passes"):  # noqa: PT031
            for step in range(8):
                loss(ddp, rank, step).backward()
                if step % 2:
                    plain.step()
                    plain.zero_grad()
        assert exchanges(wire) == 2


def several(rank: int, world_size: int) -> None:
    closures_and_accumulation(rank, world_size)
    frozen(rank, world_size)
    documented(rank, world_size)
    in_place(rank, world_size)
    states_of_optimizers(rank, world_size)
    diverged(rank, world_size)
    swapped(rank, world_size)
    refused(rank, world_size)


def test_in_place_optimizer_states_divergence_swaps_and_refusals() -> None:
    assert run_ranks(several, 2) == [None, None]


def bereft(rank: int, world_size: int) -> str:
    ddp, optimizer, _ = train(rank, DiLoCo(2, overlap=1, program=Int8()), steps=2)
    if rank == 1:
        os._exit(3)
    try:
        for step in range(4):
            loss(ddp, rank, step).backward()
            optimizer.step()
    except thinwire.WireError as error:
        return str(error)
    return "nothing"


def test_a_rank_that_dies_is_named_and_nobody_hangs() -> None:
    told, _ = run_ranks(bereft, 2, dies=[1], group_timeout=6)
    assert "Rank 1 did not respond" in told
