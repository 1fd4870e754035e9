"""The page of a plan in a real browser."""

from pathlib import Path

import pytest
import torch
from playwright.sync_api import Browser

from tests.browser.pages import opened
from thinwire.plan.candidates import Candidate
from thinwire.plan.compute import assumed
from thinwire.plan.gaps import Known
from thinwire.plan.network import Link, Network
from thinwire.plan.planner import Planner
from thinwire.plan.recommend import Limits
from thinwire.tools.bench.parsing import parse_program
from thinwire.tools.report.plan import RATES, render, scale

pytestmark = pytest.mark.slow

SIZES = (2, 8, 64)
COMMAND = "thinwire plan --hosts 2..64 --plot <page>"


@pytest.fixture(scope="module")
def page_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    planner = Planner(assumed({f"w{number}": torch.Size((256, 512)) for number in range(4)}, 0.05))
    candidates = [Candidate.of(text, parse_program(text)) for text in ("BF16", "Int8", "DiLoCo(period=4)")]
    networks = [Network(ranks=size, link=Link(up=1e8, down=1e8, latency=1e-4)) for size in SIZES]
    found = scale(planner, candidates, networks, Known(), Limits())
    path = tmp_path_factory.mktemp("plan") / "plan.html"
    path.write_text(render(found, COMMAND, "a small model"), encoding="utf-8")
    return path


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_every_curve_is_drawn_and_nothing_is_logged(
    browser: Browser, page_path: Path, width: int, dark: bool
) -> None:
    page, noise = opened(browser, page_path, width=width, dark=dark)
    assert page.locator(".plot").count() == 6
    drawn = page.evaluate("[...document.querySelectorAll('.plot')].map(plot => plot.data)")
    for number, traces in enumerate(drawn):
        assert [trace["name"] for trace in traces] == ["DDP", "BF16()", "Int8()", "DiLoCo(period=4)"]
        points = len(SIZES) if number < 3 else len(RATES)
        assert all(len(trace["y"]) == points for trace in traces)
    steps, sent, computing = drawn[:3]
    assert all(a <= b for a, b in zip(steps[0]["y"], steps[0]["y"][1:], strict=False)), (
        "more hosts, longer steps"
    )
    assert sent[1]["y"][0] == pytest.approx(sent[0]["y"][0] / 2)
    assert all(0 < share <= 100 for share in computing[0]["y"])
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "it would scroll sideways"
    assert noise == []
    page.close()


def test_what_to_use_and_the_command_can_be_read(browser: Browser, page_path: Path) -> None:
    page, _ = opened(browser, page_path)
    rows = page.locator("tbody tr").all_inner_texts()
    assert [row.split("\t")[0] for row in rows] == ["2 hosts", "8 hosts", "64 hosts"]
    assert "Int8 " in rows[0]
    assert rows[0].endswith("don't")
    assert page.locator("pre").inner_text() == COMMAND
    page.close()
