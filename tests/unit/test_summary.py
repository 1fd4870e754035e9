"""From raw tracks to figures and advice."""

import dataclasses

import pytest

from thinwire.bench.results import Cell, Track
from thinwire.bench.summary import advice, loss_at, rows, seconds_to

STEPS = 12


def track(name: str, kind: str, seconds: float, sent: float, end: float, text: str = "") -> Track:
    """A contestant whose loss falls in a straight line from 4."""
    own = Track(name, kind, text or name)
    own.step_seconds = [9.0] * 3 + [seconds] * (STEPS - 3)  # a slow start, which must not count in medians
    own.device_bytes = [sent * 1.01] * STEPS
    own.losses = [(step, 4.0 + (end - 4.0) * step / STEPS) for step in range(0, STEPS + 1, 3)]
    if kind == "thinwire":
        own.meter_bytes = [sent] * STEPS
        own.encode_seconds = own.wire_seconds = own.exposed_seconds = [0.1] * STEPS
    return own


def cell(*tracks: Track) -> Cell:
    alone = track("no communication", "alone", 0.2, 0.0, 2.0)
    return Cell("gpt-1m", 2, "80mbit", "2 hosts at 80mbit", 80_000_000, 1, [*tracks, alone])


PLAIN = track("DDP", "ddp", 1.2, 10e6, 2.0)
HALF = track("BF16", "thinwire", 0.7, 5e6, 2.0)
HALF.rival = "torch bf16_compress_hook"
TORCH = track("torch bf16_compress_hook", "torch", 1.4, 5e6, 2.0, text="BF16")


def test_medians_leave_the_warm_up_out_and_compare_with_plain_ddp_and_torch() -> None:
    plain, half, torch = rows(cell(PLAIN, HALF, TORCH))
    assert plain.step == pytest.approx((1.2, 1.2, 1.2))
    assert plain.speed_up == pytest.approx((1.0, 1.0, 1.0))
    assert half.speed_up == pytest.approx((1.2 / 0.7,) * 3)
    assert half.torch_speed_up == pytest.approx(2.0)
    assert torch.torch_speed_up is None


def test_the_floor_is_the_slower_of_computing_and_sending() -> None:
    plain, half = rows(cell(PLAIN, HALF))
    assert half.floor == pytest.approx(8 * 5e6 / 80e6)
    assert plain.floor == pytest.approx(8 * 10.1e6 / 80e6)
    assert half.over_floor == pytest.approx(0.7 / 0.5)
    (fast, *_) = rows(dataclasses.replace(cell(PLAIN), rate=10**12))
    assert fast.floor == pytest.approx(0.2)
    (unlimited, *_) = rows(dataclasses.replace(cell(PLAIN), rate=None))
    assert unlimited.floor == pytest.approx(0.2)


def test_the_parts_of_a_step_make_up_the_step() -> None:
    plain, half = rows(cell(PLAIN, HALF))
    assert half.waiting == pytest.approx(0.1), "what backward measured"
    assert half.overhead == pytest.approx(0.7 - 0.2 - 0.1)
    assert plain.waiting == pytest.approx(1.2 - 0.2), "nobody measured it, so all beyond computing"
    for row in (plain, half):
        assert row.step is not None
        assert (row.compute or 0) + (row.waiting or 0) + (row.overhead or 0) == pytest.approx(row.step[1])


def test_time_to_a_loss_is_read_between_evaluations() -> None:
    # 27 s of warm-up until step 3 (loss 3.5), then 0.7 s a step
    assert seconds_to(HALF, 3.5) == pytest.approx(27.0)
    assert seconds_to(HALF, 3.25) == pytest.approx(27.0 + 1.5 * 0.7)
    assert seconds_to(HALF, 1.9) is None
    assert seconds_to(HALF, 5.0) == 0.0
    assert loss_at(HALF, 27.0) == pytest.approx(3.5)
    assert loss_at(HALF, 27.0 + 1.5 * 0.7) == pytest.approx(3.25)
    assert loss_at(HALF, 1000.0) == pytest.approx(2.0)


def test_losses_are_compared_when_the_fastest_is_done() -> None:
    plain, half = rows(cell(PLAIN, HALF))
    assert half.loss_at_time == pytest.approx(2.0)
    assert plain.loss_at_time == pytest.approx(loss_at(PLAIN, 27 + 9 * 0.7))
    assert plain.loss_at_time is not None
    assert plain.loss_at_time > 2.0


def test_advice_names_what_reaches_the_loss_first() -> None:
    text = advice(cell(PLAIN, HALF, TORCH))
    assert "use BF16" in text
    assert "1.71 x as fast" in text
    assert "83% of a step" in text
    assert "71% of its step is bytes on the link" in text


def test_advice_is_to_stay_where_nothing_is_clearly_faster() -> None:
    same = track("Exact", "thinwire", 1.2, 10e6, 2.0)
    assert "stay with plain DDP" in advice(cell(PLAIN, same))


def test_advice_never_names_what_misses_the_loss() -> None:
    worse = track("Sign", "thinwire", 0.3, 1e6, 3.0)
    assert "stay with plain DDP" in advice(cell(PLAIN, worse))
    assert rows(cell(PLAIN, worse))[1].seconds_to_loss is None


def test_advice_never_names_what_takes_longer_to_the_loss() -> None:
    slow = track("Lossy", "thinwire", 1.0, 1e6, 3.0)
    slow.step_seconds += [1.0] * 20
    slow.losses.append((STEPS + 20, 1.9))
    (plain, row) = rows(cell(PLAIN, slow))
    assert row.speed_up is not None
    assert row.speed_up[0] > 1
    assert row.seconds_to_loss is not None
    assert plain.seconds_to_loss is not None
    assert row.seconds_to_loss > plain.seconds_to_loss
    assert "stay with plain DDP" in advice(cell(PLAIN, slow))
    assert row.loss == pytest.approx(3.0), "after equal steps, not after overtime"


def test_advice_takes_the_best_of_those_that_are_faster_even_if_it_is_torchs() -> None:
    """Exact comes to the loss at the same time as ever; that must not hide who is faster."""
    same = track("Exact", "thinwire", 1.2, 10e6, 1.0)
    assert "use BF16" in advice(cell(PLAIN, same, HALF))
    assert "use torch hook" in advice(cell(PLAIN, same, track("torch hook", "torch", 0.5, 5e6, 2.0)))


def test_fewer_bytes_are_not_advised_where_the_link_has_no_limit() -> None:
    assert "fewer would help" not in advice(dataclasses.replace(cell(PLAIN, HALF), rate=None))


def test_a_loss_below_zero_is_reached_too() -> None:
    negative = track("DDP", "ddp", 1.2, 10e6, -1.0)
    (row,) = rows(cell(negative))
    assert row.seconds_to_loss is not None


def test_a_loss_that_is_no_number_gives_no_advice() -> None:
    diverged = track("DDP", "ddp", 1.2, 10e6, float("nan"))
    assert "not finite" in advice(cell(diverged, HALF))


def test_who_could_not_run_has_a_row_with_the_reason() -> None:
    refused = Track("torch bf16_compress_hook", "torch", "BF16", unavailable="no NCCL")
    *_, row = rows(cell(PLAIN, HALF, refused))
    assert row.unavailable == "no NCCL"
    assert row.step is None
    assert rows(cell(PLAIN, HALF, refused))[1].torch_speed_up is None


def test_a_cell_that_failed_has_no_rows_and_says_why() -> None:
    failed = Cell("gpt-1m", 2, "80mbit", "2 hosts at 80mbit", error="host 1 died")
    assert rows(failed) == []
    assert "host 1 died" in advice(failed)
