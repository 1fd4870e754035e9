"""From the rows of a training to figures and words."""

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import pytest

from thinwire import StateError
from thinwire.telemetry.log import Log, is_log
from thinwire.telemetry.sinks import Row
from thinwire.tools.report.training import (
    dates,
    event_text,
    losses,
    notes,
    parameter_rows,
    programs,
    render,
    step_time,
    trust,
    verdict,
    worth,
)
from thinwire.tools.report.training_figures import figures
from thinwire.tools.report.training_summary import summarise


def exchange(
    step: int,
    *,
    purpose: str = "gradients",
    sent: int = 1000,
    audit: int = 0,
    seconds: float | None = 0.2,
    overflowed: bool = False,
    rank: int = 0,
) -> Row:
    """A step as `telemetry.watch` sends it; half of the time is exposed."""
    row: Row = {"step": step, "purpose": purpose, "bytes_sent": sent + audit, "collectives": 1}
    row |= {"rank": rank, "world_size": 2, "time": 0.0}
    row |= {"overflowed": overflowed, "ddp_bytes": 0} if purpose == "gradients" else {}
    times = {"encode_seconds": seconds, "wire_seconds": seconds}
    row |= {**times, "exposed_seconds": None if seconds is None else seconds / 2, "bytes/AllReduce": sent}
    return row | ({"bytes/Audit": audit} if audit else {})


def audit(step: int, errors: dict[str, float | None], action: str = "") -> Row:
    """An audit as `telemetry.as_audit_row` has it; None is an infinite error."""
    worst = max(errors, key=lambda name: math.inf if errors[name] is None else errors[name] or 0.0)
    row: Row = {"step": step, "purpose": "audit", "of": "gradients", "error": 0.3, "residual": 1.5}
    row |= {"rank": 0, "world_size": 2, "time": 0.0}
    row |= {"worst": worst, "worst_error": errors[worst], "action": action}
    return (
        row
        | {f"error/{name}": error for name, error in errors.items()}
        | {f"residual/{name}": 0.5 for name in errors}
    )


def test_totals_of_all_purposes_and_what_the_exact_mean_would_take() -> None:
    rows = [
        exchange(0),
        exchange(1, audit=50_000),
        audit(1, {"w": 0.5, "b": 0.1}),
        exchange(2, purpose="models", sent=4000),
        exchange(2),
    ]
    summary = summarise(Log.of(rows))
    assert (summary.steps, summary.sent, summary.for_audits) == (3, 57_000, 50_000)
    assert summary.sent_per_step == 19_000
    assert summary.saving == 50, "of the audited exchange alone"
    assert summary.wire == pytest.approx(0.8)
    assert summary.exposed == pytest.approx(0.4)
    assert "3 steps sent 57 kB in total, 19 kB a step; 88% of it for audits" in worth(summary)
    assert "In total, backward waited 400 ms" in worth(summary)


def test_several_exchanges_of_parameters_are_one_step_and_no_overflow() -> None:
    rows = [exchange(1, purpose="parameters", sent=sent) for sent in (4, 996)]
    log = Log.of([exchange(0), *rows, exchange(1)])
    assert list(log.series["parameters"].own) == [1000]
    assert summarise(log).overflows == 0


def overflows(*steps: int, facts: str) -> Log:
    """A log of these steps; an `x` in `facts` is one that overflowed."""
    return Log.of(exchange(step, overflowed=fact == "x") for step, fact in zip(steps, facts, strict=True))


def test_overflows_are_what_the_log_says() -> None:
    log = overflows(0, 1, 1, 2, 3, 3, 3, 4, facts=".x..xx..")
    summary = summarise(log)
    assert (summary.steps, summary.overflows, summary.overflows_in_a_row) == (5, 3, 2)
    assert not summary.stuck
    assert summary.sent == 8000, "what they sent was sent"
    assert "3 overflows, up to 2 in a row" in next(notes(log, summary))


def test_a_repeated_step_is_no_overflow() -> None:
    log = overflows(0, 1, 1, 1, 1, 2, facts="......")
    summary = summarise(log)
    assert (summary.overflows, summary.stuck) == (0, False)
    assert list(notes(log, summary)) == []


def test_rows_of_several_ranks_in_one_file_are_refused(tmp_path: Path) -> None:
    lines = [json.dumps(exchange(step, rank=rank)) + "\n" for step in range(2) for rank in range(2)]
    path = written(tmp_path / "steps.jsonl", *lines)
    with pytest.raises(StateError, match=r"line 2: rows of rank 1 follow rows of rank 0.*ranks='all'"):
        Log.load(path)
    own = Log.load(written(tmp_path / "steps-rank1.jsonl", *lines[1::2]))
    assert (own.rank, own.world_size) == (1, 2)


def test_a_log_that_ends_in_overflows_says_that_training_does_not_get_on() -> None:
    log = overflows(0, 1, 1, 1, facts=".xxx")
    assert "training makes no progress" in next(notes(log, summarise(log)))


def test_a_resumed_run_goes_back_and_its_lines_are_broken() -> None:
    log = Log.of(exchange(step) for step in (0, 1, 2, 3, 2, 3, 4))
    summary = summarise(log)
    assert (summary.steps, summary.overflows, summary.resumes) == (5, 0, ((3, 2),))
    assert "from step 3 to step 2" in next(notes(log, summary))
    (line,) = figures(log, ())["Bytes sent"]["data"]
    assert line["x"] == [0, 1, 2, 3, None, 2, 3, 4]


def test_the_latest_and_the_worst_audit_are_told_apart() -> None:
    audits = (audit(4, {"w": 0.5, "b": 0.9}), audit(9, {"w": 0.6, "b": 0.1}))
    summary = summarise(Log.of([exchange(0), *audits]))
    assert summary.latest is not None
    assert summary.worst is not None
    assert (summary.latest.worst, summary.latest.step) == ("w", 9)
    assert (summary.worst.worst, summary.worst.step) == ("b", 4)
    assert "2 audits, none led to a warning" in trust(summary)
    assert "Worst of all: 0.9 of b at step 4" in trust(summary)


def test_actions_are_told_with_step_and_cause_and_the_same_again_is_one() -> None:
    rows = [
        audit(4, {"w": 0.7}, "warned"),
        audit(9, {"w": 0.2}),
        audit(14, {"w": 0.8}, "warned"),
        audit(19, {"w": None}, "raised"),
    ]
    first, last = summarise(Log.of([exchange(0), *rows])).events
    said = "Steps 4 to 14: warned 2 times; at worst, at step 14, because the mean"
    assert event_text(first).startswith(said)
    assert event_text(last).startswith("Step 19: raised, because the exact mean of w was zero")


def test_parameters_stand_by_their_latest_error_the_worst_first() -> None:
    rows = [audit(4, {"a": 0.9, "b": 0.2, "c": 0.1}), audit(9, {"a": 0.1, "b": 0.3, "c": None})]
    assert parameter_rows(Log.of([exchange(0), *rows])) == [
        ("c", ["infinite", "infinite", "9", "0.5", "9"]),
        ("b", ["0.3", "0.3", "9", "0.5", "9"]),
        ("a", ["0.1", "0.9", "4", "0.5", "9"]),
    ]


def test_without_audits_and_times_nothing_is_made_up() -> None:
    log = Log.of(exchange(step, seconds=None) for step in range(3))
    summary = summarise(log)
    assert (summary.wire, summary.exposed, summary.saving, summary.audits) == (None, None, None, 0)
    assert "not known" in worth(summary)
    assert "no audit" in trust(summary)
    assert list(figures(log, ())) == ["Bytes sent"]


def test_a_long_run_is_thinned_and_no_peak_of_the_error_is_lost() -> None:
    rows = [exchange(step, sent=step % 2) for step in range(5000)]
    errors = [audit(step, {"w": 0.9 if step == 3333 else 0.1}) for step in range(5000)]
    drawn = figures(Log.of([*rows, *errors]), ())
    (line,) = drawn["Bytes sent"]["data"]
    assert len(line["x"]) < 1000
    assert sum(line["y"]) / len(line["y"]) == pytest.approx(0.5, rel=0.1)
    worst, _ = drawn["Error of the mean"]["data"]
    assert dict(zip(worst["x"], worst["y"], strict=True))[3333] == 0.9


def written(path: Path, *lines: str) -> Path:
    path.write_text("".join(lines))
    return path


ROW = json.dumps(exchange(0)) + "\n"


def test_a_last_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = written(tmp_path / "steps.log", ROW, ROW.replace(": 0", ": 1")[:40])
    assert is_log(path)
    log = Log.load(path)
    assert log.cut
    assert summarise(log).steps == 1
    assert list(notes(log, summarise(log))) == [
        "The last line is incomplete, as after a kill, and is ignored."
    ]


def test_a_last_line_that_only_lacks_its_end_counts(tmp_path: Path) -> None:
    log = Log.load(written(tmp_path / "steps.jsonl", ROW, ROW.replace(": 0", ": 1", 1).rstrip()))
    assert not log.cut
    assert summarise(log).steps == 2


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "no whole step yet"),
        ([ROW[:30]], "no whole step yet"),
        ([ROW, ROW[:30], "\n", ROW], "damaged in line 2 .* sed -i 2d"),
        ([ROW, '{"loss": 0.5}\n'], r"line 2 is not a row of telemetry \(KeyError\('rank'\)\)"),
        ([ROW, "[1]\n"], "line 2 is not a row of telemetry"),
        ([ROW, ROW.replace("1000", '"many"')], "line 2 is not a row of telemetry"),
        ([ROW, "[" * 100_000 + "\n"], "damaged in line 2"),
    ],
)
def test_what_is_damaged_is_named_by_line(tmp_path: Path, lines: list[str], message: str) -> None:
    path = written(tmp_path / "steps.jsonl", *lines)
    assert is_log(path)
    with pytest.raises(StateError, match=message):
        Log.load(path)


ROWS = [exchange(0), audit(0, {"w": 0.1}), exchange(2, purpose="models"), exchange(3)]


@pytest.mark.parametrize(
    "wrong", [None, "<b>", -1, 10**30, math.inf, math.nan, [], {}, True, 1.5, ""], ids=repr
)
def test_a_row_with_any_wrong_value_is_refused_or_shown(tmp_path: Path, wrong: object) -> None:
    """As a damaged disk, or another program, may leave it. No traceback."""
    for place, row in enumerate(ROWS):
        for key in row:
            rows = [*ROWS[:place], row | {key: wrong}, *ROWS[place:]]
            path = written(tmp_path / "steps.jsonl", *(json.dumps(one) + "\n" for one in rows))
            with contextlib.suppress(StateError):
                render(Log.load(path), "steps.jsonl")


@pytest.mark.parametrize(
    "change",
    [
        *({"residual": "x"}, {"residual": [1]}, {"residual": 10**400}, {"action": [1]}, {"worst": None}),
        *({"error": {}}, {"step": "x"}, {"world_size": "two"}, {"world_size": -1}),
    ],
    ids=str,
)
def test_a_damaged_audit_is_named_by_line(tmp_path: Path, change: Row) -> None:
    path = written(tmp_path / "steps.jsonl", ROW, json.dumps(audit(0, {"w": 0.1}) | change) + "\n")
    with pytest.raises(StateError, match="line 2 is not a row of telemetry"):
        Log.load(path)


def test_an_error_that_is_no_number_is_shown_as_infinite(tmp_path: Path) -> None:
    row = json.dumps(audit(0, {"w": math.nan}) | {"residual": math.nan}) + "\n"
    log = Log.load(written(tmp_path / "steps.jsonl", ROW, row))
    assert log.audits[0].worst_error == log.audits[0].residual == math.inf
    assert list(log.parameters["w"].errors) == [math.inf]


def test_results_and_other_files_are_no_logs(tmp_path: Path) -> None:
    assert not is_log(written(tmp_path / "bench.json", '{\n "format": 1\n}'))
    assert not is_log(written(tmp_path / "metrics.jsonl", '{"loss": 0.5}\n'))
    assert not is_log(tmp_path / "missing.jsonl")
    assert not is_log(tmp_path)


def timed(step: int, time: float, *, sent: int = 1000, loss: float | None = 1.0, **more: Any) -> Row:
    """A step with the time at which the next one began, of a model whose plain DDP sends 4000 bytes."""
    return exchange(step, sent=sent) | {"time": time, "ddp_bytes": 4000, "log/loss": loss} | more


def test_compressed_steps_are_compared_with_the_exact_ones_of_the_log() -> None:
    exact = [timed(step, 0.4 * step, sent=4000, loss=5.0 - step) for step in range(4)]
    exact[0]["program"] = "Exact()"
    compressed = [timed(step, 1.2 + 0.1 * (step - 3), loss=1.0) for step in range(4, 10)]
    compressed[0]["program"] = "Int8()"
    log = Log.of([*exact, *compressed])
    summary = summarise(log)
    assert summary.exact_steps == 3
    assert summary.exact_step == pytest.approx(0.4)
    assert summary.step == pytest.approx(0.1)
    assert verdict(log, summary).startswith("It pays: a step takes 100 ms, with exact gradients 400 ms.")
    assert "(3 steps of this log): 4.00 x as fast" in step_time(summary)
    assert programs(log) == "Exact(), from step 4 Int8()"
    assert losses(log) == "1 at step 9, 5 at step 0"
    assert dates(summary) == "1970-01-01 00:00 to 00:00 UTC (1.8 s)"
    slow = Log.of([*exact, *(timed(step, 0.4 * step) for step in range(4, 10))])
    assert verdict(slow, summarise(slow)).startswith("It does not pay")


def test_steps_that_cannot_be_compared_are_not() -> None:
    rows = [timed(step, 0.1 * step) for step in range(5)]
    log = Log.of(rows)
    summary = summarise(log)
    assert summary.exact_step is None
    assert "no exact steps to compare with" in verdict(log, summary)
    assert "Schedule({0: Exact(), 20: Int8()})" in step_time(summary)
    audited = exchange(5, audit=4000) | {"time": 99.0, "ddp_bytes": 4000}
    resumed = timed(2, 500.0)
    assert summarise(Log.of([*rows, audited, resumed])).step == pytest.approx(0.1)


def test_steps_of_averaged_models_take_the_mean_with_their_exchanges() -> None:
    rows: list[Row] = [timed(0, 0.0, sent=0)]
    for step in range(1, 9):
        rows.append(timed(step, rows[-1]["time"] + (0.9 if step % 4 == 0 else 0.1), sent=0))
        if step % 4 == 0:
            rows.append(exchange(step, purpose="models", sent=4000) | {"time": rows[-1]["time"]})
    assert summarise(Log.of(rows)).step == pytest.approx(0.3)


def test_a_loss_that_is_no_number_is_the_verdict() -> None:
    rows = [timed(0, 0.0, loss=3.0), *(timed(step, 0.1, loss=None) for step in range(1, 4))]
    log, overflowed = Log.of(rows), Log.of(rows[:2])
    assert verdict(log, summarise(log)) == "Training failed: the loss is non-finite since step 1."
    assert losses(log) == "not finite at step 3, 3 at step 0"
    assert "failed" not in verdict(overflowed, summarise(overflowed))


def test_waiting_is_told_by_step_and_not_as_a_share_of_another_time() -> None:
    rows = [exchange(step) | {"exposed_seconds": 0.212} for step in range(10)]
    text = worth(summarise(Log.of(rows)))
    assert "In an average step a collective was in flight for 200 ms, and backward waited 212 ms" in text
    assert "%" not in text


def test_names_from_a_log_stay_text_on_its_page() -> None:
    hostile = "<img src=x onerror=alert(1)>"
    rows = [timed(step, 0.1 * step) | {f"log/{hostile}": 1.0} for step in range(3)]
    rows[0]["program"] = hostile
    page = render(Log.of(rows), hostile)
    assert hostile not in page
    assert "&lt;img src=x onerror=alert(1)&gt;" in page
