"""The generator reads sources and docstrings of any style, and never imports them."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from repopages.cli import main
from repopages.errors import OptionError
from repopages.pages.book import Book
from repopages.pages.keywords import keywords_of, look_up
from repopages.pages.layout import SECTIONS, module_page
from repopages.reading import docstrings, findings
from repopages.reading.project import Project
from repopages.site.build import build, write_sources
from shop_checkout import write_checkout

import repopages


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    return write_checkout(tmp_path)


def test_names_are_public_where_they_are_exported_and_described_where_they_are_defined(shop: Path) -> None:
    project = Project.find(str(shop))
    names = {entry.name: entry.canonical for entry in project.entries}
    assert names == {"shop.sell": "shop._till.sell", "shop.Drink": "shop.goods.Tea"}
    assert [page.name for page in project.pages] == ["shop", "shop._till", "shop.goods"]
    assert project.imports["shop"] == {"shop._till", "shop.goods"}


def test_a_package_is_documented_without_importing_it(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(shop.parent)
    (shop / "deep.py").write_text(f"x = {'-' * 20_000}1")  # more than Python's parser takes
    assert [entry.word for entry in look_up("sell", "shop")] == ["sell"]
    assert "shop" not in sys.modules
    with pytest.raises(SystemExit, match="imported"):
        importlib.import_module("shop")


def test_a_page_has_what_the_source_says(shop: Path) -> None:
    book = Book(Project.find(str(shop)))
    till = module_page(book, book.project.page_of["shop._till"])
    assert "{py:function} sell(what: str, *, price: float=1.0) -> bool" in till
    assert ":param what: The thing, such as {py:obj}`Drink <shop.Drink>`." in till
    assert ":param price: In euros. At least 0." in till
    assert ":raises ValueError: If the price is negative." in till
    assert "price=… is negative: give … away instead" in till
    assert "starts processes: `subprocess.run`" in till
    assert "tests/test_shop.py" in till
    goods = module_page(book, book.project.page_of["shop.goods"])
    assert r":param grams: How much of \*it\*." in goods
    assert "{py:method} brew(minutes)" in goods
    assert "{py:attribute} leaves" in goods
    words = {entry.word: entry.url for entry in keywords_of(book, book.project.page_of["shop.goods"])}
    assert words["brew"] == "modules/shop.goods.html#shop.Drink.brew"
    assert words["grams"] == "modules/shop.goods.html#shop.Drink"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("Use ``a_b`` and :class:`Foo`.", "Use `a_b` and `Foo`."),
        ("A *star* and [x] <y>.", r"A \*star\* and \[x\] \<y\>."),
        ("Look::\n\n    x = 1\n\nDone.", "Look:\n\n```python\nx = 1\n```\n\nDone."),
        ("- one\n  more\n- two", "- one more\n- two"),
        (">>> 1 + 1\n2", "```pycon\n>>> 1 + 1\n2\n```"),
        ("Look:\n\n    not ! python", "Look:\n\n```text\nnot ! python\n```"),
        ("Root\n├── leaf", "```text\nRoot\n├── leaf\n```"),
    ],
)
def test_docstrings_become_markdown(given: str, expected: str) -> None:
    assert docstrings.markdown(given, lambda code: f"`{code}`") == expected


def test_sections_of_a_docstring_are_taken_apart() -> None:
    doc = docstrings.parse(
        "Do it.\n\nMore.\n\nArgs:\n    a: First\n        line.\n\n        - listed\n    *b: Rest.\n\n"
        "Safety:\n    Never."
    )
    assert (doc.summary, doc.body) == ("Do it.", "More.")
    assert doc.fields == [("param", "a", "First\nline.\n\n- listed"), ("param", "b", "Rest.")]
    assert doc.texts == {"safety": "Never."}


def test_a_pure_module_touches_nothing(shop: Path) -> None:
    modules = Project.find(str(shop)).modules
    assert findings.touches(modules["shop.goods"]) == {}
    assert findings.dependencies(modules["shop._till"], "shop") == (["subprocess"], [])


def test_a_word_is_looked_up_whole_then_in_part(shop: Path) -> None:
    assert [entry.kind for entry in look_up("SELL", str(shop))] == ["function"]
    assert look_up("rew", str(shop))[0].word == "brew"
    assert look_up("nothing", str(shop)) == []


def test_a_checkout_is_its_one_package(shop: Path) -> None:
    checkout = shop.parents[1]
    assert Project.find(str(checkout)).folder == shop
    (shop.parent / "other").mkdir()
    (shop.parent / "other" / "__init__.py").touch()
    with pytest.raises(OptionError, match=r"several packages: pass one of .*other, .*shop"):
        Project.find(str(checkout))


def run(*words: str) -> Result:
    return CliRunner().invoke(main, list(words))


def test_the_command_prints_entries_and_suggests_what_to_do(
    shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shop.parents[1])
    result = run("find", "sell")
    assert result.exit_code == 0
    assert "sell  function  modules/shop._till.html#shop.sell\n    Sell one thing.\n" in result.stdout
    found = json.loads(run("find", "infusion", "src/shop", "--json").stdout)
    assert [entry["page"] for entry in found if entry["kind"] == "concept"] == [
        "docs/glossary",
        "modules/shop.goods",
    ]
    for words in (["find"], ["find", "no-such-word"], ["find", "x", "no_such_package"], ["build", "nothing"]):
        result = run(*words)
        assert result.exit_code == 2
        assert "Error: " in result.stderr
        assert result.stdout == ""


def test_the_module_is_the_command() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "repopages", "--version"], capture_output=True, text=True, check=True
    ).stdout
    assert shown == f"repopages, version {repopages.__version__}\n"


def test_a_folder_with_other_files_is_not_replaced(tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(OptionError, match="a folder with other files"):
        build("json", tmp_path)
    assert (tmp_path / "mine.txt").exists()


@pytest.mark.parametrize("package", ["json", "concurrent", "click"])
def test_every_page_of_any_package_has_every_section_and_none_is_empty(package: str, tmp_path: Path) -> None:
    book = Book(Project.find(package))
    assert book.project.entries
    write_sources(book, tmp_path / "sources")
    for page in book.project.pages:
        text = (tmp_path / "sources" / f"{page.document}.md").read_text()
        parts = re.split(r"^## (.*)$", text, flags=re.M)
        titles, bodies = parts[1::2], parts[2::2]
        assert titles == [*SECTIONS, "Keywords"]
        for title, body in zip(titles, bodies, strict=True):
            assert len(re.sub(r"[\s|`:-]", "", body)) > 10, f"{title} is empty"
    keywords = json.loads((tmp_path / "sources" / "keywords.json").read_text())["keywords"]
    assert {entry.item.name for entry in book.project.entries} <= {entry["word"] for entry in keywords}
