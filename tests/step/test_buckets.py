"""Which parameters are exchanged together: groups of a resumed run, and parts by program."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire import BF16, Exact, Int4, Int8, PowerSGD, Program, RandomEntries, Reduced, Warmup
from thinwire.programs.program import Programs
from thinwire.step.buckets import BucketLayout, BucketPart, groups_for, parts_of

INT8, INT4, HALF, EXACT, RANDOM = Int8(), Int4(), BF16(), Exact(), Reduced(RandomEntries())
SHAPES = {"w": (8, 8), "v": (4, 4), "b": (8,), "n": (4,), "big": (1 << 17,)}
SIZES = {name: 4 * torch.Size(shape).numel() for name, shape in SHAPES.items()}


def parts(names: str, program: Program, **exceptions: Program) -> list[BucketPart]:
    exact = frozenset(name for name, one in exceptions.items() if one is EXACT)
    return parts_of(tuple(names.split()), SIZES, Programs(program, exceptions, exact))


def test_a_program_takes_exact_parameters_along_without_a_split() -> None:
    assert parts("w b v n", INT8, b=EXACT, n=EXACT) == [
        BucketPart(INT8, ("w", "b", "v", "n"), frozenset("bn"))
    ]
    assert parts("b n", INT8, b=EXACT, n=EXACT) == [BucketPart(INT8, ("b", "n"), frozenset("bn"))]


def test_rules_still_split_and_exact_parameters_join_one_of_the_programs() -> None:
    found = parts("w b v n", INT8, b=EXACT, n=EXACT, v=INT4)
    assert found == [BucketPart(INT8, ("w", "b", "n"), frozenset("bn")), BucketPart(INT4, ("v",))]
    found = parts("w b v", HALF, b=EXACT, v=INT4)
    assert found == [BucketPart(INT4, ("b", "v"), frozenset("b")), BucketPart(HALF, ("w",))]


def test_small_exact_parameters_wait_for_the_last_bucket_where_no_program_takes_them() -> None:
    found = parts("w b big n", HALF, b=EXACT, n=EXACT, big=EXACT)
    assert found == [
        BucketPart(HALF, ("w",)),
        BucketPart(EXACT, ("big",)),
        BucketPart(EXACT, ("b", "n"), deferred=True),
    ]
    assert parts("b", PowerSGD(factor_dtype="bf16"), b=EXACT) == [BucketPart(EXACT, ("b",), deferred=True)]


def test_a_program_that_can_leave_parameters_out_keeps_the_bucket_in_one_piece() -> None:
    found = parts("b w n v big", HALF, b=EXACT, n=EXACT)
    assert found == [
        BucketPart(EXACT, ("b", "n"), deferred=True),
        BucketPart(HALF, ("w", "n", "v", "big"), left_out=frozenset("n")),
    ]
    # Not around a parameter that is averaged at once, by another program.
    assert BucketPart(HALF, ("w", "v")) in parts("w big v", HALF, big=EXACT)
    assert BucketPart(RANDOM, ("w", "v")) in parts("w b v", RANDOM, b=EXACT)


def test_what_an_exact_program_averages_by_itself_is_no_exception() -> None:
    assert parts("w b", EXACT, w=INT8) == [BucketPart(INT8, ("w",)), BucketPart(EXACT, ("b",))]


@given(
    st.permutations(list(SHAPES)),
    st.sampled_from([INT8, HALF, EXACT]),
    st.dictionaries(st.sampled_from(list(SHAPES)), st.sampled_from([INT8, INT4, HALF, EXACT])),
)
def test_every_parameter_is_in_one_part_with_a_program_that_keeps_its_promise(
    names: list[str], program: Program, exceptions: dict[str, Program]
) -> None:
    found = parts(" ".join(names), program, **exceptions)
    assert sorted(name for part in found for name in part.averaged) == sorted(names)
    for part in found:
        for name in part.averaged:
            wanted = exceptions.get(name, program)
            assert part.program is wanted or (wanted is EXACT and name in part.exact)
        assert part.exact <= {*part.names}
        assert not part.deferred or part.program is EXACT


@given(st.lists(st.integers(0, 9 << 20), min_size=1, max_size=20), st.sets(st.integers(0, 19)))
def test_slices_are_consecutive_and_about_as_large_as_wanted(sizes: list[int], exact: set[int]) -> None:
    names = tuple(f"p{number}" for number in range(len(sizes)))
    nbytes = dict(zip(names, sizes, strict=True))
    spared = frozenset(names[number] for number in exact if number < len(names))
    found = BucketPart(INT8, names, spared).sliced(nbytes)
    assert sum((part.names for part in found), ()) == names
    wanted = INT8.preferred_bytes
    assert wanted is not None
    for part in found:
        assert part.exact == spared & {*part.names}
        size = sum(nbytes[name] for name in part.names)
        assert size <= 1.5 * wanted + nbytes[part.names[-1]]
    assert len(found) <= max(1, round(sum(sizes) / wanted))


def test_programs_that_prefer_whole_buckets_get_them() -> None:
    part = BucketPart(PowerSGD(), ("a", "b"))
    assert part.sliced({"a": 1 << 30, "b": 1 << 30}) == [part]
    assert Warmup(INT8, steps=3).preferred_bytes == INT8.preferred_bytes is not None


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
