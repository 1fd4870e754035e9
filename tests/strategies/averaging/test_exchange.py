"""Ranks that have come to different exchanges of models are named, on all of them."""

from typing import Any

import pytest
import torch

from thinwire.engine.simulate import simulate
from thinwire.errors import MismatchError
from thinwire.strategies.averaging.exchange import (
    ExchangeId,
    any_diverged,
    compare_points,
    gather_diverged,
    gather_points,
)

CPU = torch.device("cpu")


def programs(*points: ExchangeId) -> list[list[Any]]:
    ranks = tuple(range(2, 2 + len(points)))
    return [[gather_points(point, ranks, CPU)] for point in points]


def test_ranks_at_one_point_go_on() -> None:
    for (received,) in simulate(programs(ExchangeId(8, 1), ExchangeId(8, 1), ExchangeId(8, 1))).results:
        assert received.tolist() == [[8, 1]] * 3


@pytest.mark.parametrize(
    ("points", "said"),
    [
        (
            [ExchangeId(8, 0), ExchangeId(8, None)],
            "rank 2 averaging fragment 0 after step 8; rank 3 synchronising",
        ),
        (
            [ExchangeId(8, 0), ExchangeId(12, 0), ExchangeId(8, 0)],
            "ranks 2, 4 averaging fragment 0 after step 8; rank 3",
        ),
        ([ExchangeId(8, 0), ExchangeId(8, 1)], "rank 3 averaging fragment 1 after step 8"),
    ],
)
def test_ranks_at_different_points_are_named(points: list[ExchangeId], said: str) -> None:
    with pytest.raises(MismatchError, match="different exchanges of models") as caught:
        simulate(programs(*points))
    assert said in str(caught.value)


def test_ranks_decide_alike_whether_to_bring_models_together() -> None:
    for diverged in ([False, False], [False, True], [True, True]):
        runs = [[gather_diverged(8, own, CPU)] for own in diverged]
        for (gathered,) in simulate(runs).results:
            compare_points(gathered, (0, 1))
            assert any_diverged(gathered) == any(diverged)


def test_a_rank_that_has_just_averaged_notices_one_that_has_taken_more_steps() -> None:
    for other in (gather_diverged(9, True, CPU), gather_points(ExchangeId(12, 0), (0, 1), CPU)):
        with pytest.raises(MismatchError, match=r"rank 0 synchronising models .* after step 8; rank 1"):
            compare_points(simulate([[gather_diverged(8, False, CPU)], [other]]).results[0][0], (0, 1))
