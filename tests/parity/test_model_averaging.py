"""The same numbers, bit for bit, as torch's model averaging and post-local SGD over whole training runs."""

import warnings
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as torch_hook
from torch.distributed.algorithms.model_averaging import averagers as torch_averagers
from torch.distributed.algorithms.model_averaging import hierarchical_model_averager as torch_hierarchical
from torch.distributed.algorithms.model_averaging import utils as torch_utils
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.harness import run_ranks
from tests.models import batch, flat_parameters, mlp
from thinwire.ddp_comm_hooks import post_localSGD_hook as our_hook
from thinwire.model_averaging import averagers as our_averagers
from thinwire.model_averaging import hierarchical_model_averager as our_hierarchical
from thinwire.model_averaging import utils as our_utils
from thinwire.optim import PostLocalSGDOptimizer as OurOptimizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its neighbours compile with what torch itself has deprecated
    from torch.distributed.optim import PostLocalSGDOptimizer as TorchOptimizer

STEPS = 52
WARM_UP = 5


@dataclass(frozen=True)
class Kit:
    """All the names, of one of the two packages."""

    averagers: Any
    hierarchical: Any
    hook: Any
    optimizer: Any
    utils: Any


OURS = Kit(our_averagers, our_hierarchical, our_hook, OurOptimizer, our_utils)
TORCHS = Kit(torch_averagers, torch_hierarchical, torch_hook, TorchOptimizer, torch_utils)


def periodic(kit: Kit, rank: int, period: int = 4, warm_up: int = WARM_UP) -> torch.Tensor:
    return alone(kit.averagers.PeriodicModelAverager(period, warmup_steps=warm_up), rank)


def hierarchical(kit: Kit, rank: int, levels: dict[int, int], warm_up: int = WARM_UP) -> torch.Tensor:
    averager = kit.hierarchical.HierarchicalModelAverager(OrderedDict(levels), warmup_steps=warm_up)
    assert list(averager.period_process_group_dict) == averager._periods == list(levels)
    return alone(averager, rank)


def alone(averager: Any, rank: int) -> torch.Tensor:
    """Ranks that share nothing but what the averager averages: parameters after every step."""
    model = mlp(layers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    history = []
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
        averager.average_parameters(model.parameters() if step % 2 else optimizer.param_groups)
        history.append(flat_parameters(model))
    assert averager.step == STEPS
    return torch.stack(history)


def post_local(kit: Kit, rank: int, subgroup: dist.ProcessGroup, allreduce: bool) -> torch.Tensor:
    """Hook, averager and optimizer together, with a checkpoint half-way."""
    ddp = DDP(mlp(layers=3), bucket_cap_mb=0.004)
    state = kit.hook.PostLocalSGDState(None, subgroup, WARM_UP, post_local_gradient_allreduce=allreduce)
    ddp.register_comm_hook(state, kit.hook.post_localSGD_hook)

    def optimizer() -> Any:
        inner = torch.optim.Adam(ddp.parameters(), lr=0.01)
        return kit.optimizer(inner, kit.averagers.PeriodicModelAverager(4, warmup_steps=WARM_UP))

    outer, history = optimizer(), []
    for step in range(STEPS):
        if step == STEPS // 2:
            saved = outer.state_dict()
            assert saved["step"] == step
            outer = optimizer()
            outer.load_state_dict(saved)
        outer.zero_grad()
        ddp(batch(rank, step)).square().mean().backward()
        outer.step()
        history.append(flat_parameters(ddp.module))
    assert state.iter == WARM_UP
    return torch.stack(history)


def mixed(kit: Kit, rank: int) -> torch.Tensor:
    """Parameters of several dtypes travel together, and come back as what they were."""
    torch.manual_seed(rank)
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float16]
    parameters = [torch.nn.Parameter(torch.randn(5, 3).to(dtype)) for dtype in dtypes]
    kit.utils.average_parameters(iter(parameters), None)
    assert [parameter.dtype for parameter in parameters] == dtypes
    return torch.cat([parameter.detach().double().flatten() for parameter in parameters])[None]


def levels_of(kit: Kit, rank: int, levels: dict[int, int]) -> torch.Tensor:
    """Who averages with whom, and at which step."""
    averager = kit.hierarchical.HierarchicalModelAverager(OrderedDict(levels))
    rows = []
    for averager.step in range(16):
        group = averager._find_process_group()
        ranks = dist.get_process_group_ranks(group) if group is not None else []
        assert not ranks or dist.get_group_rank(group, rank) == ranks.index(rank)
        rows.append(torch.tensor(sum(1 << each for each in ranks)))
    return torch.stack(rows)


def both(rank: int, world_size: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    subgroup, _ = dist.new_subgroups(group_size=world_size // 2)
    cases: dict[str, tuple[Any, ...]] = {
        "mixed dtypes": (mixed,),
        "periodic": (periodic,),
        "periodic without warm-up": (periodic, 3, 0),
        "two levels": (hierarchical, {2: world_size // 2, 4: world_size}),
        "two levels without warm-up": (hierarchical, {3: world_size // 2, 7: world_size}, 0),
        "post-local SGD": (post_local, subgroup, True),
        "post-local SGD with local gradients": (post_local, subgroup, False),
    }
    if world_size == 4:
        cases["three levels"] = (hierarchical, {2: 1, 4: 2, 8: 4})
        cases["levels"] = (levels_of, {2: 1, 4: 2, 8: 4})
        cases["levels of one size"] = (levels_of, {2: 2, 4: 4, 8: 4})
        cases["inner levels of one size"] = (levels_of, {2: 2, 4: 2, 8: 4})
        cases["three levels, two of one size"] = (hierarchical, {2: 2, 4: 4, 8: 4})
    return {
        name: (case(OURS, rank, *options), case(TORCHS, rank, *options))
        for name, (case, *options) in cases.items()
    }


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_training_runs_are_equal(world_size: int) -> None:
    by_rank = run_ranks(both, world_size)
    for rank, results in enumerate(by_rank):
        for name, (ours, theirs) in results.items():
            differing = [step for step, pair in enumerate(zip(ours, theirs, strict=True)) if not equal(*pair)]
            assert not differing, f"{name}: rank {rank} differs from torch's first after step {differing[0]}"
    for name in by_rank[0]:
        together = [
            all(equal(results[name][0][step], by_rank[0][name][0][step]) for results in by_rank)
            for step in range(len(by_rank[0][name][0]))
        ]
        assert any(together), f"{name}: ranks were never averaged"
        assert name == "mixed dtypes" or not all(together), f"{name}: ranks never drifted"


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one, other)
