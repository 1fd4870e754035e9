"""The documentation site in a real browser: pages render, the search finds names, links lead somewhere."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from playwright.sync_api import Browser, Page, sync_playwright
from repopages.cli import main
from repopages.site.links import broken_links
from shop_checkout import write_checkout

pytest.importorskip("sphinx", reason="the site is built with Sphinx, which needs Python 3.11")
from repopages.site.build import Built, build

pytestmark = pytest.mark.slow

TILL = "modules/shop._till.html"
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    assert chromium, "the browser test needs Chromium: apt-get install chromium (make test does it as root)"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("docs")
    write_checkout(folder)
    return build(str(folder), folder / "site")


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


def test_a_site_is_built_without_a_warning(built: Built) -> None:
    assert built.warnings == ()
    assert built.pages == 3
    assert json.loads((built.folder / "keywords.json").read_text())["package"] == "shop"
    assert "[shop._till](modules/shop._till.html): The till." in (built.folder / "llms.txt").read_text()


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_pages_render_in_light_and_dark_and_fit_a_phone(
    browser: Browser, built: Built, noise: list[str], width: int, dark: bool
) -> None:
    for name in ("index.html", TILL, "docs/glossary.html", "keywords.html"):
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
    page = opened(browser, built.folder / TILL, noise)
    box = page.locator("svg.neighbours").bounding_box()
    assert box is not None
    assert box["width"] > 300
    assert page.locator("svg.neighbours g.here text").text_content() == "_till"
    page.locator("#source li a").first.click()
    assert page.locator(".highlight").inner_text().count("\n") > 20
    assert noise == []
    page.close()


@pytest.mark.parametrize(("word", "title"), [("sell", "sell"), ("brew", "brew"), ("infusion", "Glossary")])
def test_the_search_finds(browser: Browser, built: Built, noise: list[str], word: str, title: str) -> None:
    page = opened(browser, built.folder / "index.html", noise)
    page.locator("input[name=q]").first.fill(word)
    page.keyboard.press("Enter")
    page.wait_for_selector("ul.search li a", timeout=300_000)
    first = page.locator("ul.search li a").first
    found = " ".join(page.locator("ul.search li").all_inner_texts()[:8])
    assert title in found
    first.click()
    page.wait_for_load_state()
    assert word in page.content()
    assert noise == []
    page.close()


def test_the_index_leads_to_the_right_section(browser: Browser, built: Built, noise: list[str]) -> None:
    page = opened(browser, built.folder / "keywords.html", noise)
    row = page.locator("dl.keywords > div", has=page.locator("dt", has_text=re.compile("^brew$")))
    row.locator("a").first.click()
    assert page.url.endswith("#shop.Drink.brew")
    target = page.locator("[id='shop.Drink.brew']")
    assert "brew(" in target.inner_text()
    assert noise == []
    page.close()


def test_broken_links_are_found(built: Built, tmp_path: Path) -> None:
    assert broken_links(built.folder, ["keywords.html#b", "keywords.html#none", "none.html"]) == [
        "keywords.json: broken link to keywords.html#none",
        "keywords.json: broken link to none.html",
    ]
    (tmp_path / "page.html").write_text(
        '<a id="here" href="#here"></a><a href="https://x.org/y"></a><a href="#there"></a><img src="no.png">'
    )
    assert broken_links(tmp_path) == ["page.html: broken link to #there", "page.html: broken link to no.png"]


def test_an_installed_package_is_built_without_a_warning(
    browser: Browser, tmp_path: Path, noise: list[str]
) -> None:
    words = ["build", "json", "--out", str(tmp_path / "site"), "--strict", "--json"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["pages"] == 5
    page = opened(browser, tmp_path / "site" / "modules" / "json.encoder.html", noise, width=390)
    assert "JSONEncoder" in page.locator("#api").inner_text()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert noise == []
    page.close()


def test_strict_fails_after_a_warning(tmp_path: Path) -> None:
    write_checkout(tmp_path)
    (tmp_path / "README.md").write_text("# The shop\n\n[nowhere](nowhere.md)\n")
    words = ["build", str(tmp_path), "--out", str(tmp_path / "site")]
    assert CliRunner().invoke(main, words).exit_code == 0
    result = CliRunner().invoke(main, [*words, "--strict"])
    assert result.exit_code == 1
    assert "nowhere.md" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("Error: the site of ")
