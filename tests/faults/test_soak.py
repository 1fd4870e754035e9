"""A few of the episodes that `make soak` runs by the hundred, and what its last line says."""

import pytest

from tests.faults.soak.__main__ import summary
from tests.faults.soak.episode import KINDS, draw_episode
from tests.faults.soak.run import attempt

SEEDS = (1005, 1060, 1074, 1081, 1192, 1240, 1280, 1011)


def test_every_kind_of_event_happens_here() -> None:
    assert {type(event) for seed in SEEDS for event in draw_episode(seed).events} == set(KINDS)


def test_an_episode_is_a_function_of_its_seed() -> None:
    assert all(repr(draw_episode(seed)) == repr(draw_episode(seed)) for seed in range(200))


@pytest.mark.parametrize(
    "seed", [SEEDS[0], *(pytest.param(seed, marks=pytest.mark.slow) for seed in SEEDS[1:])]
)
def test_faults_leave_no_trace(seed: int) -> None:
    assert attempt(seed) is None


def test_the_last_line_tells_how_many_and_which() -> None:
    assert summary({7: True, 8: True}, 2, 552.9) == (
        "soak: 2 episodes in 9 min 12 s, seeds 7 to 8: 2 as they should be, 0 not"
    )
    assert summary({7: True, 8: False}, 300, 60) == (
        "soak: 2 of 300 episodes in 1 min 00 s, seeds 7 to 8: 1 as they should be, 1 not (seeds 8);"
        " stopped before the others"
    )
