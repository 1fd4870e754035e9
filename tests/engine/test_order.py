"""The static order and its agenda, as properties of random arrivals."""

import random

from hypothesis import given
from hypothesis import strategies as st

from thinwire.engine.order import LOOKAHEAD, Agenda, order, position

stage_counts = st.lists(st.integers(0, 5), max_size=30)


def deal(
    stages: list[int], hurry: random.Random, waits: frozenset[int] = frozenset()
) -> list[tuple[int, int]]:
    """The turns with a collective, dealt while buckets arrive at random moments; hooks wait after some."""
    agenda, turns, arrived = Agenda(), [], 0
    while not agenda.finished:
        if arrived < len(stages) and hurry.random() < 0.5:
            assert agenda.arrive() == arrived
            if arrived in waits:
                agenda.barrier()
            arrived += 1
        if arrived == len(stages) and hurry.random() < 0.5:
            agenda.close()
        while hurry.random() < 0.8 and (turn := agenda.next()) is not None:
            bucket, stage = turn
            if stage < stages[bucket]:
                turns.append(turn)
                agenda.again(bucket, stage + 1)
    return turns


@given(stage_counts, st.integers(0, 2**32), st.integers(0, 2**32))
def test_the_order_does_not_depend_on_when_buckets_arrive(stages: list[int], one: int, other: int) -> None:
    assert deal(stages, random.Random(one)) == deal(stages, random.Random(other)) == order(stages)


@given(stage_counts, st.frozensets(st.integers(0, 30)), st.integers(0, 2**32))
def test_where_hooks_wait_all_turns_so_far_come_first(
    stages: list[int], waits: frozenset[int], seed: int
) -> None:
    expected, begin = [], 0
    for end in [wait + 1 for wait in sorted(waits) if wait < len(stages)] + [len(stages)]:
        expected += [(begin + bucket, stage) for bucket, stage in order(stages[begin:end])]
        begin = end
    assert deal(stages, random.Random(seed), waits) == expected


@given(st.integers(0, 1000), st.integers(0, 20), st.integers(0, 1000), st.integers(0, 20))
def test_no_two_collectives_share_a_place(bucket: int, stage: int, other: int, other_stage: int) -> None:
    same = (bucket, stage) == (other, other_stage)
    assert (position(bucket, stage) == position(other, other_stage)) == same


@given(stage_counts)
def test_a_bucket_goes_through_its_stages_in_turn_and_buckets_start_in_turn(stages: list[int]) -> None:
    turns = order(stages)
    for bucket, count in enumerate(stages):
        assert [stage for b, stage in turns if b == bucket] == list(range(count))
    assert [b for b, stage in turns if stage == 0] == [b for b, count in enumerate(stages) if count]


@given(stage_counts)
def test_few_buckets_are_under_way_at_once(stages: list[int]) -> None:
    """What is held in memory does not grow with the number of buckets."""
    turns = order(stages)
    begun = {b: turns.index((b, 0)) for b, count in enumerate(stages) if count}
    ended = {b: turns.index((b, count - 1)) for b, count in enumerate(stages) if count}
    for moment in range(len(turns)):
        assert sum(begun[b] <= moment < ended[b] for b in begun) <= LOOKAHEAD * max(stages) + 1


def test_a_bucket_overlaps_with_younger_ones() -> None:
    assert order([2, 2, 2, 2]) == [(0, 0), (1, 0), (2, 0), (0, 1), (3, 0), (1, 1), (2, 1), (3, 1)]


def test_nothing_is_dealt_that_a_bucket_to_come_could_precede() -> None:
    agenda = Agenda()
    agenda.arrive()
    assert agenda.next() == (0, 0)
    agenda.again(0, 1)
    assert agenda.next() is None
    agenda.close()
    assert agenda.next() == (0, 1)
    assert agenda.finished
