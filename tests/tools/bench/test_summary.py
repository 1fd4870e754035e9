"""From raw tracks to figures and advice."""

import dataclasses
import math

import pytest

from thinwire.tools.bench.advice import advise
from thinwire.tools.bench.results import REAL_LINK, Cell, Track
from thinwire.tools.bench.summary import elapsed, loss_at, rows, steps_to

STEPS = 12
FIRST_GRADIENT, OPTIMIZER = 0.07, 0.03


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
    alone.first_gradient_seconds, alone.optimizer_seconds = [FIRST_GRADIENT] * STEPS, [OPTIMIZER] * STEPS
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


def test_a_synchronous_step_sends_nothing_before_its_first_gradient() -> None:
    plain, half = rows(cell(PLAIN, HALF))
    assert half.link_floor == pytest.approx(8 * 5e6 / 80e6)
    assert half.floor == pytest.approx(FIRST_GRADIENT + 8 * 5e6 / 80e6 + OPTIMIZER)
    assert plain.floor == pytest.approx(FIRST_GRADIENT + 8 * 10.1e6 / 80e6 + OPTIMIZER)
    assert half.over_floor == pytest.approx(0.7 / (FIRST_GRADIENT + 0.5 + OPTIMIZER))


def test_ranks_that_share_cores_have_a_floor_of_their_processor_time() -> None:
    busy = dataclasses.replace(HALF, cpu_seconds=[0.69] * STEPS)
    shared = dataclasses.replace(cell(PLAIN, busy), cores=2)
    assert rows(shared)[1].cpu == pytest.approx(0.69)
    assert rows(shared)[1].core_floor == pytest.approx(0.69)
    assert rows(shared)[1].over_core_floor == pytest.approx(0.7 / 0.69)
    # With more cores, or for little work, the link is the floor.
    for spare in (dataclasses.replace(shared, cores=8), dataclasses.replace(shared, rate=8_000_000)):
        assert rows(spare)[1].core_floor == rows(spare)[1].floor
    assert rows(shared)[0].core_floor is None, "a file of before has no processor time"
    assert rows(dataclasses.replace(shared, link=REAL_LINK))[1].core_floor is None


def test_the_floor_is_computing_where_the_link_is_fast_or_unlimited() -> None:
    (fast, *_) = rows(dataclasses.replace(cell(PLAIN), rate=10**12))
    assert fast.floor == pytest.approx(0.2)
    (unlimited, *_) = rows(dataclasses.replace(cell(PLAIN), rate=None))
    assert unlimited.floor == pytest.approx(0.2)
    assert unlimited.link_floor is None


def test_averaged_models_may_send_before_the_first_gradient() -> None:
    averaged = dataclasses.replace(HALF, averages_models=True)
    assert rows(cell(PLAIN, averaged))[1].floor == pytest.approx(0.5)


def test_a_file_without_first_gradients_has_the_link_as_its_floor() -> None:
    old = cell(PLAIN, HALF)
    old.tracks[-1].first_gradient_seconds = old.tracks[-1].optimizer_seconds = []
    assert rows(old)[1].floor == pytest.approx(0.5)


def test_the_figures_of_averaged_models_are_means_over_periods() -> None:
    local = track("LocalSGD(period=3)", "thinwire", 0.3, 0.0, 2.0)
    local.cycle, local.averages_models = 3, True
    local.step_seconds[5::3] = [0.9] * len(local.step_seconds[5::3])
    local.meter_bytes = [3e6 if step % 3 == 2 else 0.0 for step in range(STEPS)]
    row = rows(cell(PLAIN, local))[1]
    assert row.step == pytest.approx((0.5, 0.5, 0.5))
    assert row.speed_up == pytest.approx((1.2 / 0.5,) * 3)
    assert row.meter_bytes == pytest.approx(1e6)


def test_the_figures_of_a_schedule_are_means_over_all_its_stages() -> None:
    staged = track("Schedule", "thinwire", 0.2, 0.0, 2.0)
    staged.cycle = None
    staged.step_seconds = [9.0] * 3 + [1.0] * 4 + [0.2] * 4
    staged.step_seconds += [0.1] * 40  # overtime does not count
    plain = dataclasses.replace(
        PLAIN, step_seconds=PLAIN.step_seconds[:11], losses=[(0, 4.0), (11, 2.0)], device_bytes=[1e6] * 11
    )
    staged.losses = [(0, 4.0), (11, 2.0)]
    row = rows(cell(plain, staged))[1]
    assert row.step == pytest.approx((0.6, 0.6, 0.6))


def test_speed_is_compared_with_bf16_too() -> None:
    fast = track("Int4", "thinwire", 0.35, 1e6, 2.0)
    plain, half, row = rows(cell(PLAIN, HALF, fast))
    assert row.bf16_speed_up == pytest.approx(2.0)
    assert plain.bf16_speed_up == pytest.approx(0.7 / 1.2)
    assert half.bf16_speed_up == pytest.approx(1.0)
    assert rows(cell(PLAIN, fast))[1].bf16_speed_up is None


def test_losses_of_several_seeds_have_a_mean_and_a_spread() -> None:
    plain, own = track("DDP", "ddp", 1.2, 10e6, 2.0), track("Int4", "thinwire", 0.5, 1e6, 2.02)
    plain.seed_losses = [[(12, 2.2)], [(12, 1.8)]]
    own.seed_losses = [[(12, 2.2 * 1.03)], [(12, 1.8 * 1.02)]]
    row = rows(cell(plain, own))[1]
    assert row.loss == pytest.approx((2.02 + 2.2 * 1.03 + 1.8 * 1.02) / 3)
    assert row.loss_gap == pytest.approx(0.02), "of each seed against DDP's of the same seed"
    assert row.gap_spread == pytest.approx(0.01)
    single = rows(cell(PLAIN, HALF))[1]
    assert (single.loss_spread, single.gap_spread) == (None, None)
    plain.seed_losses[0] = [(12, float("nan"))]
    assert not math.isfinite(rows(cell(plain, own))[0].loss_spread or 0.0)


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
    assert steps_to(HALF.losses, 3.5) == 3
    assert steps_to(HALF.losses, 3.25) == pytest.approx(4.5)
    assert steps_to(HALF.losses, 1.9) is None
    assert steps_to(HALF.losses, 5.0) == 0.0
    assert elapsed(HALF, 3) == pytest.approx(27.0)
    assert elapsed(HALF, 4.5) == pytest.approx(27.0 + 1.5 * 0.7)
    assert loss_at(HALF, 27.0) == pytest.approx(3.5)
    assert loss_at(HALF, 27.0 + 1.5 * 0.7) == pytest.approx(3.25)
    assert loss_at(HALF, 1000.0) == pytest.approx(2.0)


def test_losses_may_be_of_more_steps_than_were_timed() -> None:
    plain, own = track("DDP", "ddp", 1.2, 10e6, 2.0), track("Int4", "thinwire", 0.5, 1e6, 2.0)
    for one in (plain, own):
        one.losses = [(0, 4.0), (50, 3.0), (100, 2.0)]
    own.losses.append((200, 1.9))  # overtime
    rest = 27.0 + 9 * 0.5  # as timed
    assert elapsed(own, 100) == pytest.approx(rest + 88 * 0.5)
    row = rows(cell(plain, own))[1]
    assert row.loss == pytest.approx(2.0), "after equal steps"
    assert row.steps_to_loss == pytest.approx(99.5), "within half a per cent"
    assert row.seconds_to_loss == pytest.approx(rest + 87.5 * 0.5)


def test_steps_to_the_loss_are_the_median_over_seeds() -> None:
    plain, own = track("DDP", "ddp", 1.2, 10e6, 2.0), track("Int4", "thinwire", 0.5, 1e6, 2.0)
    never, late = [(0, 4.0), (12, 3.0)], [(0, 4.0), (12, 3.0), (24, 2.0)]
    plain.seed_losses = [[(0, 4.0), (12, 2.0)]] * 2
    own.seed_losses = [late, never]
    assert rows(cell(plain, own))[1].steps_to_loss == pytest.approx(12 + 12 * 0.99)
    own.seed_losses = [never, never]
    row = rows(cell(plain, own))[1]
    assert (row.steps_to_loss, row.seconds_to_loss) == (None, None)


def test_losses_are_compared_when_the_fastest_is_done() -> None:
    plain, half = rows(cell(PLAIN, HALF))
    assert half.loss_at_time == pytest.approx(2.0)
    assert plain.loss_at_time == pytest.approx(loss_at(PLAIN, 27 + 9 * 0.7))
    assert plain.loss_at_time is not None
    assert plain.loss_at_time > 2.0


def test_a_loss_below_zero_is_reached_too() -> None:
    negative = track("DDP", "ddp", 1.2, 10e6, -1.0)
    (row,) = rows(cell(negative))
    assert row.seconds_to_loss is not None


def test_who_could_not_run_has_a_row_with_the_reason() -> None:
    refused = Track("torch bf16_compress_hook", "torch", "BF16", unavailable="no NCCL")
    *_, row = rows(cell(PLAIN, HALF, refused))
    assert row.unavailable == "no NCCL"
    assert row.step is None
    assert rows(cell(PLAIN, HALF, refused))[1].torch_speed_up is None


def test_a_cell_that_failed_has_no_rows_and_says_why() -> None:
    failed = Cell("gpt-1m", 2, "80mbit", "2 hosts at 80mbit", error="host 1 died")
    assert rows(failed) == []
    assert "host 1 died" in advise(failed).text
