"""Averaging models on real ranks, against a plain computation of what it should come to."""

import os
from functools import partial
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
from thinwire.strategies.averaging.policy import Averaging

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


def diloco(
    world_size: int, period: int, rate: float = 0.8, kept: float = 0.5, overlap: int = 0, mixing: float = 0.0
) -> torch.Tensor:
    """One fragment, and SGD with Nesterov momentum as the outer optimizer, by default that of few ranks."""
    reference = Reference(world_size)
    anchor, momentum = reference.flat()[0], torch.zeros_like(reference.flat()[0])
    under_way: dict[int, torch.Tensor] = {}
    for step in range(1, STEPS + 1):
        reference.local_step(step - 1, grouped(world_size, 1))
        if step % period == 0:
            under_way[step + overlap] = anchor - reference.flat().mean(0)
        last = [under_way.pop(due) for due in list(under_way) if due == step or step == STEPS]
        for gradient in last:
            momentum = kept * momentum + gradient
            anchor = anchor - rate * (gradient + kept * momentum)
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
        compared = wire.stats().bytes_sent - before
        assert compared <= 8 * world_size, "ranks that hold one model compare their steps, no more"
        results.append(flat_parameters(ddp.module))
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_models_are_what_a_plain_computation_gives(world_size: int) -> None:
    two = min(2, world_size)
    papers = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
    rate, kept = 0.8, 1 - 1 / max(2, world_size**0.5)
    expected: list[tuple[Averaging, torch.Tensor]] = [
        (LocalSGD(4), local_sgd(world_size, 4)),
        (LocalSGD(3, warmup_steps=4, within=two), local_sgd(world_size, 3, 4, two)),
        (Hierarchical({2: two, 6: None}), hierarchical(world_size, {2: two, 6: world_size})),
        (DiLoCo(4), diloco(world_size, 4, rate, kept)),
        (DiLoCo(4, outer=papers), diloco(world_size, 4, 0.7, 0.9)),
        (DiLoCo(4, overlap=2, mixing=0.25), diloco(world_size, 4, rate, kept, overlap=2, mixing=0.25)),
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
    header = 8 * 3  # which exchange it is, to three ranks
    assert local == diloco_exact == 4 * (step + header)
    assert post_local == 4 * step + 3 * (step + header)
    diloco_exact, int8, int4 = diloco_exact - 4 * header, int8 - 4 * header, int4 - 8 * header
    # Biases as they are, and whole blocks for every parameter, weigh in so small a model.
    assert 0.25 < int8 / diloco_exact < 0.45
    assert 0.125 < int4 / diloco_exact < 0.5
    # Two of four ranks send 2/3 of what each of four does, six times; all of them, twice.
    assert levels == 6 * (step * 2 // 3 + 8) + 2 * (step + header)


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
