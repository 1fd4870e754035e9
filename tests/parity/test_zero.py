"""The same numbers, bit for bit, as torch's ZeroRedundancyOptimizer over whole training runs."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.harness import run_ranks
from tests.models import batch, flat_parameters, mlp
from thinwire.optim import ZeroRedundancyOptimizer as Ours

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its neighbours compile with what torch itself has deprecated
    from torch.distributed.optim import ZeroRedundancyOptimizer as Torchs

STEPS = 52
WIDTH = 12
FEW = ("SGD", "Adam in views")
"""The cases that run with any number of ranks."""


def model_and_groups() -> tuple[DDP, list[dict[str, Any]]]:
    """Layers of unequal sizes, one frozen, in groups with options of their own."""
    torch.manual_seed(7)
    layers = [nn.Linear(WIDTH, 20), nn.Tanh(), nn.Linear(20, 9), nn.Tanh(), nn.Linear(9, WIDTH)]
    model = nn.Sequential(*layers)
    model[2].bias.requires_grad_(False)
    groups: list[dict[str, Any]] = [
        {"params": [model[0].weight, model[0].bias], "lr": 0.02},
        {"params": list(model[2].parameters()), "weight_decay": 0.01},
        {"params": list(model[4].parameters())},
    ]
    return DDP(model), groups


def takes_new_groups(optimizer_class: Any) -> bool:
    """Whether torch's optimizer can step a group that was added later; up to 2.9 Adagrad raises KeyError."""
    first, added = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizer = optimizer_class([first], lr=0.1)
    optimizer.add_param_group({"params": [added]})
    added.grad = torch.ones(1)
    try:
        optimizer.step()
    except KeyError:
        assert optimizer_class is torch.optim.Adagrad, optimizer_class
        return False
    return True


def trained(kit: Any, rank: int, optimizer_class: Any, views: bool, **options: Any) -> tuple[Any, Any]:
    """Parameters after every step, with a scheduler, a group added on the way, and the state at the end."""
    ddp, groups = model_and_groups()
    grows = takes_new_groups(optimizer_class)
    zero = kit(groups[:2] if grows else groups, optimizer_class, parameters_as_bucket_view=views, **options)
    schedule = torch.optim.lr_scheduler.StepLR(zero, step_size=7, gamma=0.8)
    history, losses = [], []
    for step in range(STEPS):
        if step == 5 and grows:
            zero.add_param_group(groups[2])
            schedule.base_lrs.append(options["lr"])

        def closure(step: int = step) -> torch.Tensor:
            zero.zero_grad()
            loss: torch.Tensor = (ddp(batch(rank, step, WIDTH)) - 0.1 * rank).square().mean()
            loss.backward()
            return loss

        losses.append(zero.step(closure).detach())
        schedule.step()
        history.append(flat_parameters(ddp.module))
    assert [group["lr"] for group in zero.optim.param_groups] != [options["lr"]] * 3
    owners = torch.tensor([float(zero._param_to_rank[each]) for each in zero._index_to_param])
    own = [[len(group["params"]) for group in part] for part in zero._partition_parameters()]
    zero.consolidate_state_dict(to=zero.world_size - 1)
    state = zero.state_dict() if rank == zero.world_size - 1 else None
    return torch.stack(history), {"state": state, "owners": owners, "own": own, "losses": losses}


def uneven(kit: Any, rank: int) -> tuple[Any, Any]:
    """Ranks have different numbers of batches, and `Join` shadows DDP's and the optimizer's collectives."""
    ddp = DDP(mlp(WIDTH, layers=2))
    zero = kit(ddp.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
    history = []
    with Join([ddp, zero]):
        for step in range(4 + 2 * rank):
            zero.zero_grad()
            ddp(batch(rank, step, WIDTH)).square().mean().backward()
            zero.step()
            history.append(flat_parameters(ddp.module))
    history.append(flat_parameters(ddp.module))
    return torch.stack(history), {}


def both(rank: int, world_size: int) -> dict[str, tuple[Any, Any]]:
    sgd = {"lr": 0.05, "momentum": 0.9, "nesterov": True}
    cases: dict[str, tuple[Any, ...]] = {
        "SGD": (torch.optim.SGD, False, sgd),
        "SGD in views": (torch.optim.SGD, True, sgd),
        "AdamW": (torch.optim.AdamW, False, {"lr": 0.01, "foreach": True}),
        "Adam in views": (torch.optim.Adam, True, {"lr": 0.01, "amsgrad": True, "fused": True}),
        "RMSprop": (torch.optim.RMSprop, False, {"lr": 0.01, "centered": True}),
        "Adagrad": (torch.optim.Adagrad, False, {"lr": 0.01}),
    }
    results: dict[str, tuple[Any, Any]] = {
        name: (trained(Ours, rank, kind, views, **options), trained(Torchs, rank, kind, views, **options))
        for name, (kind, views, options) in cases.items()
        if world_size == 2 or name in FEW
    }
    if world_size > 1:
        results["uneven"] = uneven(Ours, rank), uneven(Torchs, rank)
    return results


SLOW = pytest.mark.slow


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=SLOW), pytest.param(4, marks=SLOW)])
def test_training_runs_are_equal(world_size: int) -> None:
    by_rank = run_ranks(both, world_size)
    for rank, results in enumerate(by_rank):
        for name, (ours, theirs) in results.items():
            differing = [
                step
                for step, pair in enumerate(zip(ours[0], theirs[0], strict=True))
                if not torch.equal(*pair)
            ]
            assert not differing, f"{name}: rank {rank} differs from torch's first after step {differing[0]}"
            assert not torch.equal(ours[0][0], ours[0][-1]), f"{name}: nothing was trained"
            assert_same(ours[1], theirs[1], f"{name}, rank {rank}")
    for name, (ours, _) in by_rank[0].items():
        assert all(torch.equal(ours[0][-1], results[name][0][0][-1]) for results in by_rank), name


def assert_same(one: Any, other: Any, where: str) -> None:
    """Equal types, keys and bits, all the way down; the order of keys is free."""
    assert type(one) is type(other), where
    if isinstance(one, dict):
        assert set(one) == set(other), where
        for key in one:
            assert_same(one[key], other[key], f"{where}, {key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for number, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{where}, {number}")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    else:
        assert one == other, where
