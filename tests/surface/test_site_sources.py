"""thinwire's site, built by repopages: every public name once, every section filled, no warning."""

import inspect
import re
from functools import cache
from pathlib import Path

import pytest
from repopages.pages.book import Book
from repopages.pages.keywords import all_keywords
from repopages.pages.layout import SECTIONS, index_page, llms_text, module_page
from repopages.reading.docstrings import parse
from repopages.reading.project import Page, Project
from repopages.reading.relations import document_of
from repopages.site.build import build, write_sources

import thinwire
from tests.surface.test_surface import ARRIVED

ROOT = Path(__file__).parents[2]
BOOK = Book(Project.find(str(ROOT / "src" / "thinwire")))
PAGES = BOOK.project.pages


@cache
def text_of(page: Page) -> str:
    return module_page(BOOK, page)


def directives(text: str) -> list[str]:
    """The full names that a page documents."""
    found = re.findall(r"^:{6}\{py:\w+\} (\w+).*\n:module: (.*)$", text, flags=re.M)
    return [f"{module}.{name}" for name, module in found]


def exported() -> list[str]:
    """Every name of every `__all__`."""
    return [
        f"{module.name}.{name}" for module in BOOK.project.modules.values() for name in module.exports or ()
    ]


def test_every_exported_name_is_documented_exactly_once_and_in_the_index() -> None:
    documented = [name for page in PAGES for name in directives(text_of(page))]
    assert len(documented) == len(set(documented))
    entry_of = {name: entry for entry in BOOK.project.entries for name in (entry.name, *entry.aliases)}
    assert [name for name in exported() if name not in entry_of] == []
    words = {keyword.word for keyword in all_keywords(BOOK)}
    for name in exported():
        assert documented.count(entry_of[name].name) == 1, name
        assert name.rpartition(".")[2] in words


def test_the_public_names_are_those_of_the_package() -> None:
    names = {name for entry in BOOK.project.entries for name in (entry.name, *entry.aliases)}
    assert {f"thinwire.{name}" for name in thinwire.__all__} <= names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_page_has_every_section_and_none_is_empty(page: Page) -> None:
    text = text_of(page)
    parts = re.split(r"^## (.*)$", text, flags=re.M)
    titles, bodies = parts[1::2], parts[2::2]
    assert [title for title in titles if not title.startswith("Switch from ")] == [*SECTIONS, "Keywords"]
    for title, body in zip(titles, bodies, strict=True):
        assert len(re.sub(r"[\s|`:-]", "", body)) > 10, f"{title} is empty"
    assert "| |" not in text.replace("|  |  |", ""), "a table has an empty cell"


@pytest.mark.parametrize("module", ARRIVED)
def test_pages_of_torchs_modules_say_what_differs_and_how_to_switch(module: str) -> None:
    ours = f"thinwire.{module.removeprefix('algorithms.')}"
    text = text_of(BOOK.project.page_of[ours])
    switch = text.split("## Switch from torch\n")[1].split("\n## ")[0]
    assert "# before\nfrom torch.distributed" in switch
    assert "# after\nfrom thinwire" in switch


def test_every_module_and_every_page_of_the_checkout_can_be_reached_from_the_start() -> None:
    index = index_page(BOOK)
    for page in PAGES:
        assert f"</{page.document}>" in index
    for path in ROOT.glob("docs/**/*.md"):
        assert f"/{document_of(path.relative_to(ROOT).as_posix())}" in index or path.name == "README.md"
    assert {module.name for page in PAGES for module in page.modules} == set(BOOK.project.modules)


def test_keywords_lead_to_sections_that_exist_and_concepts_to_the_glossary() -> None:
    found = all_keywords(BOOK)
    pages = {page.document: page for page in PAGES}
    for keyword in found:
        if keyword.page in pages and keyword.kind in ("function", "class", "method", "property", "exception"):
            sections = {"overview", "purpose"} | {"dependencies"}
            anchors = directives(text_of(pages[keyword.page]))
            known = keyword.anchor in sections or keyword.anchor.startswith("module-")
            assert known or keyword.anchor in anchors or keyword.anchor.rpartition(".")[0] in anchors, keyword
    residual = [keyword for keyword in found if keyword.word == "residual" and keyword.kind == "concept"]
    assert any(keyword.page == "docs/glossary" for keyword in residual)
    (hook,) = [keyword for keyword in found if keyword.word == "powerSGD_hook" and keyword.kind == "function"]
    assert hook.url == (
        "modules/thinwire.ddp_comm_hooks.powerSGD_hook.html"
        "#thinwire.ddp_comm_hooks.powerSGD_hook.powerSGD_hook"
    )


def test_assistants_get_every_page_with_a_line() -> None:
    text = llms_text(BOOK)
    assert text.startswith("# thinwire\n\n> Fast and safe")
    assert all(f"[{page.name}]({page.document}.html): " in text for page in PAGES)


def test_the_api_page_has_every_public_name_with_its_summary() -> None:
    rows = dict(re.findall(r"^\| `([\w.]+)` \| (.*) \|$", (ROOT / "docs/api.md").read_text(), flags=re.M))
    entries = {entry.name.removeprefix("thinwire."): entry.item for entry in BOOK.project.entries}
    expected = {name: parse(item.doc).summary for name, item in entries.items() if item.doc}
    assert {name: rows.get(name) for name in expected} == expected
    assert rows.keys() == entries.keys()


def test_the_readme_is_the_start_page(tmp_path: Path) -> None:
    write_sources(BOOK, tmp_path / "sources")
    index = (tmp_path / "sources" / "index.md").read_text()
    assert index.startswith("# thinwire\n")
    assert "## Two commands" in index
    assert "{toctree}" in index
    assert not (tmp_path / "sources" / "README.md").exists()
    assert "{py:obj}`Int8 <thinwire.Int8>`" in (tmp_path / "sources" / "docs" / "api.md").read_text()


def test_the_package_has_public_names_and_internal_modules_are_not_listed_as_public() -> None:
    (package,) = (page for page in PAGES if page.name == "thinwire")
    assert re.search(r"\| public names \| \d+ that its modules define \|", text_of(package))
    public = {page.name for page in PAGES if not page.internal}
    assert {"thinwire.attach", "thinwire.telemetry.sinks", "thinwire.integrations.accelerate"} <= public
    assert not public & {"thinwire.step.options", "thinwire.plan.units", "thinwire.models.fsdp.internals"}


def test_a_signature_has_the_options_of_the_base_class() -> None:
    (diloco,) = (entry.item for entry in BOOK.project.entries if entry.name == "thinwire.DiLoCo")
    options = tuple(inspect.signature(thinwire.DiLoCo).parameters)
    assert diloco.parameters == options
    assert "warmup_steps" in options
    assert "program: Program = Exact()" in diloco.signature


@pytest.mark.slow  # half a minute of Sphinx
def test_the_site_is_built_without_a_warning_or_a_broken_link(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="the site is built with Sphinx, which needs Python 3.11")
    built = build(str(ROOT / "src" / "thinwire"), tmp_path / "site")
    assert built.warnings == ()
    assert built.pages > 60
    assert built.keywords > 2000
