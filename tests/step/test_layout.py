"""Which parameters travel together, whatever buckets DDP has."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.step.buckets import BucketLayout, groups_for

NAMES = [f"p{number}" for number in range(12)]


@st.composite
def groupings(draw: st.DrawFn) -> list[tuple[str, ...]]:
    """All names in some order, cut into groups."""
    order = draw(st.permutations(NAMES))
    cuts = sorted(draw(st.sets(st.integers(1, len(order) - 1))))
    return [tuple(order[a:b]) for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)]


def step(grouping: BucketLayout, buckets: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    found, arrived = [], set()
    for number, bucket in enumerate(buckets, 1):
        arrived |= {*bucket}
        for group in grouping.complete(bucket, last=number == len(buckets)):
            assert {*group} <= arrived, "a group before its gradients are there"
            found.append(group)
    grouping.end()
    return found


@given(groupings(), groupings())
def test_held_groups_come_whole_and_in_order(held: list[tuple[str, ...]], own: list[tuple[str, ...]]) -> None:
    grouping = BucketLayout()
    assert step(grouping, own) == own  # as DDP has them
    grouping.held = tuple(held)
    for _ in range(2):
        assert step(grouping, own) == held
        assert grouping.upcoming == tuple(held)


@given(groupings(), groupings(), groupings())
def test_a_step_that_did_not_count_is_taken_again_in_its_own_groups(
    first: list[tuple[str, ...]], second: list[tuple[str, ...]], third: list[tuple[str, ...]]
) -> None:
    grouping = BucketLayout()
    step(grouping, first)
    grouping.repeat()
    assert step(grouping, second) == first
    assert step(grouping, third) == third


def test_parameters_that_held_groups_do_not_know_come_last() -> None:
    grouping = BucketLayout()
    grouping.held = (("b", "gone"), ("a",))
    assert step(grouping, [("a", "new"), ("b",)]) == [("b",), ("a",), ("new",)]


def test_groups_of_another_model_are_not_held() -> None:
    def parameters(**dtypes: torch.dtype) -> dict[str, torch.nn.Parameter]:
        return {name: torch.nn.Parameter(torch.zeros(2, dtype=dtype)) for name, dtype in dtypes.items()}

    same = parameters(a=torch.float32, b=torch.float32)
    assert groups_for(same, [["b", "a"]]) == (("b", "a"),)
    assert groups_for(same, [["b"]]) is None
    assert groups_for(same, []) is None
    assert groups_for(parameters(a=torch.float32, b=torch.bfloat16), [["b", "a"]]) is None
    same["a"].requires_grad_(False)
    assert groups_for(same, [["b", "a"]]) is None
