"""Residuals on real ranks: no change of programs or strategies loses one, and one rank compresses nothing."""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.harness import run_ranks
from tests.models import own
from thinwire import (
    BF16,
    AcrossNodes,
    DiLoCo,
    Exact,
    Hierarchical,
    Int2,
    Int4,
    LocalSGD,
    PowerSGD,
    SparseLoCo,
    TopK,
    Warmup,
)

SHAPES = {"w": (18, 10), "small": (3, 5), "b": (7,)}
PLAIN_SUM = partial(torch.optim.SGD, lr=1.0)
"""An outer optimizer that applies mean pseudo-gradients as they are."""
STAGES: dict[str, Any] = {
    "exact": Exact(),
    "bf16": BF16(),
    "int2": Int2(),
    "topk": TopK(1 / 16),
    "low rank": PowerSGD(rank=2, min_compression=1.5, warmup=0),
    "nodes": AcrossNodes(Int4(), node_size=2),
    "warm-up": Warmup(Int4(), steps=1000),
    "local": LocalSGD(period=2),
    "groups": Hierarchical({1: 2, 3: None}, within=2, gradients=Int4()),
    "diloco": DiLoCo(period=2, program=Int4(), outer=PLAIN_SUM),
    "diloco across nodes": DiLoCo(
        period=1, program=AcrossNodes(Int2(), node_size=2), outer=PLAIN_SUM, warmup_steps=1, gradients=Int4()
    ),
    "sparse": SparseLoCo(period=2, keep=1.0, outer=PLAIN_SUM),
}


class CoderInput(nn.Module):
    """A linear model, whose gradients are the numbers that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.small, self.b = (nn.Parameter(torch.zeros(shape)) for shape in SHAPES.values())

    def forward(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        terms = (getattr(self, name) * one for name, one in gradients.items())
        return sum((term.sum() for term in terms), torch.zeros(()))


def gradients(rank: int, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def mean_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size()


class Job:
    """Plain SGD with lr 1 from zero, so that parameters are the negated sum of all that was applied."""

    def __init__(self, rank: int, program: Any, **options: Any) -> None:
        self.rank, self.step = rank, 0
        self.ddp = DDP(CoderInput(), **options.pop("ddp", {}))
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=1.0)
        self.wire = thinwire.attach(self.ddp, program, optimizer=self.optimizer, **options)
        self.exact = torch.zeros(sum(torch.Size(shape).numel() for shape in SHAPES.values()))

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            given = gradients(self.rank, self.step)
            self.optimizer.zero_grad()
            self.ddp(given).backward()
            self.optimizer.step()
            self.step += 1
            self.exact += mean_over_ranks(torch.cat([one.flatten() for one in given.values()]))

    def applied(self) -> torch.Tensor:
        """The mean over ranks of all that was applied, which their models differ in while they are local."""
        return mean_over_ranks(-torch.cat([one.detach().flatten() for one in self.ddp.module.parameters()]))

    def memory(self) -> dict[str, dict[str, torch.Tensor]]:
        memory: dict[str, dict[str, torch.Tensor]] = own(self.wire.state_dict())["memory"]
        return memory

    def residual(self) -> torch.Tensor:
        """The mean over ranks of all residuals, as parts of their parameters."""
        total = {name: torch.zeros(torch.Size(shape).numel()) for name, shape in SHAPES.items()}
        for name, key, tensor in self.residuals():
            start, weight = 0, 1
            for scope in (one for one in key.split(": ") if one.startswith("slice")):
                _, place, _, count = scope.split()
                start, weight = int(place) * tensor.numel(), int(count)
            numbers = tensor.flatten()[: total[name].numel() - start]
            total[name][start : start + numbers.numel()] += weight * numbers
        return mean_over_ranks(torch.cat(list(total.values())))

    def residuals(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        for name, slots in self.memory().items():
            for key, tensor in slots.items():
                if key.endswith("residual"):
                    yield name, key, tensor

    def leftovers(self) -> list[str]:
        return [key for _, key, _ in self.residuals() if "leftover" in key]


def all_pairs(names: list[str]) -> list[str]:
    """A walk through all ordered pairs of names, each once."""
    ways = {name: [other for other in names if other != name] for name in names}
    path, walk = [names[0]], []
    while path:
        if ways[path[-1]]:
            path.append(ways[path[-1]].pop())
        else:
            walk.append(path.pop())
    return walk[::-1]


def through_all_pairs(rank: int, world_size: int, names: list[str]) -> list[str]:
    """Swap through all pairs of stages; name the pairs after which something was lost."""
    walk = all_pairs(names)
    job = Job(rank, STAGES[walk[0]])
    job.train(3)
    lossy = []
    for before, after in pairwise(walk):
        accounted = job.applied() + job.residual() - job.exact
        job.wire.swap(STAGES[after])
        for _ in range(3):
            job.train()
            lost = (job.applied() + job.residual() - job.exact - accounted).norm() / job.exact.norm()
            if lost > (1e-2 if after == "bf16" else 1e-4):
                lossy.append(f"{before} -> {after}: {lost:.1%}")
        if job.leftovers():
            lossy.append(f"{before} -> {after}: not applied")
    job.wire.disable()
    job.train()
    assert not list(job.residuals())
    return lossy


def by_any_change(rank: int, world_size: int, how: str, before: Any, after: Any) -> list[float]:
    """Shares of the summed mean: in residuals after 40 steps, and lost after one with the next program."""
    given: Any = before
    options: dict[str, Any] = {}
    if how == "schedule":
        given = thinwire.Schedule({0: before, 40: after})
    elif how == "audit":
        options = {"audit_every": 40, "max_error": 1e-9, "on_excess": after}
    elif how == "auto":
        given = thinwire.Auto(program=before, candidates=(before,), check_after=40)
    job = Job(rank, given, **options)
    if how == "auto":
        job.wire._runner.strategy._baseline = 0.0  # type: ignore[attr-defined] # so that nothing pays
    job.train(40)
    waiting = job.residual().norm() / job.exact.norm()
    if how == "swap":
        job.wire.swap(after)
    elif how == "disable":
        job.wire.disable()
    job.train()
    assert job.wire.program == (
        thinwire.Auto(program=Exact(), candidates=(before,), check_after=40) if how == "auto" else after
    )
    assert not list(job.residuals())
    return [float(waiting), float((job.applied() - job.exact).norm() / job.exact.norm())]


@pytest.mark.parametrize("how", ["schedule", "swap", "disable", "audit", "auto"])
def test_the_first_exact_step_applies_the_residual(how: str) -> None:
    """Whatever ends TopK(1/64), which had lost a third of the summed mean otherwise."""
    for waiting, lost in run_ranks(by_any_change, 2, how, TopK(1 / 64), Exact()):
        assert waiting > 0.2
        assert lost < 1e-5


def test_the_first_step_in_16_bits_applies_the_residual() -> None:
    """Int2 had lost 1.7 % of the summed mean otherwise."""
    for waiting, lost in run_ranks(by_any_change, 2, "swap", Int2(), BF16()):
        assert waiting > 0.01
        assert lost < 0.002


def fallback_of_models(rank: int, world_size: int, fragments: int) -> None:
    """An audit ends the compression of models while another fragment is in flight."""
    diloco = DiLoCo(
        period=4, program=Int2(), outer=PLAIN_SUM, fragments=fragments, overlap=fragments - 1, mixing=0.0
    )
    job = Job(rank, diloco, audit_every=2, max_error=1e-9, on_excess=Exact())
    job.train(6)
    while job.wire.program == diloco:
        job.train()
    assert any("models: leftover: residual" in slots for slots in job.memory().values())
    job.train(8)
    assert not list(job.residuals())
    if fragments == 1:
        job.wire.finalize()
        torch.testing.assert_close(job.applied(), job.exact, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_fallback_of_averaged_models_applies_their_residuals(fragments: int) -> None:
    run_ranks(fallback_of_models, 2, fragments)


def waits_for_use(rank: int, world_size: int) -> None:
    """A parameter that no rank uses for some steps after the change keeps its leftover meanwhile."""
    job = Job(rank, Int2(), ddp={"find_unused_parameters": True})
    job.train(3)
    waiting = job.residual()
    job.wire.disable()
    size = torch.Size(SHAPES["w"]).numel()
    for step in range(2):
        job.optimizer.zero_grad()
        given = gradients(rank, 50 + step)
        job.ddp({"w": given["w"]}).backward()
        job.optimizer.step()
        job.exact[:size] += mean_over_ranks(given["w"].flatten())
        assert set(job.leftovers()) == {"leftover: residual"}
        torch.testing.assert_close(job.residual()[size:], waiting[size:])
        assert not job.residual()[:size].any()
    job.train()
    assert not list(job.residuals())
    torch.testing.assert_close(job.applied(), job.exact, atol=1e-4, rtol=1e-4)


def test_the_residual_of_an_unused_parameter_waits_for_its_use() -> None:
    run_ranks(waits_for_use, 2)


def scaled(rank: int, world_size: int) -> None:
    """The first scaled step after a change overflows. The leftover survives it, a save, and a new scale."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    job = Job(rank, Int2(), scaler=scaler)

    def train(steps: int, factor: float = 1.0) -> None:
        for _ in range(steps):
            given = gradients(rank, job.step)
            job.optimizer.zero_grad()
            scaler.scale(job.ddp(given) * factor).backward()
            scaler.step(job.optimizer)
            scaler.update()
            if factor == 1.0:
                job.step += 1
                job.exact.add_(mean_over_ranks(torch.cat([one.flatten() for one in given.values()])))

    train(5)
    job.wire.disable()
    train(1, factor=torch.inf if rank == 0 else 2.0)
    assert job.leftovers()
    train(1)
    assert not list(job.residuals())
    torch.testing.assert_close(job.applied(), job.exact, atol=1e-4, rtol=1e-4)


def test_a_leftover_survives_an_overflow_and_follows_the_loss_scale() -> None:
    run_ranks(scaled, 2)


def resumed_between(rank: int, world_size: int, after: str) -> None:
    """A state that was saved between the change and the next step contains the leftovers."""
    whole, second = Job(rank, TopK(1 / 16)), Job(rank, STAGES[after])
    whole.train(4)
    whole.wire.swap(STAGES[after])
    assert whole.leftovers()
    second.ddp.module.load_state_dict(whole.ddp.module.state_dict())
    second.wire.load_state_dict(whole.wire.state_dict())
    second.step, second.exact = whole.step, whole.exact.clone()
    for job in (whole, second):
        job.train(3)
    for one, other in zip(whole.ddp.module.parameters(), second.ddp.module.parameters(), strict=True):
        assert torch.equal(one, other)
    assert not second.leftovers()
    torch.testing.assert_close(second.applied() + second.residual(), second.exact, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("after", ["exact", "low rank", "local"])
def test_a_run_resumed_between_a_change_and_the_next_step_loses_nothing(after: str) -> None:
    run_ranks(resumed_between, 2, after)


def alone(rank: int, world_size: int, kind: str) -> None:
    programs: dict[str, Any] = {
        "int4": Int4(),
        "sign": thinwire.Sign(),
        "topk": TopK(),
        "low rank": PowerSGD(rank=1),
        "bf16": BF16(),
        "nodes": AcrossNodes(Int4(), node_size=world_size),
        "zero": thinwire.ZeRO(Int4()),
        "zero of low rank": thinwire.ZeRO(PowerSGD(rank=1)),
        "diloco": DiLoCo(period=1, program=Int4(), outer=PLAIN_SUM),
    }
    zero = kind.startswith("zero")
    job = Job(
        rank, programs[kind], **({} if zero else {"audit_every": 1, "max_error": 1e-6, "on_excess": "raise"})
    )
    job.train(3)
    assert not list(job.residuals())
    torch.testing.assert_close(job.applied(), job.exact, atol=1e-6, rtol=1e-6)
    stats = job.wire.stats()
    assert str(stats)
    assert job.wire.explain()
    if world_size == 1:
        assert stats.bytes_sent == 0
        assert all(audit.error == 0 for audit in job.wire.audits())


@pytest.mark.parametrize(
    "kind", ["int4", "sign", "topk", "low rank", "bf16", "nodes", "zero", "zero of low rank", "diloco"]
)
def test_one_rank_compresses_nothing(kind: str) -> None:
    run_ranks(alone, 1, kind)


def test_ranks_of_one_node_compress_nothing_across_nodes() -> None:
    run_ranks(alone, 2, "nodes")


def saved_by_two(rank: int, world_size: int, ended: bool) -> tuple[Any, ...]:
    job = Job(rank, Int2())
    job.train(4)
    if ended:
        job.wire.disable()
    return job.wire.state_dict(), job.ddp.module.state_dict(), job.exact


def loaded_by_one(rank: int, world_size: int, saved: list[tuple[Any, ...]], ended: bool) -> None:
    job = Job(rank, Exact() if ended else Int2())
    job.ddp.module.load_state_dict(saved[0][1])
    job.wire.load_state_dict([state for state, _, _ in saved])
    job.exact, job.step = saved[0][2].clone(), 4
    assert job.residual().norm() > 0.01 * job.exact.norm()
    job.train()
    assert not list(job.residuals())
    torch.testing.assert_close(job.applied(), job.exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("ended", [False, True])
def test_one_rank_applies_the_residuals_that_two_saved(ended: bool) -> None:
    """Those of a running program, and those of one that ended before the save."""
    run_ranks(loaded_by_one, 1, run_ranks(saved_by_two, 2, ended), ended)


GRADIENTS = ["exact", "bf16", "int2", "topk", "low rank", "nodes", "warm-up"]
AVERAGED = ["local", "groups", "diloco", "diloco across nodes", "sparse"]


@pytest.mark.parametrize(
    "names",
    [GRADIENTS, pytest.param(["int2", "nodes", *AVERAGED], marks=pytest.mark.slow)],
    ids=["gradients", "averaged"],
)
def test_no_swap_loses_a_residual(names: list[str]) -> None:
    assert run_ranks(through_all_pairs, 4, names) == [[]] * 4
