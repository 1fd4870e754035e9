"""Plots of a benchmark, as data."""

import pytest

from tests.tools.bench.test_summary import HALF, PLAIN, cell, track
from thinwire.tools.report.figures import Palette, loss_by_bytes, loss_by_time

FEW = track("Few", "thinwire", 1.0, 1e4, 2.0)


@pytest.mark.parametrize("draw", [loss_by_time, loss_by_bytes])
def test_the_curves_of_a_benchmark_start_with_plain_ddps(draw: object) -> None:
    own = cell(PLAIN, HALF)
    assert callable(draw)
    figure = draw(own, Palette([own]))
    assert [one["name"] for one in figure["data"]] == ["DDP", "BF16"]
    assert figure["layout"]["xaxis"]["rangemode"] == "tozero"


def test_an_axis_is_logarithmic_only_if_curves_end_far_apart() -> None:
    own = cell(PLAIN, HALF, FEW)
    by_time, by_bytes = (draw(own, Palette([own])) for draw in (loss_by_time, loss_by_bytes))
    assert "type" not in by_time["layout"]["xaxis"]
    assert by_bytes["layout"]["xaxis"]["type"] == "log"
    assert all(min(one["x"]) > 0 for one in by_bytes["data"])
    assert all(one["x"][0] == 0 for one in by_time["data"])
