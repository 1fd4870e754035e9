"""The documentation site in a real browser: pages render, the search finds names, links lead somewhere."""

import json
import re
from collections.abc import Iterator
from functools import cache
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import pytest
from click.testing import CliRunner
from playwright.sync_api import Browser, Page

from thinwire_command import cli

pytest.importorskip("sphinx", reason="the site is built with Sphinx, which needs Python 3.11")
from thinwire.docs.site import Built, build

ROOT = Path(__file__).parents[2]
HOOK = "modules/thinwire.ddp_comm_hooks.powerSGD_hook.html"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(str(ROOT / "src" / "thinwire"), tmp_path_factory.mktemp("docs") / "site")


@pytest.fixture
def noise() -> list[str]:
    return []


def opened(browser: Browser, path: Path, noise: list[str], *, width: int = 1280, dark: bool = False) -> Page:
    page = browser.new_page(
        viewport={"width": width, "height": 850}, color_scheme="dark" if dark else "light"
    )
    page.on("console", lambda message: noise.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: noise.append(f"error: {error}"))
    page.on(
        "request",
        lambda request: None if request.url.startswith(("file:", "data:")) else noise.append(request.url),
    )
    page.goto(path.as_uri())
    return page


def test_sphinx_warns_of_nothing(built: Built) -> None:
    assert built.warnings == ()
    assert built.pages > 60


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_pages_render_in_light_and_dark_and_fit_a_phone(
    browser: Browser, built: Built, noise: list[str], width: int, dark: bool
) -> None:
    for name in (
        "index.html",
        HOOK,
        "modules/thinwire.engine.html",
        "docs/guides/README.html",
        "keywords.html",
    ):
        page = opened(browser, built.folder / name, noise, width=width, dark=dark)
        assert page.locator("h1").first.inner_text()
        assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{name} scrolls sideways"
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(255, 255, 255)") != dark, background
        page.close()
    assert noise == []


def test_a_page_shows_its_neighbours_and_leads_to_its_source(
    browser: Browser, built: Built, noise: list[str]
) -> None:
    page = opened(browser, built.folder / HOOK, noise)
    box = page.locator("svg.neighbours").bounding_box()
    assert box is not None
    assert box["width"] > 300
    assert page.locator("svg.neighbours g.here text").text_content() == "ddp_comm_hooks.powerSGD_hook"
    page.locator("#source li a").first.click()
    assert page.locator(".highlight").inner_text().count("\n") > 300
    assert noise == []
    page.close()


@pytest.mark.parametrize("word", ["powerSGD_hook", "residual", "hook_with_zero_step"])
def test_the_search_finds(browser: Browser, built: Built, noise: list[str], word: str) -> None:
    page = opened(browser, built.folder / "index.html", noise)
    page.locator("input[name=q]").first.fill(word)
    page.keyboard.press("Enter")
    page.wait_for_selector("ul.search li a", timeout=30_000)
    first = page.locator("ul.search li a").first
    found = " ".join(page.locator("ul.search li").all_inner_texts()[:8])
    assert word.lower() in found.lower()
    first.click()
    page.wait_for_load_state()
    assert word.lower() in page.content().lower()
    assert noise == []
    page.close()


def test_the_index_leads_to_the_right_section(browser: Browser, built: Built, noise: list[str]) -> None:
    page = opened(browser, built.folder / "keywords.html", noise)
    row = page.locator(
        "dl.keywords > div", has=page.locator("dt", has_text=re.compile("^hook_with_zero_step$"))
    )
    row.locator("a").first.click()
    assert page.url.endswith("#thinwire.ddp_comm_hooks.ddp_zero_hook.hook_with_zero_step")
    target = page.locator("[id='thinwire.ddp_comm_hooks.ddp_zero_hook.hook_with_zero_step']")
    assert "hook_with_zero_step(" in target.inner_text()
    assert noise == []
    page.close()


@cache
def parsed(path: Path) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return the anchors and the links of a page."""
    text = path.read_text(encoding="utf-8")
    anchors = frozenset(unescape(one) for one in re.findall(r'\b(?:id|name)="([^"]+)"', text))
    links = tuple(unescape(one) for one in re.findall(r'<\w[^<>]*?\s(?:href|src)="([^"]+)"', text))
    return anchors, links


def broken_links(site: Path) -> Iterator[str]:
    for path in site.rglob("*.html"):
        for link in set(parsed(path)[1]):
            target, _, anchor = link.partition("#")
            if "://" in target or target.startswith(("data:", "mailto:")):
                continue
            there = (path.parent / unquote(target.partition("?")[0])).resolve() if target else path
            is_page = there.exists() and there.suffix == ".html"
            if not there.exists() or (is_page and anchor and unquote(anchor) not in parsed(there)[0]):
                yield f"{path.relative_to(site)}: {link}"


def test_no_link_is_broken(built: Built) -> None:
    assert sorted(broken_links(built.folder))[:20] == []


def test_every_keyword_leads_to_an_anchor(built: Built) -> None:
    keywords = json.loads((built.folder / "keywords.json").read_text())["keywords"]
    assert len(keywords) == built.keywords > 2000
    missing = []
    for one in keywords:
        path, _, anchor = one["url"].partition("#")
        if anchor not in parsed(built.folder / path)[0]:
            missing.append(one["url"])
    assert missing[:20] == []


def test_a_package_of_others_is_built_without_a_warning(
    browser: Browser, tmp_path: Path, noise: list[str]
) -> None:
    words = ["docs", "--build", "json", "--out", str(tmp_path / "site"), "--strict", "--json"]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["pages"] == 5
    assert list(broken_links(tmp_path / "site")) == []
    page = opened(browser, tmp_path / "site" / "modules" / "json.encoder.html", noise, width=390)
    assert "JSONEncoder" in page.locator("#api").inner_text()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert noise == []
    page.close()
