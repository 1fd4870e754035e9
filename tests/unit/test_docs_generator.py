"""The generator reads sources and docstrings of any style, and never imports them."""

import importlib
import json
import sys
import textwrap
from pathlib import Path

import pytest
from click.testing import CliRunner

from thinwire.docs import docstrings, findings
from thinwire.docs.book import Book
from thinwire.docs.keywords import keywords_of
from thinwire.docs.lookup import look_up
from thinwire.docs.pages import module_page
from thinwire.docs.project import Project
from thinwire.docs.site import build
from thinwire.errors import OptionError
from thinwire_command import cli


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A package with a private module, a re-export under another name, and code that must not run."""
    files = {
        "pyproject.toml": "",
        "shop/__init__.py": '''
            """Sell things.

            Example::

                shop.sell("tea")
            """
            from shop._till import sell
            from shop.goods import Tea as Drink

            raise SystemExit("imported")
            __all__ = ["Drink", "sell"]
            ''',
        "shop/_till.py": '''
            """The till."""
            import subprocess

            def sell(what: str, *, price: float = 1.0) -> bool:
                """Sell one thing.

                Args:
                    what: The thing, such as `Drink`.
                    price: In euros.
                        At least 0.

                Returns:
                    Whether it was sold.

                Raises:
                    ValueError: If the price is negative.
                """
                if price < 0:
                    raise ValueError(f"price={price} is negative: give {what} away instead")
                subprocess.run(["true"])
                return True
            ''',
        "shop/goods.py": '''
            """Goods."""
            class Tea:
                """A drink.

                Parameters
                ----------
                grams : int
                    How much of *it*.
                """
                leaves = 3
                """Number of leaves."""

                def brew(self, minutes):
                    """Brew it."""
            ''',
        "tests/test_shop.py": "import shop\n\ndef test_sell():\n    shop.sell('tea')\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip())
    return tmp_path / "shop"


def test_names_are_public_where_they_are_exported_and_described_where_they_are_defined(shop: Path) -> None:
    project = Project.find(str(shop))
    names = {one.name: one.canonical for one in project.entries}
    assert names == {"shop.sell": "shop._till.sell", "shop.Drink": "shop.goods.Tea"}
    assert [page.name for page in project.pages] == ["shop", "shop._till", "shop.goods"]
    assert project.imports["shop"] == {"shop._till", "shop.goods"}


def test_a_package_is_documented_without_importing_it(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(shop.parent)
    (shop / "deep.py").write_text(f"x = {'-' * 20_000}1")  # more than Python's parser takes
    assert [one.word for one in look_up("sell", "shop")] == ["sell"]
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
    words = {one.word: one.url for one in keywords_of(book, book.project.page_of["shop.goods"])}
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
    assert [one.kind for one in look_up("SELL", str(shop))] == ["function"]
    assert look_up("rew", str(shop))[0].word == "brew"
    assert look_up("nothing", str(shop)) == []


def test_the_command_prints_entries_and_suggests_what_to_do() -> None:
    result = CliRunner().invoke(cli, ["docs", "powerSGD_hook", "--package", "src/thinwire"])
    assert result.exit_code == 0
    assert "function  modules/thinwire.ddp_comm_hooks.powerSGD_hook.html#" in result.stdout
    found = json.loads(CliRunner().invoke(cli, ["docs", "residual", "--json"]).stdout)
    assert any(one["kind"] == "concept" for one in found)
    for words in (["docs"], ["docs", "no-such-word"], ["docs", "x", "--package", "no_such_package"]):
        result = CliRunner().invoke(cli, words)
        assert result.exit_code == 2
        assert result.stderr.startswith("Error: ")


def test_a_folder_with_other_files_is_not_replaced(tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(OptionError, match="a folder with other files"):
        build("json", tmp_path)
    assert (tmp_path / "mine.txt").exists()
