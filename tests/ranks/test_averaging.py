"""Averaging models on real ranks, against a plain computation of what it should come to."""

import copy
import os
from functools import partial
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
from thinwire import DiLoCo, Exact, Hierarchical, Int4, Int8, LocalSGD
from thinwire.averaging.policy import Averaging

PLAIN = partial(torch.optim.SGD, lr=1.0)
STEPS = 13


def train(rank: int, policy: Any, steps: int = STEPS, **options: Any) -> tuple[DDP, Any, Any]:
    ddp = DDP(mlp(width=8, layers=3), **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2, momentum=0.5)
    wire = thinwire.attach(ddp, policy, optimizer=optimizer)
    for step in range(steps):
        optimizer.zero_grad()
        loss(ddp, rank, step).backward()
        optimizer.step()
    return ddp, optimizer, wire


def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    result: torch.Tensor = model(batch(rank, step, width=8)).square().mean()
    return result


class Reference:
    """All ranks in one process, written down as the papers have it; one flat vector a rank."""

    def __init__(self, world_size: int) -> None:
        self.models = [mlp(width=8, layers=3) for _ in range(world_size)]
        self.optimizers = [torch.optim.SGD(one.parameters(), lr=0.2, momentum=0.5) for one in self.models]

    def local_step(self, step: int, groups: list[list[int]]) -> None:
        for rank, model in enumerate(self.models):
            model.zero_grad()
            loss(model, rank, step).backward()
        for ranks in groups:
            for same in zip(*(self.models[rank].parameters() for rank in ranks), strict=True):
                mean = torch.stack([one.grad for one in same if one.grad is not None]).mean(0)
                for one in same:
                    one.grad = mean.clone()
        for optimizer in self.optimizers:
            optimizer.step()

    def flat(self) -> torch.Tensor:
        return torch.stack([flat_parameters(model) for model in self.models])

    def put(self, rank: int, flat: torch.Tensor) -> None:
        nn.utils.vector_to_parameters(flat.clone(), self.models[rank].parameters())

    def average(self, groups: list[list[int]]) -> None:
        flat = self.flat()
        for ranks in groups:
            for rank in ranks:
                self.put(rank, flat[ranks].mean(0))


def grouped(world_size: int, size: int) -> list[list[int]]:
    return [list(range(first, min(first + size, world_size))) for first in range(0, world_size, size)]


def local_sgd(world_size: int, period: int, warmup: int = 0, within: int = 1) -> torch.Tensor:
    reference, everybody = Reference(world_size), grouped(world_size, world_size)
    for step in range(STEPS):
        reference.local_step(step, everybody if step < warmup else grouped(world_size, within))
        if step >= warmup and (step + 1 - warmup) % period == 0:
            reference.average(everybody)
    return reference.flat().mean(0)


def hierarchical(world_size: int, levels: dict[int, int]) -> torch.Tensor:
    reference = Reference(world_size)
    for step in range(STEPS):
        reference.local_step(step, grouped(world_size, 1))
        sizes = [size for period, size in levels.items() if (step + 1) % period == 0]
        if sizes:
            reference.average(grouped(world_size, sizes[-1]))
    return reference.flat().mean(0)


def diloco(world_size: int, period: int, overlap: int = 0, mixing: float = 0.0) -> torch.Tensor:
    """One fragment, and SGD with lr 0.7 and Nesterov momentum 0.9 as the outer optimizer."""
    reference = Reference(world_size)
    anchor, momentum = reference.flat()[0], torch.zeros_like(reference.flat()[0])
    under_way: dict[int, torch.Tensor] = {}
    for step in range(1, STEPS + 1):
        reference.local_step(step - 1, grouped(world_size, 1))
        if step % period == 0:
            under_way[step + overlap] = anchor - reference.flat().mean(0)
        last = [under_way.pop(due) for due in list(under_way) if due == step or step == STEPS]
        for gradient in last:
            momentum = 0.9 * momentum + gradient
            anchor = anchor - 0.7 * (gradient + 0.9 * momentum)
            for rank, own in enumerate(reference.flat()):
                reference.put(rank, mixing * own + (1 - mixing) * anchor)
    return reference.flat().mean(0)


def finals(rank: int, world_size: int, policies: list[Averaging]) -> list[torch.Tensor]:
    results = []
    for policy in policies:
        ddp, _, wire = train(rank, policy, bucket_cap_mb=0.0005)
        wire.finalize()
        before = wire.stats().bytes_sent
        wire.finalize()
        assert wire.stats().bytes_sent == before, "ranks that hold one model need not exchange it"
        results.append(flat_parameters(ddp.module))
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 7])
def test_models_are_what_a_plain_computation_gives(world_size: int) -> None:
    two = min(2, world_size)
    expected: list[tuple[Averaging, torch.Tensor]] = [
        (LocalSGD(4), local_sgd(world_size, 4)),
        (LocalSGD(3, warmup_steps=4, within=two), local_sgd(world_size, 3, 4, two)),
        (Hierarchical({2: two, 6: None}), hierarchical(world_size, {2: two, 6: world_size})),
        (DiLoCo(4), diloco(world_size, 4)),
        (DiLoCo(4, overlap=2, mixing=0.25), diloco(world_size, 4, overlap=2, mixing=0.25)),
    ]
    results = run_ranks(finals, world_size, [policy for policy, _ in expected])
    for index, (policy, reference) in enumerate(expected):
        for rank in range(world_size):
            assert torch.equal(results[rank][index], results[0][index]), f"rank {rank} differs: {policy}"
        torch.testing.assert_close(results[0][index], reference, rtol=1e-5, atol=1e-6, msg=str(policy))


def degenerate(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """Pairs of settings that should come to the same."""
    policies: dict[str, Any] = {
        "DDP": Exact(),
        "period 1": LocalSGD(1),
        "local": LocalSGD(4),
        "plain outer": DiLoCo(4, outer=PLAIN),
        "DiLoCo": DiLoCo(4, program=Int8()),
        "streaming": DiLoCo(4, program=Int8(), fragments=1, overlap=0, mixing=0),
        "one level": Hierarchical({4: None}),
    }
    results = {}
    for name, policy in policies.items():
        ddp = DDP(mlp(width=8, layers=3))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
        thinwire.attach(ddp, policy, optimizer=optimizer)
        for step in range(12):
            optimizer.zero_grad()
            loss(ddp, rank, step).backward()
            optimizer.step()
        results[name] = flat_parameters(ddp.module)
    return results


def test_degenerate_settings_equal_what_they_should() -> None:
    for results in run_ranks(degenerate, 3):
        torch.testing.assert_close(results["period 1"], results["DDP"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(results["plain outer"], results["local"], rtol=1e-5, atol=1e-6)
        assert torch.equal(results["streaming"], results["DiLoCo"])
        assert torch.equal(results["one level"], results["local"])
        assert not torch.equal(results["local"], results["DDP"])


def bytes_of(rank: int, world_size: int) -> list[int]:
    sent = []
    for policy in (
        Exact(),
        LocalSGD(4),
        LocalSGD(4, warmup_steps=4),
        DiLoCo(4),
        DiLoCo(4, program=Int8()),
        DiLoCo(4, fragments=2, program=Int4(), overlap=1),
        Hierarchical({2: 2, 8: None}),
    ):
        ddp, _, wire = train(rank, policy, steps=16)
        stats = wire.stats()
        assert stats.steps == 16
        purposes = {record.purpose for record in stats.records}
        assert purposes == ({"gradients", "models"} if ddp.module and policy != Exact() else {"gradients"})
        sent.append(stats.bytes_sent)
    return sent


def test_bytes_fall_by_the_period_and_by_the_codec() -> None:
    exact, local, post_local, diloco_exact, int8, int4, levels = run_ranks(bytes_of, 4)[0]
    step = exact // 16
    assert local == diloco_exact == 4 * step
    assert post_local == (4 + 3) * step
    assert 0.25 < int8 / diloco_exact < 0.32
    assert 0.125 < int4 / diloco_exact < 0.25, "scales weigh in so small a model"
    # Two of four ranks send 2/3 of what each of four does, six times; all of them, twice.
    assert levels == 6 * (step * 2 // 3) + 2 * step


def odd_groups(rank: int, world_size: int) -> list[torch.Tensor]:
    """Gradients within groups, given in every way there is; never averaged over all."""
    own, _ = dist.new_subgroups_by_enumeration([[0, 2], [1]])
    os.environ["GROUP_RANK"] = str(rank % 2)
    results = []
    for within in ([[0, 2], [1]], own, "node"):
        ddp, _, _ = train(rank, LocalSGD(100, within=within))
        results.append(flat_parameters(ddp.module))
    with pytest.raises(thinwire.OptionError, match=r"within=.* groups 2 ranks, and the model has 3"):
        train(rank, LocalSGD(100, within=[[0], [1]]))
    with pytest.raises(thinwire.MismatchError, match="which is not what those ranks gave"):
        train(rank, LocalSGD(100, within=dist.group.WORLD if rank else own))
    return results


def test_groups_by_lists_process_groups_and_nodes_are_the_same() -> None:
    results = run_ranks(odd_groups, 3)
    for listed, given, nodes in results:
        assert torch.equal(listed, given)
        assert torch.equal(listed, nodes)
    assert torch.equal(results[0][0], results[2][0])
    assert not torch.equal(results[0][0], results[1][0])


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x)
        return result


def normed(rank: int, world_size: int, buffers: str) -> tuple[list[torch.Tensor], float, float]:
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
def test_ranks_whose_unused_parameters_differ_neither_hang_nor_drift(state: str) -> None:
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
        ({}, "averages models after the optimizer's steps: give it"),
        ({"optimizer": foreign}, "optimizer=SGD holds none of the model's parameters"),
        ({"optimizer": ddp}, "must be a torch.optim.Optimizer"),
    ]
    for options, said in cases:
        with pytest.raises(thinwire.OptionError, match=said):
            thinwire.attach(ddp, LocalSGD(4), **options)
    wire = thinwire.attach(ddp, Exact())
    with pytest.raises(thinwire.OptionError, match="give it, as in"):
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
    assert wire.stats().bytes_sent == 4 * (8 * 8 + 8)


def documented(rank: int, world_size: int) -> None:
    """The example of docs/averaging.md."""
    page = (Path(__file__).parents[2] / "docs" / "averaging.md").read_text()
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
    assert "No word from rank 1" in told
