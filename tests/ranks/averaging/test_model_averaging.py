"""Model averaging and post-local SGD on real ranks: what fails with torch's own modules works here."""

import copy
import os
import pickle
from collections import OrderedDict
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager as TorchAverager
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.harness import run_ranks
from tests.models import batch, flat_gradients, mlp
from thinwire.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from thinwire.engine.comm.borrowed_group import run_blocking
from thinwire.engine.ops import AllReduce
from thinwire.errors import MismatchError, ProgramError, WireError
from thinwire.model_averaging.averagers import PeriodicModelAverager
from thinwire.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from thinwire.model_averaging.utils import average_parameters, average_parameters_or_parameter_groups
from thinwire.optim import PostLocalSGDOptimizer

WORLD: Any = None  # what torch's functions take for the whole world


def parameter(value: float, *, gradient: float | None = None) -> nn.Parameter:
    made = nn.Parameter(torch.full((3,), float(value)))
    made.grad = None if gradient is None else torch.full((3,), gradient)
    return made


# What is averaged, and how


def in_place(rank: int) -> None:
    image = torch.arange(24.0).view(2, 3, 2, 2).add(rank)
    convolution = nn.Parameter(image.to(memory_format=torch.channels_last))
    store = torch.full((10,), float(rank))
    view = nn.Parameter(store[2:7])
    half, number = (
        nn.Parameter(torch.full((3,), rank + 0.5).bfloat16()),
        nn.Parameter(torch.tensor(2.0 * rank)),
    )
    wave = nn.Parameter(torch.full((2,), complex(rank, 4 * rank)))
    parameters = [convolution, view, half, number, wave]
    before = [(each.data_ptr(), each.stride(), each.dtype, each._version) for each in parameters]

    average_parameters(iter(parameters), WORLD)

    for each, (pointer, stride, dtype, version) in zip(parameters, before, strict=True):
        assert (each.data_ptr(), each.stride(), each.dtype) == (pointer, stride, dtype)
        assert each._version > version, "autograd must see that it changed"
    assert convolution.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(convolution.detach(), torch.arange(24.0).view(2, 3, 2, 2) + 0.5)
    assert store.tolist() == [rank] * 2 + [0.5] * 5 + [rank] * 3
    assert half.tolist() == [1.0] * 3
    assert number.item() == 1.0
    assert wave.tolist() == [0.5 + 2j] * 2


def unused_parameters_differ(rank: int) -> None:
    """A gradient on one rank suffices; ranks without it contribute what they have."""
    mine, other, frozen = parameter(rank), parameter(10.0 * rank), parameter(rank)
    (mine if rank == 0 else other).grad = torch.ones(3)
    averager = PeriodicModelAverager(period=2)
    averager.average_parameters([mine, other, frozen])
    assert mine.tolist() == [0.5] * 3
    assert other.tolist() == [5.0] * 3
    assert frozen.tolist() == [rank] * 3, "no rank has a gradient for it"
    assert mine.grad is not None or rank == 1, "gradients are left alone"


def nothing_to_average(rank: int) -> None:
    idle = parameter(rank)
    average_parameters_or_parameter_groups([idle], WORLD)
    average_parameters_or_parameter_groups([], WORLD)
    average_parameters(iter([]), WORLD)
    assert idle.tolist() == [rank] * 3


def outside_the_group(rank: int) -> None:
    only_first: Any = dist.new_group([0])
    own = parameter(rank, gradient=1.0)
    average_parameters(iter([own]), only_first)
    averager = PeriodicModelAverager(2, process_group=only_first)
    averager.average_parameters([own])
    assert own.tolist() == [rank] * 3
    assert averager.step == 1


def three_levels(rank: int, world_size: int) -> tuple[int, list[list[int]], list[float]]:
    """Pairs average every 2 steps, all ranks every 4, and again every 8, after 10 steps without."""
    averager = HierarchicalModelAverager(OrderedDict([(2, 2), (4, 4), (8, world_size)]), warmup_steps=10)
    groups = [dist.get_process_group_ranks(one) for one in averager.period_process_group_dict.values()]
    seen = []
    for _ in range(25):
        one = parameter(rank, gradient=1.0)
        averager.average_parameters([one])
        seen.append(one[0].item())
    return dist.get_pg_count(), groups, seen


def test_a_hierarchy_of_three_levels_makes_and_uses_the_groups_that_torch_makes() -> None:
    for rank, (count, groups, seen) in enumerate(run_ranks(three_levels, 4)):
        first = rank - rank % 2
        assert count == 3, "the world, and both pairs, as torch.distributed counts them on every rank"
        assert groups == [[first, first + 1], [0, 1, 2, 3], [0, 1, 2, 3]]
        for step, value in enumerate(seen):
            pairs, all_ranks = step % 2 == 0, step % 4 == 0
            expected = 1.5 if all_ranks else first + 0.5 if pairs else rank
            assert value == (rank if step < 10 else expected), step


def hierarchies_differ(rank: int) -> None:
    with pytest.raises(
        MismatchError, match="ranks that average every 3 steps: nothing on rank 0, 1 on rank 1"
    ):
        HierarchicalModelAverager(OrderedDict([(2 + rank, 1), (4, 2)]))


def a_rank_does_not_come(rank: int) -> None:
    group: Any = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    if rank == 0:
        with pytest.raises(
            WireError, match=r"rank 0 waited \d\.\d s for AllReduce of 3 float32 among 2 ranks, and it"
        ):
            average_parameters(iter([parameter(1.0)]), group)
    dist.barrier()


def programs_on_a_borrowed_group(rank: int) -> None:
    def twice(among: tuple[int, ...] | None) -> Any:
        first = yield AllReduce(torch.tensor([1.0 + rank]))
        second = yield AllReduce(first.clone(), ranks=among)
        return second.item()

    world = dist.group.WORLD
    assert world is not None
    assert run_blocking(twice(None), world) == 6.0
    with pytest.raises(ProgramError, match="Run the program on a process group of those ranks"):
        run_blocking(twice((0, 1)), world)


def averaging(rank: int, world_size: int) -> int:
    checks = [
        in_place,
        unused_parameters_differ,
        nothing_to_average,
        outside_the_group,
        hierarchies_differ,
        programs_on_a_borrowed_group,
        a_rank_does_not_come,
    ]
    return sum(check(rank) is None for check in checks)


def test_averaging() -> None:
    assert run_ranks(averaging, 2) == [7, 7]


# The optimizer


def is_an_optimizer(rank: int) -> None:
    own, calls = parameter(rank), []
    inner = torch.optim.SGD([own], lr=0.5, momentum=0.9)
    outer = PostLocalSGDOptimizer(inner, PeriodicModelAverager(period=2))
    outer.register_step_pre_hook(lambda *_: calls.append("before"))
    outer.register_step_post_hook(lambda *_: calls.append("after"))
    outer.register_state_dict_post_hook(lambda _, saved: calls.append(f"saved {len(saved['state'])}"))

    def closure() -> torch.Tensor:
        outer.zero_grad()
        loss = own.sum()
        loss.backward()
        return loss

    assert outer.step(closure) == 3.0 * rank  # type: ignore[arg-type]
    assert calls == ["before", "after"]
    assert own.tolist() == [0.0] * 3, "a step of -0.5 from 0 and from 1, averaged"
    assert outer.defaults is inner.defaults
    assert outer.state is inner.state
    assert own in outer.state
    assert repr(outer) == repr(inner)
    assert outer.state_dict()["step"] == 1
    assert calls[2:] == ["saved 1"]
    outer.add_param_group({"params": [parameter(7.0)], "lr": 0.25})
    assert [group["lr"] for group in inner.param_groups] == [0.5, 0.25]
    outer.zero_grad()
    assert own.grad is None


def schedulers_go_on_after_loading(rank: int) -> None:
    own = parameter(rank, gradient=1.0)
    inner = torch.optim.SGD([own], lr=1.0)
    outer = PostLocalSGDOptimizer(inner, PeriodicModelAverager(period=4, warmup_steps=1))
    scheduler = torch.optim.lr_scheduler.StepLR(outer, step_size=1, gamma=0.5)
    outer.step()
    scheduler.step()
    outer.load_state_dict(outer.state_dict())
    inner.load_state_dict(inner.state_dict())
    assert outer.param_groups is inner.param_groups
    outer.step()
    scheduler.step()
    assert inner.param_groups[0]["lr"] == 0.25
    assert own.tolist() == [0.5 - 1.0 - 0.5] * 3
    bare = {key: value for key, value in outer.state_dict().items() if key != "step"}
    with pytest.warns(UserWarning, match='no "step"') as caught:
        outer.load_state_dict(bare)
    assert caught[0].filename == __file__
    assert outer.averager.step == 0


def overflow_on_one_rank(rank: int, fused: bool) -> None:
    """GradScaler leaves out the step of a rank whose gradients overflow; it must still average."""
    own = parameter(rank)
    inner = torch.optim.SGD([own], lr=1.0, fused=fused)
    outer = PostLocalSGDOptimizer(inner, PeriodicModelAverager(period=2))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaled: Any = scaler.scale(own.sum() * (float("inf") if rank == 0 else 1.0))
    scaled.backward()
    scaler.step(outer)
    scaler.update()
    assert own.tolist() == [0.0] * 3, "0, left as it was, and 1 - 1, averaged"
    assert scaler.get_scale() == (4.0 if rank == 0 else 8.0)
    outer.zero_grad()
    scaled = scaler.scale(own.sum())
    scaled.backward()
    scaler.unscale_(outer)
    scaler.step(outer)
    assert own.tolist() == [-1.0] * 3
    assert not hasattr(inner, "found_inf")


def takes_torchs_averager(rank: int) -> None:
    own = parameter(rank, gradient=0.0)
    outer = PostLocalSGDOptimizer(torch.optim.SGD([own], lr=1.0), TorchAverager(period=2))
    outer.step()
    assert own.tolist() == [0.5] * 3
    assert outer.averager.step == 1


def optimizing(rank: int, world_size: int) -> int:
    checks = [
        is_an_optimizer,
        schedulers_go_on_after_loading,
        partial(overflow_on_one_rank, fused=False),
        partial(overflow_on_one_rank, fused=True),
        takes_torchs_averager,
    ]
    return sum(check(rank) is None for check in checks)  # type: ignore[operator]


def test_optimizer() -> None:
    assert run_ranks(optimizing, 2) == [5, 5]


# The hook


def gradients(state: PostLocalSGDState, rank: int, steps: int, group: Any = None) -> list[torch.Tensor]:
    """What DDP holds after each step, several buckets a step."""
    ddp = DDP(mlp(layers=3), bucket_cap_mb=0.004, process_group=group)
    ddp.register_comm_hook(state, post_localSGD_hook)
    found = []
    for step in range(steps):
        ddp.zero_grad()
        ddp(batch(rank, step)).square().mean().backward()
        found.append(flat_gradients(ddp.module))
    return found


def local(rank: int, step: int) -> torch.Tensor:
    model = mlp(layers=3)
    model(batch(rank, step)).square().mean().backward()
    return flat_gradients(model)


def on_unequal_nodes(rank: int) -> None:
    mean = {
        ranks: [torch.stack([local(each, step) for each in ranks]).mean(0) for step in range(4)]
        for ranks in [(0, 1, 2), (0, 2), (1,)]
    }
    os.environ["GROUP_RANK"] = "17" if rank == 1 else "4"
    state = PostLocalSGDState(None, None, 2)
    found = gradients(state, rank, 4)
    node = (1,) if rank == 1 else (0, 2)
    for step, ranks in enumerate([(0, 1, 2), (0, 1, 2), node, node]):
        torch.testing.assert_close(found[step], mean[ranks][step], rtol=0, atol=1e-6)
    assert state.subgroup is None

    del os.environ["GROUP_RANK"]
    (found_on_host,) = gradients(PostLocalSGDState(None, None, 0), rank, 1)
    torch.testing.assert_close(found_on_host, mean[0, 1, 2][0], rtol=0, atol=1e-6)

    saved = pickle.dumps(state)
    state.process_group = state.subgroup = dist.group.WORLD
    for loaded in (pickle.loads(saved), copy.deepcopy(state)):
        assert (loaded.iter, loaded.start_localSGD_iter, loaded.post_local_gradient_allreduce) == (2, 2, True)
        assert loaded.process_group is loaded.subgroup is None


def on_ddps_own_group(rank: int) -> None:
    """process_group=None is not the world; and without all-reduce, nothing is sent at all."""
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    group = groups[rank // 2]
    before, after = gradients(PostLocalSGDState(None, None, 1, False), rank, 2, group)
    own = [local(each, 0) for each in range(3)]
    torch.testing.assert_close(before, (own[0] + own[1]) / 2 if rank < 2 else own[2], rtol=0, atol=1e-6)
    assert torch.equal(after, local(rank, 1))


def hooked(rank: int, world_size: int) -> int:
    return sum(check(rank) is None for check in [on_unequal_nodes, on_ddps_own_group])


def test_hook() -> None:
    assert run_ranks(hooked, 3) == [2, 2, 2]
