"""Advice: who is recommended, and who is not."""

import dataclasses

import pytest

from tests.tools.bench.test_summary import HALF, PLAIN, STEPS, TORCH, cell, track
from thinwire.tools.bench.advice import advise, summarize
from thinwire.tools.bench.results import Cell, Results, Track
from thinwire.tools.bench.summary import rows


def advice(shown: Cell) -> str:
    return advise(shown).text


def noisy(name: str, kind: str, seconds: float, sent: float, end: float) -> Track:
    """A contestant whose steps vary by a tenth."""
    own = track(name, kind, seconds, sent, end)
    own.step_seconds[3:] = [seconds * (0.9 + 0.1 * (number % 3)) for number in range(STEPS - 3)]
    return own


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


def test_a_loss_that_is_no_number_gives_no_advice() -> None:
    diverged = track("DDP", "ddp", 1.2, 10e6, float("nan"))
    assert "not finite" in advice(cell(diverged, HALF))


def test_of_tied_contestants_the_safest_is_named_in_any_order() -> None:
    risky = noisy("Int4", "thinwire", 0.69, 1e6, 2.006)
    safe = noisy("BF16", "thinwire", 0.70, 5e6, 2.0)
    for tracks in ((risky, safe), (safe, risky)):
        text = advice(cell(PLAIN, *tracks))
        assert "use BF16" in text
        assert "Int4: as fast within quartiles, not safer" in text


def test_a_margin_outside_the_quartiles_beats_a_safer_contestant() -> None:
    fast = noisy("Int4", "thinwire", 0.4, 1e6, 2.006)
    assert "use Int4" in advice(cell(PLAIN, HALF, fast))
    assert "within quartiles" not in advice(cell(PLAIN, HALF, fast))


def test_of_equally_safe_ones_thinwires_is_named_and_then_the_one_that_sends_most() -> None:
    ours, theirs = noisy("BF16", "thinwire", 0.7, 5e6, 2.0), noisy("torch hook", "torch", 0.69, 5e6, 2.0)
    assert "use BF16" in advice(cell(PLAIN, theirs, ours))
    smaller = noisy("Int8", "thinwire", 0.69, 2e6, 2.0)
    assert "use BF16" in advice(cell(PLAIN, smaller, ours))


def test_advice_names_the_loss_gap_after_equal_steps() -> None:
    behind = noisy("Int4", "thinwire", 0.4, 1e6, 2.008)
    assert "after 12 equal steps its loss is +0.40 % from DDP's." in advice(cell(PLAIN, behind))
    plain = dataclasses.replace(PLAIN, seed_losses=[[(12, 2.0)]])
    behind.seed_losses = [[(12, 2.004)]]
    assert "+0.30 % from DDP's (± 0.14% over seeds)" in advice(cell(plain, behind))


def test_advice_says_when_steps_were_too_few() -> None:
    assert "12 steps are too few to judge final losses: DDP's still fell by 20%" in advice(cell(PLAIN, HALF))
    flat = dataclasses.replace(PLAIN, losses=[(0, 4.0), (3, 2.02), (6, 2.01), (9, 2.01), (12, 2.0)])
    assert "too few" not in advice(cell(flat, HALF))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("int4", "wire = thinwire.attach(ddp, thinwire.Int4())"),
        (
            "PowerSGD(rank=4,factor_dtype='bf16')",
            "wire = thinwire.attach(ddp, thinwire.PowerSGD(rank=4, factor_dtype='bf16'))",
        ),
        ("mine.codecs:Own(k=3)", "wire = thinwire.attach(ddp, mine.codecs.Own(k=3))"),
    ],
)
def test_advice_has_the_line_to_paste(text: str, line: str) -> None:
    fast = dataclasses.replace(track("Name", "thinwire", 0.3, 1e6, 2.0), text=text)
    assert advise(cell(PLAIN, fast)).line == line
    (summary,) = summarize(Results("c", {}, {}, [cell(PLAIN, fast)]))
    assert summary["line"] == line


def test_there_is_no_line_for_plain_ddp_or_torchs_own() -> None:
    assert advise(cell(PLAIN)).line is None
    assert advise(cell(PLAIN, track("torch hook", "torch", 0.5, 5e6, 2.0))).line is None


def test_advice_says_which_averaged_models_were_exchanged_too_seldom() -> None:
    fast = [
        dataclasses.replace(track(name, "thinwire", 0.3, 1e6, 2.0), text=name)
        for name in (
            "LocalSGD(period=1)",
            "DiLoCo(period=1, warmup_steps=4)",
            "SparseLoCo(period=4, ratio=0.05)",
        )
    ]
    text = advice(cell(PLAIN, HALF, *fast))
    shown = "LocalSGD(period=1) (12 of 16), DiLoCo(period=1, warmup_steps=4) (8 of 16)"
    assert (
        f"Too few exchanges of models to judge {shown}, SparseLoCo(period=4, ratio=0.05) (3 of 40): raise"
        in text
    )
    assert "exchanges" not in advice(cell(PLAIN, HALF, TORCH))
    own = dataclasses.replace(fast[0], text="mine.averaging:Own(period=1)")
    unknown = dataclasses.replace(fast[0], text="OfAnotherVersion(period=1)")
    assert "exchanges" not in advice(cell(PLAIN, own, unknown))


def test_advice_says_that_it_is_uncertain_if_the_machine_was_busy() -> None:
    quiet = cell(PLAIN, HALF, TORCH)
    quiet.cores, quiet.other_cores = 2, 0.1
    assert "Uncertain" not in advise(quiet).text
    quiet.other_cores = 1.4
    assert "Uncertain: other processes used 1.4 of this machine's 2 cores" in advise(quiet).text
