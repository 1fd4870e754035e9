"""Predictions of a benchmark's cells, and the loss gaps that a plan takes from them."""

import pytest
import torch

import thinwire
from thinwire.errors import StateError
from thinwire.plan.compute import assumed
from thinwire.tools.bench.predict import measured_gaps, predict
from thinwire.tools.bench.results import Cell, Results, Track

SHAPES = {"w": torch.Size((512, 512)), "b": torch.Size((512,))}


def track(text: str, kind: str, seconds: float, loss: float = 2.0) -> Track:
    own = Track(text or "DDP", kind, text, step_seconds=[seconds] * 6, losses=[(0, 3.0), (6, loss)])
    if kind == "alone":
        own.first_gradient_seconds, own.optimizer_seconds = [0.04] * 6, [0.01] * 6
    if kind == "thinwire":
        own.meter_bytes = [123_456.0] * 6
    return own


def cell() -> Cell:
    tracks = [
        track("", "ddp", 0.9),
        track("Int8", "thinwire", 0.4, loss=2.02),
        track("ZeRO", "thinwire", 0.9),
        track("torch hook", "torch", 0.9),
        track("no communication", "alone", 0.1),
    ]
    return Cell("mine:build", 2, "10mbit", "2 hosts at 10mbit", 10**7, 262_656, tracks)


def test_what_the_planner_knows_is_predicted_with_the_cells_own_computing() -> None:
    plain, int8 = predict(cell(), assumed(SHAPES, 0.2), cores=8)
    assert (plain.name, int8.name) == ("DDP", "Int8")
    assert plain.predicted.compute == pytest.approx(0.1)
    sent = 4 * (512 * 512 + 512)
    link = 8 * sent / 10**7 * 1514 / 1448  # from the first gradient on, of which nearly all of the model is
    assert plain.predicted.step == pytest.approx(0.04 + link + 0.01, rel=0.02)
    assert plain.error() == pytest.approx(plain.predicted.step / 0.9 - 1)
    assert plain.error("encode") is None
    assert int8.error("bytes") == pytest.approx(int8.predicted.bytes / 123_456 - 1)


def test_a_cell_that_failed_has_nothing_to_compare() -> None:
    failed = Cell("mine:build", 2, "10mbit", "2 hosts at 10mbit", error="host 1 died")
    with pytest.raises(StateError, match="host 1 died"):
        predict(failed, assumed(SHAPES, 0.2), cores=8)


def test_the_users_own_losses_become_gaps() -> None:
    found = measured_gaps(Results("thinwire bench --model mine:build", {}, {}, [cell()]))
    gap = found["Int8()"]
    assert gap.value == pytest.approx(0.01)
    assert (gap.source, gap.model, gap.steps) == ("results file", "mine:build", 6)
    assert found.keys() == {"Int8()", repr(thinwire.ZeRO())}
