"""ZeRO's owners, what they send and save, and invalid input, in one process."""

import io
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from thinwire.checkpoint.gather import collect
from thinwire.checkpoint.optimizer_state import joined, mark_owned, merge_optimizer_states
from thinwire.engine.ops import Collective, Collectives
from thinwire.engine.pack import batches
from thinwire.engine.simulate import simulate
from thinwire.errors import OptionError, StateError, UnavailableError
from thinwire.optim import ZeroRedundancyOptimizer
from thinwire.strategies.zero.assignment import assign
from thinwire.strategies.zero.parameters import as_views, in_turn, share

CPU = torch.device("cpu")
SIZES = st.lists(st.lists(st.integers(0, 50), max_size=8), min_size=1, max_size=4)


@given(SIZES, st.integers(1, 6))
def test_every_parameter_has_one_owner_and_loads_are_balanced(groups: list[list[int]], ranks: int) -> None:
    assignment = assign(groups, ranks)
    flat = [size for group in groups for size in group]
    owned = [[number for group in rank for number in group] for rank in assignment]
    assert sorted(number for rank in owned for number in rank) == list(range(len(flat)))
    loads = [sum(flat[number] for number in rank) for rank in owned]
    assert max(loads) - min(loads) <= max(flat, default=0)
    for rank in assignment:
        for group in rank:
            sizes = [flat[number] for number in group]
            assert sizes == sorted(sizes, reverse=True)


@given(SIZES, st.lists(st.integers(0, 50), max_size=8), st.integers(1, 6))
def test_a_new_group_moves_no_parameter(groups: list[list[int]], new: list[int], ranks: int) -> None:
    longer = assign([*groups, new], ranks)
    assert [rank[:-1] for rank in longer] == assign(groups, ranks)


@given(
    st.lists(st.tuples(st.sampled_from([torch.float32, torch.float64]), st.integers(0, 9))),
    st.integers(1, 99),
)
def test_batches(kinds: list[tuple[torch.dtype, int]], limit: int) -> None:
    tensors = [torch.empty(size, dtype=dtype) for dtype, size in kinds]
    made = batches(tensors, limit)
    assert sorted(number for batch in made for number in batch) == list(range(len(tensors)))
    for batch in made:
        assert len({tensors[number].dtype for number in batch}) == 1
        assert len(batch) == 1 or sum(tensors[number].nbytes for number in batch) <= limit


def test_owners_values_arrive_in_place_and_keep_their_strides() -> None:
    def parameters(rank: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(rank)
        image = torch.randn(2, 3, 4, 4, generator=generator).to(memory_format=torch.channels_last)
        return [
            nn.Parameter(image),
            nn.Parameter(torch.randn(5, generator=generator)),
            nn.Parameter(torch.tensor(1.0)),
        ]

    ranks = [parameters(rank) for rank in range(3)]
    places = [[each.data_ptr() for each in own] for own in ranks]
    simulate([[share(own[:2], 2, rank), share(own[2:], 1, rank)] for rank, own in enumerate(ranks)])
    for own, before in zip(ranks, places, strict=True):
        assert [each.data_ptr() for each in own] == before
        assert own[0].is_contiguous(memory_format=torch.channels_last)
        assert all(torch.equal(*pair) for pair in zip(own[:2], parameters(2)[:2], strict=True))


def test_owners_take_turns() -> None:
    one, two, three = (torch.tensor(float(number)) for number in range(3))
    assert list(in_turn([[[one], [two]], [], [[three]]])) == [(0, [one]), (2, [three]), (0, [two])]


def test_views_share_one_buffer_and_keep_values_and_strides() -> None:
    parameters = [
        nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.ones(5)),
    ]
    before = [each.detach().clone() for each in parameters]
    flat = as_views(parameters)
    assert all(torch.equal(*pair) for pair in zip(parameters, before, strict=True))
    assert parameters[0].is_contiguous(memory_format=torch.channels_last)
    flat.zero_()
    assert all(not each.any() for each in parameters)


STATES: list[dict[Any, Any]] = [
    {
        0: {
            "step": torch.tensor(3.0),
            "exp": torch.randn(6, 5),
            "mask": torch.tensor([True, False]),
            "on": True,
        },
        1: {"pairs": [(torch.randn(2, dtype=torch.complex128), 0.1, None)], "none": torch.empty(0)},
    },
    {},
    {
        0: {
            "image": torch.randn(1, 2, 3, 3).to(memory_format=torch.channels_last),
            "half": torch.ones(9).bfloat16(),
        }
    },
]


@pytest.mark.parametrize("to", [0, 1, 2])
def test_states_arrive_as_they_are_in_batches(to: int) -> None:
    largest: list[int] = []
    programs = [collect(own, rank, 3, to, CPU, limit=64) for rank, own in enumerate(STATES)]
    simulation = simulate([[recording(program, largest)] for program in programs])
    results = [result for (result,) in simulation.results]
    assert [result for rank, result in enumerate(results) if rank != to] == [[], []]
    for got, expected in zip(results[to], STATES, strict=True):
        assert repr(got) == repr(expected)
    image = results[to][2][0]["image"]
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert image.data_ptr() != STATES[2][0]["image"].data_ptr(), "a state of one moment is a copy"
    tensors = [size for size in largest if size < 500]  # descriptions are longer
    assert max(tensors) <= 120, "no more than a batch of 64 bytes or the largest tensor at a time"


def recording(steps: Collectives[Any], sizes: list[int]) -> Collectives[Any]:
    received: Any = None
    while True:
        try:
            op = steps.send(received)
        except StopIteration as stop:
            return stop.value
        sizes.extend([op.nbytes] if isinstance(op, Collective) else [])
        received = yield op


class Odd:
    """What no receiver could load safely."""


@pytest.mark.parametrize(
    ("state", "reason"),
    [({0: {"it": Odd()}}, "plain values"), ({0: {"it": torch.ones(2).to_sparse()}}, "dense")],
)
def test_what_cannot_travel_is_refused_on_every_rank(state: dict[Any, Any], reason: str) -> None:
    failures = []

    def guarded(own: dict[Any, Any], rank: int) -> Collectives[None]:
        try:
            yield from collect(own, rank, 2, 0, CPU)
        except StateError as error:
            failures.append(str(error))

    simulate([[guarded({}, 0)], [guarded(state, 1)]])
    assert len(failures) == 2
    assert all("rank 1" in failure and reason in failure for failure in failures)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("params", "options", "error", "word"),
    [
        (nn.Parameter(torch.ones(1)), {}, TypeError, "iterable"),
        (3, {}, TypeError, "int"),
        ({nn.Parameter(torch.ones(1))}, {}, TypeError, "ordered"),
        ([{"params": {nn.Parameter(torch.ones(1))}}], {}, TypeError, "ordered"),
        ([], {}, ValueError, "empty"),
        ([nn.Parameter(torch.ones(1)), {"params": []}], {}, TypeError, "dict"),
        ([("name", 3)], {}, TypeError, "tuple"),
        ([{"lr": 0.1}], {}, ValueError, "params"),
        ([torch.ones(2).to_sparse().requires_grad_()], {}, OptionError, "dense"),
        (None, {"optimizer_class": nn.Linear}, ValueError, "optimizer_class"),
        (None, {"optimizer_class": "Adam"}, OptionError, "Adam"),
        (None, {"optimizer_class": lambda *_, **__: 3}, OptionError, "int"),
        (None, {"process_group": 3}, OptionError, "process_group=3"),
        (None, {"process_group": dist.GroupMember.NON_GROUP_MEMBER}, OptionError, "is in"),
        (None, {"parameters_as_bucket_view": True, "lr": -1.0}, ValueError, "learning rate"),
    ],
)
def test_bad_input(params: Any, options: dict[str, Any], error: type[Exception], word: str) -> None:
    given_ = nn.Linear(2, 2).parameters() if params is None else params
    with pytest.raises(error, match=word):
        ZeroRedundancyOptimizer(given_, **{"optimizer_class": torch.optim.SGD, "lr": 0.1, **options})


def test_without_a_world() -> None:
    with pytest.raises(OptionError, match="init_process_group"):
        ZeroRedundancyOptimizer(nn.Linear(2, 2).parameters(), torch.optim.SGD, lr=0.1)


def stepped(zero: torch.optim.Optimizer) -> Any:
    for group in zero.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    zero.step()
    return zero


@pytest.mark.usefixtures("alone")
def test_states_that_do_not_fit_are_refused_and_change_nothing() -> None:
    make = partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.Adam)
    zero = stepped(make(nn.Linear(2, 2).parameters()))
    other = torch.optim.Adam(nn.Linear(2, 2, bias=False).parameters())
    shard = zero.sharded_state_dict()
    for bad, word in [
        (other.state_dict(), r"\[1\]"),
        ({"state": {}}, "param_groups"),
        ({"state": {7: {}}, "param_groups": shard["param_groups"]}, "7"),
    ]:
        with pytest.raises(StateError, match=word):
            zero.load_state_dict(bad)
    for bad_shard, word in [
        ({"state": {}}, "sharded_state_dict"),
        ([], "list"),
        ("abc", "str"),
        ({**shard, "format": 9}, "9"),
        ({**shard, "owned": {"1 of 2": [1]}}, r"\[0\]"),
        ([shard, {**shard, "owned": {"1 of 2": [1]}}], "together"),
    ]:
        with pytest.raises(StateError, match=word):
            zero.load_sharded_state_dict(bad_shard)
    with pytest.raises(OptionError, match="to=1"):
        zero.consolidate_state_dict(to=1)
    assert repr(zero.sharded_state_dict()) == repr(shard)


def test_shards_of_different_jobs_are_refused() -> None:
    shard = {"format": 1, "owned": {"0 of 1": [0]}, "param_groups": [], "state": {}}
    assert joined([shard, shard], [[0]])["state"] == {}
    with pytest.raises(StateError, match="0 of 2"):
        joined([shard, {**shard, "owned": {"0 of 2": [0]}}], [[0]])


@pytest.mark.usefixtures("alone")
def test_it_is_an_optimizer_through_and_through() -> None:
    """Named parameters, hooks, defaults, schedulers that look at them, and a state that loads safely."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    zero = ZeroRedundancyOptimizer(model.named_parameters(), torch.optim.AdamW, lr=0.1)
    torch.optim.lr_scheduler.OneCycleLR(zero, max_lr=0.1, total_steps=9)
    called: list[str] = []
    zero.register_step_post_hook(lambda *_: called.append("step"))
    zero.register_state_dict_post_hook(lambda _, state: {**state, "more": 1})
    zero.register_load_state_dict_pre_hook(lambda _, state: called.append(f"load {state.pop('more')}"))
    zero.register_load_state_dict_post_hook(lambda _: called.append("loaded"))
    stepped(zero)
    assert zero.state is zero.optim.state
    assert set(zero.state) == set(model.parameters())
    with pytest.raises(RuntimeError, match="consolidate_state_dict"):
        zero.state_dict()
    zero.consolidate_state_dict()
    saved = zero.state_dict()
    assert saved["param_groups"][0]["param_names"] == [name for name, _ in model.named_parameters()]
    buffer = io.BytesIO()
    torch.save([saved, zero.sharded_state_dict()], buffer)
    buffer.seek(0)
    whole, shard = torch.load(buffer, weights_only=True)
    zero.load_state_dict(whole)
    assert "more" in whole, "the caller's dictionary is the caller's"
    assert called == ["step", "load 1", "loaded"]
    with pytest.raises(UnavailableError, match="consolidate_state_dict"):
        zero.state_dict()
    zero._optimizer_load_state_dict_pre_hooks.clear()
    zero.load_sharded_state_dict(shard)
    assert repr(zero.sharded_state_dict()) == repr(shard)


@pytest.mark.usefixtures("alone")
def test_owners_and_gradients_cannot_be_given_by_hand() -> None:
    zero = ZeroRedundancyOptimizer(nn.Linear(2, 2).parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(UnavailableError, match="params_per_rank"):
        zero._partition_parameters([[]])
    with pytest.raises(UnavailableError, match="gradients"):
        zero._local_step(gradients=[])


def test_one_ranks_part_of_zero_is_no_whole_state(alone: None) -> None:
    """Neither merging some parts nor ZeroRedundancyOptimizer takes it; a part that has everything is one."""
    model = nn.Linear(3, 2)
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    plain.step()
    whole = plain.state_dict()
    parts = []
    for own, other in ((0, model.bias), (1, model.weight)):
        part = {**whole, "state": {own: whole["state"][own]}}
        parts.append(mark_owned(part, plain.param_groups, {id(other)}))
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    for refusing in (merge_optimizer_states, lambda states: zero.load_state_dict(states[0])):
        with pytest.raises(StateError, match="lack the state of some parameters"):
            refusing(parts[:1])
    assert merge_optimizer_states(parts)["state"].keys() == {0, 1}
    assert merge_optimizer_states(parts)["param_groups"] == whole["param_groups"]
    for complete in (whole, {**parts[0], "state": whole["state"]}, merge_optimizer_states(parts)):
        zero.load_state_dict(complete)
        assert len(zero.state) == 2
