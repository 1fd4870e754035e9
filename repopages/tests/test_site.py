"""The site in a real browser: pages render, the search finds names, and hostile files are inert."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from hostile_checkout import write_hostile
from playwright.sync_api import Browser, Dialog, Page, expect, sync_playwright
from repopages.relations.library import open_library

pytest.importorskip("sphinx", reason="the site is built with Sphinx, which needs Python 3.11")
from repopages.site.build import Built, build

pytestmark = pytest.mark.slow

HOOKS = "files/ddp_comm_hooks"
PAGES = {
    f"{HOOKS}/powerSGD_hook.py_docs": ["PowerSGDState", "batched_powerSGD_hook", "_orthogonalize"],
    f"{HOOKS}/post_localSGD_hook.py_docs": ["PostLocalSGDState", "post_localSGD_hook"],
    f"{HOOKS}/ddp_zero_hook.py_docs": ["hook_with_zero_step", "hook_with_zero_interleaved_fn"],
    "files/model_averaging/hierarchical_model_averager.py_docs": ["HierarchicalModelAverager"],
}
"""Pages of torch's `distributed/algorithms`, each with names that it explains."""

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
    pytest.importorskip("torch", reason="the pages are those of torch's distributed/algorithms")
    library = open_library("torch.distributed.algorithms", jobs=1)
    return build(library, tmp_path_factory.mktemp("docs") / "site", jobs=1)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("hostile")
    return build(open_library(str(write_hostile(folder / "checkout")), jobs=1), folder / "site", jobs=1)


@pytest.fixture
def noise() -> list[str]:
    return []


def opened(browser: Browser, path: Path, noise: list[str], *, width: int = 1280, dark: bool = False) -> Page:
    def dismiss(dialog: Dialog) -> None:
        noise.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    page = browser.new_page(
        viewport={"width": width, "height": 850}, color_scheme="dark" if dark else "light"
    )
    page.on("console", lambda message: noise.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: noise.append(f"error: {error}"))
    page.on("dialog", dismiss)
    page.on(
        "request",
        lambda request: None if request.url.startswith(("file:", "data:")) else noise.append(request.url),
    )
    page.goto(f"file://{quote(str(path))}")
    return page


def test_a_site_is_built_without_a_warning(built: Built) -> None:
    assert built.warnings == ()
    assert built.pages > 50
    assert built.keywords > 500


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
@pytest.mark.parametrize(
    "name", [*PAGES, "index", "files/index", "files/ddp_comm_hooks/doc", "keywords", "keywords/P"]
)
def test_pages_render_in_light_and_dark_and_fit_a_phone(
    browser: Browser, built: Built, noise: list[str], name: str, width: int, dark: bool
) -> None:
    page = opened(browser, built.folder / f"{name}.html", noise, width=width, dark=dark)
    assert page.locator("h1").first.inner_text()
    assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{name} scrolls sideways"
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") != dark, background
    text = page.locator("article").inner_text()
    assert [word for word in PAGES.get(name, []) if word not in text] == []
    assert not re.search(
        r":(?:class|func|meth|attr):`|\.\. (?:warning|note)::|<!--", text.partition("High-level")[2]
    )
    assert noise == []
    page.close()


def test_a_page_shows_its_source_and_a_link_leads_to_a_line(
    browser: Browser, built: Built, noise: list[str]
) -> None:
    path = built.folder / f"{HOOKS}/powerSGD_hook.py_docs.html"
    page = opened(browser, path, noise)
    assert page.locator(".listing .highlight").inner_text().count("\n") > 500
    link = page.locator("article a[href^='#L-']").filter(has_not=page.locator(".linenos")).last
    target = link.get_attribute("href")
    assert target
    link.click()
    assert page.url.endswith(target)
    expect(page.locator(f"[id='{target[1:]}'] + a")).to_be_in_viewport()
    assert noise == []
    page.close()


def test_the_drawing_leads_to_neighbours(browser: Browser, built: Built, noise: list[str]) -> None:
    page = opened(browser, built.folder / f"{HOOKS}/post_localSGD_hook.py_docs.html", noise)
    drawing = page.locator("svg.neighbours")
    box = drawing.bounding_box()
    assert box is not None
    assert box["width"] > 300
    drawing.locator("a").first.click()
    page.wait_for_load_state()
    assert "_docs.html" in page.url
    assert noise == []
    page.close()


def test_the_path_and_the_sidebar_lead_to_folders(browser: Browser, built: Built, noise: list[str]) -> None:
    page = opened(browser, built.folder / f"{HOOKS}/powerSGD_hook.py_docs.html", noise)
    assert page.locator(".sidebar-tree .current-page").inner_text() == "powerSGD_hook.py"
    page.locator(".breadcrumbs a", has_text="ddp_comm_hooks").click()
    page.wait_for_load_state()
    assert page.url.endswith("/files/ddp_comm_hooks/index.html")
    page.locator(".sidebar-tree a", has_text="model_averaging/").click()
    page.wait_for_load_state()
    assert page.url.endswith("/files/model_averaging/index.html")
    assert noise == []
    page.close()


@pytest.mark.parametrize(
    ("word", "result"),
    [
        ("powerSGD_hook", "powerSGD_hook"),
        ("HierarchicalModelAverager", "HierarchicalModelAverager"),
        ("hook_with_zero_interleaved_fn", "ddp_zero_hook.py"),
        ("start_powerSGD_iter", "powerSGD_hook"),
    ],
)
def test_the_search_finds(browser: Browser, built: Built, noise: list[str], word: str, result: str) -> None:
    page = opened(browser, built.folder / "index.html", noise)
    page.locator("input[name=q]").first.fill(word)
    page.keyboard.press("Enter")
    page.wait_for_selector("ul.search li a", timeout=300_000)
    assert result in " ".join(page.locator("ul.search li").all_inner_texts()[:8])
    page.locator("ul.search li a").first.click()
    page.wait_for_load_state()
    assert word in page.content()
    assert noise == []
    page.close()


def test_the_search_finds_pages_with_special_names(
    browser: Browser, hostile: Built, noise: list[str]
) -> None:
    page = opened(browser, hostile.folder / "index.html", noise)
    page.locator("input[name=q]").first.fill("percent")
    page.keyboard.press("Enter")
    page.wait_for_selector("ul.search li a", timeout=300_000)
    page.locator("ul.search li a").first.click()
    page.wait_for_load_state()
    assert "100%?.py" in page.locator("h1").first.inner_text()
    assert noise == []
    page.close()


def test_hostile_files_are_inert(browser: Browser, hostile: Built, noise: list[str]) -> None:
    pages = [path for path in sorted(hostile.folder.rglob("*.html")) if "_static" not in path.parts]
    assert len(pages) > 30
    page = opened(browser, pages[0], noise)
    for path in pages:
        page.goto(f"file://{quote(str(path))}")
        for control in page.locator("article a:not([href]), article summary, article b").all():
            if control.is_visible():
                control.click()
                control.hover()
        assert "root:x:" not in page.content()
        assert page.locator("article").is_visible() or path.name == "search.html"
    page.wait_for_timeout(300)
    assert noise == []
    page.close()
