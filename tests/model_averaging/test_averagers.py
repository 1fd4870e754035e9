"""Bad input to the torch-named averaging, and its programs in simulation."""

import io
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist

from thinwire.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from thinwire.engine.simulate import simulate
from thinwire.errors import MismatchError, OptionError, StateError
from thinwire.model_averaging.averagers import ModelAverager, PeriodicModelAverager
from thinwire.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from thinwire.model_averaging.utils import (
    average,
    average_parameters,
    average_parameters_or_parameter_groups,
    average_used,
    get_params_to_average,
)
from thinwire.optim import PostLocalSGDOptimizer


def hierarchy(*levels: tuple[Any, Any]) -> HierarchicalModelAverager:
    return HierarchicalModelAverager(OrderedDict(levels))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("period", [0, -1, 2.5, True, "4", None])
def test_periods_that_are_none(period: Any) -> None:
    with pytest.raises(ValueError, match=r"period=.* must be a whole number, at least 1.*try 4"):
        PeriodicModelAverager(period)
    with pytest.raises(OptionError, match=r"period of period_group_size_dict=.* must be a whole number"):
        hierarchy((period, 1))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("warmup_steps", [-1, 0.5, False, None])
def test_warm_ups_that_are_none(warmup_steps: Any) -> None:
    with pytest.raises(ValueError, match=r"warmup_steps=.* must be a whole number, at least 0"):
        PeriodicModelAverager(2, warmup_steps)
    with pytest.raises(ValueError, match=r"warmup_steps=.* must be a whole number, at least 0"):
        HierarchicalModelAverager({2: 1}, warmup_steps)


@pytest.mark.usefixtures("alone")
def test_period_1_warns_the_caller() -> None:
    with pytest.warns(UserWarning, match="period=1 .* DistributedDataParallel") as caught:
        PeriodicModelAverager(1)
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match="no period but 1.* DistributedDataParallel") as caught:
        HierarchicalModelAverager({1: 1})
    assert caught[0].filename == __file__


REFUSED: list[tuple[Any, str]] = [
    (None, "must map periods to group sizes"),
    ({}, "must map periods to group sizes"),
    ([(4, 8)], "must map periods to group sizes"),
    ({4: 4}, "ends in groups of 4, but process_group has 8 ranks"),
    ({4: 16}, "ends in groups of 16, but process_group has 8 ranks"),
    ({2: 3, 4: 8}, "groups of 3, which do not divide the 8 ranks"),
    ({2: 16, 4: 8}, "groups of 16, which do not divide the 8 ranks"),
    ({2: 0, 4: 8}, "size of period_group_size_dict=0 must be a whole number, at least 1"),
    ({2: 2.0, 4: 8}, "size of period_group_size_dict=2.0 must be a whole number"),
    ({4: 2, 2: 8}, "must rise"),
    ({2: 4, 3: 2, 4: 8}, "must rise"),
]


@pytest.mark.parametrize(("levels", "reason"), REFUSED, ids=[str(levels) for levels, _ in REFUSED])
def test_hierarchies_that_are_none(levels: Any, reason: str) -> None:
    kind: Any = dist.ProcessGroup
    with pytest.raises(ValueError, match=reason):
        HierarchicalModelAverager(levels, process_group=kind(0, 8))


def test_groups_that_are_none() -> None:
    with pytest.raises(OptionError, match="and there is none yet: call"):
        PeriodicModelAverager(2)
    no_group: Any = "world"
    with pytest.raises(OptionError, match="process_group='world' must be a"):
        average_parameters(iter([]), no_group)
    stranger: Any = dist.GroupMember.NON_GROUP_MEMBER
    with pytest.raises(OptionError, match="one that this rank is not in"):
        HierarchicalModelAverager({2: 2}, process_group=stranger)


def test_averager_is_abstract() -> None:
    abstract: Any = ModelAverager
    with pytest.raises(TypeError, match="average_parameters"):
        abstract()


@pytest.mark.usefixtures("alone")
def test_params() -> None:
    used, unused = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    used.grad = torch.ones(2)
    group: Any = {"params": [used, unused], "lr": 1}
    for params in ([used, unused], [group], iter([unused, used]), [group, {"params": []}]):
        assert [each is used for each in get_params_to_average(params)] == [True]
    wrong: Any = [torch.ones(2)]
    with pytest.raises(NotImplementedError, match="params has a Tensor in it: pass"):
        get_params_to_average(wrong)
    world: Any = None
    with pytest.raises(OptionError, match="params has a Tensor in it"):
        average_parameters_or_parameter_groups(wrong, world)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ((None, None, -1), "start_localSGD_iter=-1 must be a whole number, at least 0"),
        ((None, None, 1.5), "start_localSGD_iter=1.5 must be a whole number"),
        ((None, None, True), "start_localSGD_iter=True must be a whole number"),
        ((None, None, 1, 1), "post_local_gradient_allreduce=1 must be True or False"),
        ((None, 4, 1), "subgroup=4 must be a process group .* the ranks on this node"),
        (("world", None, 1), "process_group='world' must be a process group .* the DDP model's own"),
    ],
)
def test_states_that_are_none(options: Any, reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        PostLocalSGDState(*options)


def test_a_saved_state_loads_by_torch_loads_default() -> None:
    state, file = PostLocalSGDState(None, None, 3), io.BytesIO()
    state.iter = 2
    torch.save({"hook": state}, file)
    file.seek(0)
    loaded = torch.load(file)["hook"]
    assert (loaded.iter, loaded.start_localSGD_iter, loaded.process_group) == (2, 3, None)


class Every:
    """An averager of a user's own, of no class that we know."""

    step = 0

    def average_parameters(self, params: Any) -> None:
        self.step += 1


def test_optimizers_that_are_none() -> None:
    inner, wrong = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0), object()
    with pytest.raises(OptionError, match=r"optim=.* must be a torch.optim.Optimizer"):
        PostLocalSGDOptimizer(wrong, Every())  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"averager=.* must be a ModelAverager"):
        PostLocalSGDOptimizer(inner, wrong)  # type: ignore[arg-type]
    outer = PostLocalSGDOptimizer(inner, Every())
    outer.step()
    with pytest.raises(StateError, match="step=-3 must be a whole number, at least 0"):
        outer.load_state_dict({**outer.state_dict(), "step": -3})
    assert outer.averager.step == 1


def test_only_used_parameters_are_averaged() -> None:
    """Three ranks: parameter 0 used on rank 1, parameter 1 nowhere, parameter 2 everywhere."""
    ranks = [[torch.full((2,), 10.0 * rank + place) for place in range(3)] for rank in range(3)]
    for rank, parameters in enumerate(ranks):
        parameters[2].grad = torch.zeros(2)
        if rank == 1:
            parameters[0].grad = torch.zeros(2)
    simulate([[average_used(parameters, 3)] for parameters in ranks])
    for rank, parameters in enumerate(ranks):
        torch.testing.assert_close(parameters[0], torch.full((2,), 10.0))
        assert parameters[1].tolist() == [10.0 * rank + 1] * 2
        torch.testing.assert_close(parameters[2], torch.full((2,), 12.0))


@pytest.mark.parametrize("place", [0, 1, 2])
def test_ranks_with_other_parameters_are_told(place: int) -> None:
    """On every rank, whichever is different."""
    ranks = [[torch.ones(2), torch.ones(3)] for _ in range(3)]
    ranks[place].pop()
    verdicts = []

    def verdict(parameters: list[torch.Tensor]) -> Any:
        try:
            yield from average_used(parameters, 3)
        except MismatchError as error:
            verdicts.append(str(error).partition(",")[0])

    simulate([[verdict(parameters)] for parameters in ranks])
    assert verdicts == [
        f"this rank would average {1 if rank == place else 2} parameters" for rank in range(3)
    ]


def test_real_parameters_beside_complex_ones() -> None:
    ranks = [
        [torch.full((2,), float(rank)), torch.full((2,), complex(0, rank), dtype=torch.complex64)]
        for rank in range(2)
    ]
    simulate([[average(parameters, 2)] for parameters in ranks])
    assert [each.tolist() for each in ranks[0]] == [[0.5, 0.5], [0.5j, 0.5j]]
    assert ranks[0][0].dtype == torch.float32
