"""The report in a real browser: it draws, it logs nothing, it fits a phone and the dark."""

from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.browser.pages import opened
from thinwire.tools.bench.results import Cell, Results, Track
from thinwire.tools.report.page import render

STEPS = 16


def track(name: str, kind: str, seconds: float, text: str = "", diverges: bool = False) -> Track:
    own = Track(name, kind, text or name, peak_memory=350_000_000)
    own.step_seconds = [seconds * (1 + 0.1 * (step % 3)) for step in range(STEPS)]
    own.device_bytes = [1e6 * seconds] * STEPS
    own.losses = [(step, 5.0 - 0.1 * step) for step in range(0, STEPS + 1, 4)]
    if diverges:
        own.losses[-1] = (STEPS, float("nan"))
    if kind == "thinwire":
        own.meter_bytes = own.device_bytes
        own.encode_seconds = own.wire_seconds = own.exposed_seconds = [0.01] * STEPS
    return own


def results() -> Results:
    cells = []
    for number, link in enumerate(("10mbit", "100mbit", "1gbit")):
        tracks = [
            track("DDP", "ddp", 1.0 / 10**number + 0.1),
            track("BF16", "thinwire", 0.5 / 10**number + 0.1),
            track("torch <b>hook</b>", "torch", 0.6 / 10**number + 0.1, text="BF16"),
            Track("torch bf16_compress_hook", "torch", "x", unavailable="it needs </script> & NCCL"),
            track("Diverged", "thinwire", 0.7, diverges=True),
            track("no communication", "alone", 0.1),
        ]
        cells.append(Cell("gpt-1m", 2, link, f"2 hosts at {link}", 10**7 * 10**number, 10**6, tracks))
    cells.append(Cell("gpt-1m", 4, "1gbit", "4 hosts at 1gbit", error="host 3 died"))
    return Results("thinwire bench --links 10mbit,100mbit,1gbit", {"steps": STEPS}, {"cores": "2"}, cells)


@pytest.fixture(scope="module")
def page_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render(results()), encoding="utf-8")
    return path


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False), (390, True)])
def test_every_plot_is_drawn_and_nothing_is_logged(
    browser: Browser, page_path: Path, width: int, dark: bool
) -> None:
    page, noise = opened(browser, page_path, width=width, dark=dark)
    assert page.locator(".plot").count() == 1 + 3 * 3
    for number in range(1 + 3 * 3):
        plot = page.locator(".plot").nth(number)
        assert plot.locator(".trace").count() >= 2, f"plot {number} has no data"
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "it would scroll sideways"
    assert noise == []
    page.close()


def test_a_table_of_real_names_fits_a_laptop(browser: Browser, tmp_path: Path) -> None:
    shown, path = results(), tmp_path / "report.html"
    for name, kind in (
        ("PowerSGD(rank=4,factor_dtype='bf16')", "thinwire"),
        ("torch powerSGD_hook rank 4, one bucket", "torch"),
    ):
        shown.cells[0].tracks.append(track(name, kind, 12.345))
    path.write_text(render(shown), encoding="utf-8")
    page, _ = opened(browser, path, width=1280)
    tables = "[...document.querySelectorAll('section > .scroll')]"
    assert page.evaluate(f"{tables}.map(one => one.scrollWidth - one.clientWidth)") == [0] * 3
    assert page.evaluate("document.body.scrollWidth") <= 1280
    page.close()


def test_lines_and_bars_have_the_measured_values(browser: Browser, page_path: Path) -> None:
    page, _ = opened(browser, page_path)
    drawn = page.evaluate("[...document.querySelectorAll('.plot')].map(plot => plot.data)")
    (by_time, by_bytes, steps), overview = drawn[:3], drawn[-1]
    assert [trace["name"] for trace in overview] == ["BF16", "torch <b>hook</b>", "Diverged"]
    assert [len(trace["x"]) for trace in overview] == [3, 3, 3]
    assert by_time[0]["y"][0] == 5.0
    assert by_bytes[0]["x"][-1] == pytest.approx(STEPS * 1.1)
    assert [trace["name"] for trace in steps] == [
        "computing",
        "encoding and other overhead",
        "waiting for the network",
        "floor",
        "link floor",
        "core floor",
    ]
    page.close()


def test_text_from_outside_stays_text(browser: Browser, page_path: Path) -> None:
    page, _ = opened(browser, page_path)
    assert page.locator("table b, details b, summary b").count() == 0
    assert page.get_by_text("it needs </script> & NCCL").count() == 3
    assert page.locator("section").count() == 3
    page.close()


def test_advice_command_and_failure_can_be_read(browser: Browser, page_path: Path) -> None:
    page, _ = opened(browser, page_path)
    advice = page.locator(".advice").all_inner_texts()
    assert len(advice) == 4
    assert "use BF16" in advice[0]
    assert "host 3 died" in advice[3]
    assert "wire = thinwire.attach(ddp, thinwire.BF16())" in advice[0]
    assert page.locator("pre").inner_text() == "thinwire bench --links 10mbit,100mbit,1gbit"
    page.close()


def test_one_table_in_the_order_of_time_to_loss_and_the_rest_is_folded(
    browser: Browser, page_path: Path
) -> None:
    page, _ = opened(browser, page_path)
    section = page.locator("section").first
    names = section.locator("table").first.locator("tbody th").all_inner_texts()
    assert names == ["BF16", "torch <b>hook</b>", "DDP", "Diverged", "torch bf16_compress_hook"]
    assert [table.is_visible() for table in section.locator("table").all()] == [True, False]
    section.get_by_text("All figures").click()
    assert section.locator("table").nth(1).is_visible()
    assert "link floor" in section.locator("table").nth(1).inner_text()
    page.close()


@pytest.mark.parametrize("width", [1280, 390])
def test_a_long_command_is_shown_whole_and_names_are_not_broken_into_letters(
    browser: Browser, tmp_path: Path, width: int
) -> None:
    shown, path = results(), tmp_path / "report.html"
    shown.command = "thinwire bench --programs " + ",".join(f"'PowerSGD(rank={rank})'" for rank in range(40))
    shown.cells[0].tracks.append(track("PowerSGD(rank=4,factor_dtype='bf16')", "thinwire", 12.345))
    path.write_text(render(shown), encoding="utf-8")
    page, _ = opened(browser, path, width=width)
    assert page.evaluate("(pre => pre.scrollWidth - pre.clientWidth)(document.querySelector('pre'))") == 0
    assert page.locator("pre").inner_text() == shown.command
    heights = page.evaluate("[...document.querySelectorAll('section tbody tr')].map(row => row.offsetHeight)")
    assert max(heights) < 100
    assert page.get_by_text("PowerSGD, rank 4, factor dtype bf16").count() >= 1
    page.close()


def test_dark_and_light_follow_the_reader(browser: Browser, page_path: Path) -> None:
    page, _ = opened(browser, page_path)
    colour = "document.querySelector('.plot').layout.font.color"
    light = page.evaluate(colour)
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"{colour} !== '{light}'")
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == "rgb(17, 21, 26)"
    page.close()
