"""The page of a training log in a real browser: drawn, quiet, readable on a phone and in the dark."""

from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.browser.pages import opened
from tests.tools.report.test_training import audit, exchange
from thinwire.telemetry.log import Log
from thinwire.telemetry.sinks import Row
from thinwire.tools.report.training import render

pytestmark = pytest.mark.slow

STEPS = 40
HOSTILE = "layers.<b>0</b>.</script>weight"


def rows() -> list[Row]:
    """Models are exchanged too; the third audit leads to a fallback, after which nothing is audited."""
    made: list[Row] = []
    for step in range(STEPS):
        if step % 8 == 0:
            made.append(exchange(step, purpose="models", sent=50_000))
        audited = step % 5 == 4 and step < 15
        row = exchange(step, sent=1000 if step < 15 else 60_000, audit=60_000 if audited else 0)
        # After the fallback a step is exact, and takes four times as long.
        seconds = 0.1 * step if step < 15 else 1.4 + 0.4 * (step - 14)
        row |= {"time": 1.8e9 + seconds, "ddp_bytes": 60_000, "log/loss": 5.0 - 0.1 * step}
        if step in (0, 15):
            row["program"] = HOSTILE if step == 0 else "Exact()"
        made.append(row)
        if audited:
            action = "fell back to Exact()" if step == 14 else ""
            made.append(audit(step, {HOSTILE: 0.1 * step, "bias": 0.2, "empty": None}, action))
    return made


@pytest.fixture(scope="module")
def page_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "steps.html"
    path.write_text(render(Log.of(rows()), "steps.jsonl"), encoding="utf-8")
    return path


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False), (390, True)])
def test_every_plot_is_drawn_and_nothing_is_logged(
    browser: Browser, page_path: Path, width: int, dark: bool
) -> None:
    page, noise = opened(browser, page_path, width=width, dark=dark)
    assert page.locator("h3").all_inner_texts() == [
        "Loss",
        "Bytes sent",
        "Time on the network",
        "Error of the mean",
        "Residual",
    ]
    for number in range(5):
        assert page.locator(".plot").nth(number).locator(".trace").count() >= 1, f"plot {number} has no data"
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "it would scroll sideways"
    assert noise == []
    page.close()


def test_plots_have_the_logged_values_and_mark_what_happened(browser: Browser, page_path: Path) -> None:
    page, _ = opened(browser, page_path)
    loss, sent, seconds, error, residual = page.evaluate(
        "[...document.querySelectorAll('.plot')].map(plot => plot.data)"
    )
    assert loss[0]["y"] == pytest.approx([5.0 - 0.1 * step for step in range(STEPS)])
    assert [trace["name"] for trace in sent] == ["gradients", "models", "gradients, audited"]
    assert sent[0]["y"] == [1000] * 15 + [60_000] * 25
    assert (sent[2]["x"], sent[2]["y"]) == ([4, 9, 14], [61_000] * 3)
    assert len(seconds) == 4
    assert [trace["name"] for trace in error] == [
        "empty",
        HOSTILE,
        "bias",
        "all together",
        "fell back to Exact()",
    ]
    assert error[1]["y"] == pytest.approx([0.4, 0.9, 1.4])
    assert error[4]["x"] == [14]
    assert len(residual[0]["y"]) == 3
    turns = page.evaluate("[...document.querySelectorAll('.plot')].map(plot => plot.layout.shapes[0].x0)")
    assert turns == [14] * 5
    page.close()


def test_the_headline_tells_what_followed_and_text_from_outside_stays_text(
    browser: Browser, page_path: Path
) -> None:
    page, _ = opened(browser, page_path)
    worth, trust = page.locator(".advice").all_inner_texts()
    verdict = page.locator(".verdict").inner_text()
    assert verdict == (
        "It pays: a step takes 100 ms, with exact gradients 400 ms. That is 4.00 x as fast."
        " But audits found errors above the limit: see below."
    )
    names, values = (page.locator(f".key {one}").all_inner_texts() for one in ("dt", "dd"))
    assert names == ["Program", "Loss", "Step time", "Steps", "Dates", "Log"]
    assert values[0] == f"{HOSTILE}, from step 15 Exact()"
    assert values[1] == "1.1 at step 39, 5 at step 0"
    assert values[4].startswith("2027-01-15 08:00 to 08:00 UTC")
    assert page.locator(".key b").count() == 0
    assert "40 steps sent 1.95 MB in total" in worth
    assert "60 times the bytes of the program" in worth
    assert "3 audits, 1 above the limit" in trust
    assert "Step 14: fell back to Exact(), because the exact mean of empty was zero" in trust
    assert page.locator("tbody th").all_inner_texts() == ["empty", HOSTILE, "bias"]
    page.close()


def test_without_audits_and_times_the_page_says_so(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "steps.html"
    log = Log.of(exchange(step, seconds=None) for step in range(3))
    path.write_text(render(log, "steps.jsonl"), encoding="utf-8")
    page, noise = opened(browser, path)
    assert page.locator("h3").all_inner_texts() == ["Bytes sent"]
    worth, trust = page.locator(".advice").all_inner_texts()
    assert "is not known" in worth
    assert "audit_every=1000" in trust
    assert "Whether steps are faster is not known" in page.locator(".verdict").inner_text()
    told = page.locator(".key").inner_text()
    assert "watch.log(loss=loss)" in told
    assert "That of exact steps is not known" in told
    assert noise == []
    page.close()
