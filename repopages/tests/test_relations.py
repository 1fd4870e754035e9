"""Modules are named, linked and found as Python would import them; tests and documents are found by use."""

from pathlib import Path
from textwrap import dedent

import pytest
from repopages.reading.read import read
from repopages.reading.repository import Repository
from repopages.relations.library import Library, Place


def library(root: Path, files: dict[str, str]) -> Library:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(dedent(text))
    opened = Repository.open(str(root))
    facts = {path: read(root, path) for path in opened.files}
    return Library(opened.root, opened.name, facts, opened.prefix, opened.warnings)


def targets(made: Library, path: str) -> list[str]:
    return [edge.target for edge in made.imports(path)]


SHOP = {
    "pyproject.toml": "[project]\nname = 'shop'\n",
    "src/shop/__init__.py": '''
        """A shop."""
        from shop._till import sell
        from .goods import Tea as Drink
        from . import stock
        __all__ = ["sell", "Drink"]
    ''',
    "src/shop/_till.py": '''
        import json
        import requests
        from . import goods
        from .stock import *
        def sell(what: "goods.Tea") -> bool:
            """Sell. See `Drink`, `count_all` and `Tea.brew`."""
        def _inner(): ...
    ''',
    "src/shop/goods.py": """
        from dataclasses import dataclass
        class Ware:
            def weigh(self): ...
        class Tea(Ware):
            def brew(self, minutes): ...
    """,
    "src/shop/stock.py": """
        import shop.goods as wares
        __all__ = ["count_all"]
        def count_all(): ...
    """,
    "tests/test_goods.py": """
        import shop
        from shop import Drink, sell
        def test_it():
            assert shop.Drink().brew(3) and sell(1)
    """,
    "tests/helpers.py": "from shop import Drink\n",
    "examples/buy.py": "from shop import sell\nsell('tea')\n",
    "docs/guide.md": """
        # Guide

        Buy and sell.

        ## Counting

        Use `count_all` for it.

        ## Source

        It is in [the till](../src/shop/_till.py#L3) and [nowhere](https://example.org/_till.py).
    """,
    "CHANGELOG.md": "# Changes\n\n- `count_all` is new\n",
}


@pytest.fixture
def shop(tmp_path: Path) -> Library:
    return library(tmp_path, SHOP)


def test_modules_have_the_names_that_python_imports_them_by(tmp_path: Path) -> None:
    made = library(
        tmp_path,
        {
            "src/pkg/__init__.py": "",
            "src/pkg/sub/mod.py": "",
            "src/google/cloud/thing/__init__.py": "",
            "src/google/cloud/use.py": "import google.cloud.thing\n",
            "space/tools/a.py": "import space.tools.b\n",
            "space/tools/b.py": "",
            "scripts/run.py": "import util\n",
            "scripts/util.py": "",
            "other/util.py": "",
            "lib/single.py": "",
            "tests/unit/test_a.py": "import single\n",
        },
    )
    names = {path: made.module(path) for path in made.files}
    assert names == {
        "src/pkg/__init__.py": "pkg",
        "src/pkg/sub/mod.py": "pkg.sub.mod",
        "src/google/cloud/thing/__init__.py": "google.cloud.thing",
        "src/google/cloud/use.py": "google.cloud.use",
        "space/tools/a.py": "space.tools.a",
        "space/tools/b.py": "space.tools.b",
        "scripts/run.py": "run",
        "scripts/util.py": "util",
        "other/util.py": "util",
        "lib/single.py": "single",
        "tests/unit/test_a.py": "test_a",
    }
    assert targets(made, "scripts/run.py") == ["scripts/util.py"]
    assert targets(made, "space/tools/a.py") == ["space/tools/b.py"]
    assert targets(made, "tests/unit/test_a.py") == ["lib/single.py"]


def test_a_folder_of_an_installed_package_links_absolute_imports(tmp_path: Path) -> None:
    root = tmp_path / "site-packages" / "torch" / "distributed"
    for folder in (root.parent, root, root / "hooks"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").write_text("")
    made = library(
        root,
        {
            "hooks/power.py": "import torch.distributed.hooks.default as d\nimport torch.nn\nimport os\n",
            "hooks/default.py": "from torch.distributed.hooks import power\n",
            "plain/c.py": "from torch.distributed.hooks.default import power\n",
        },
    )
    assert made.prefix == "torch.distributed"
    assert made.module("hooks/power.py") == "torch.distributed.hooks.power"
    assert made.module("plain/c.py") == "torch.distributed.plain.c"
    assert targets(made, "hooks/power.py") == ["hooks/default.py"]
    assert targets(made, "hooks/default.py") == ["hooks/power.py"]
    assert made.outside("hooks/power.py") == {"standard library": ["os"], "other packages": ["torch.nn"]}


def test_imports_lead_to_the_module_and_to_the_definition(shop: Library) -> None:
    assert targets(shop, "src/shop/_till.py") == ["src/shop/goods.py", "src/shop/stock.py"]
    edges = {(edge.target, edge.through): edge.names for edge in shop.imports("tests/test_goods.py")}
    assert edges == {
        ("src/shop/__init__.py", ""): ("Drink", "sell"),
        ("src/shop/goods.py", "src/shop/__init__.py"): ("Drink",),
        ("src/shop/_till.py", "src/shop/__init__.py"): ("sell",),
    }
    importers = [edge.source for edge in shop.importers("src/shop/goods.py")]
    assert importers == sorted(importers)
    assert shop.outside("src/shop/_till.py") == {"standard library": ["json"], "other packages": ["requests"]}
    assert shop.chain("src/shop/goods.py") == ["src/shop/__init__.py", "src/shop/goods.py"]
    assert shop.chain("tests/test_goods.py") == []


def test_a_module_is_not_hidden_by_one_of_the_same_name(tmp_path: Path) -> None:
    made = library(
        tmp_path,
        {
            "pkg/__init__.py": "",
            "pkg/json.py": "import json\nfrom . import types\n",
            "pkg/types.py": "import types, yaml\n",
            "tools/yaml.py": "",
            "setup.py": "import types\n",
            "types.py": "",
        },
    )
    assert targets(made, "pkg/json.py") == ["pkg/types.py"]
    assert targets(made, "pkg/types.py") == ["types.py"]  # as for a script that runs in this folder
    assert targets(made, "setup.py") == ["types.py"]
    assert made.outside("pkg/json.py") == {"standard library": ["json"]}


def test_public_names_are_the_shortest_that_users_import(shop: Library) -> None:
    assert [entry[:2] for entry in shop.public("src/shop/_till.py")] == [("shop.sell", "sell")]
    assert [entry[:2] for entry in shop.public("src/shop/goods.py")] == [("shop.Drink", "Tea")]
    assert [entry[:2] for entry in shop.public("src/shop/stock.py")] == [
        ("shop.stock.count_all", "count_all")
    ]
    assert shop.public("tests/test_goods.py") == []


@pytest.mark.parametrize(
    ("name", "path", "found"),
    [
        ("Drink", "src/shop/_till.py", ("src/shop/goods.py", "Tea")),
        ("goods.Tea", "src/shop/_till.py", ("src/shop/goods.py", "Tea")),
        ("goods.Tea.brew()", "src/shop/_till.py", ("src/shop/goods.py", "Tea.brew")),
        ("goods.Tea.weigh", "src/shop/_till.py", ("src/shop/goods.py", "Ware.weigh")),
        ("Tea.brew", "src/shop/goods.py", ("src/shop/goods.py", "Tea.brew")),
        ("shop.stock", "src/shop/goods.py", ("src/shop/stock.py", "")),
        ("count_all", "src/shop/_till.py", ("src/shop/stock.py", "count_all")),
        ("sell", "docs/guide.md", ("src/shop/_till.py", "sell")),
        ("src/shop/goods.py", "docs/guide.md", ("src/shop/goods.py", "")),
        ("../src/shop/goods.py", "docs/guide.md", ("src/shop/goods.py", "")),
        ("json.loads", "src/shop/_till.py", None),
        ("requests.get", "src/shop/_till.py", None),
        ("requests", "src/shop/_till.py", None),
        ("print", "src/shop/_till.py", None),
        ("no such name", "src/shop/_till.py", None),
        ("../../../etc/passwd", "docs/guide.md", None),
        ("", "docs/guide.md", None),
    ],
)
def test_names_are_found_where_they_are_defined(
    shop: Library, name: str, path: str, found: tuple[str, str] | None
) -> None:
    place = shop.find(name, path)
    assert (place and (place.path, place.name)) == found
    assert place is None or (place.item is None) == (place.name == "")


def test_tests_and_examples_are_found_by_what_they_use(shop: Library) -> None:
    (test,) = shop.tests("src/shop/goods.py")
    assert (test.path, test.line, test.how, test.count) == ("tests/test_goods.py", 3, "is named after it", 1)
    assert [(use.path, use.how) for use in shop.tests("src/shop/_till.py")] == [
        ("tests/test_goods.py", "imports it")
    ]
    assert [(use.path, use.how) for use in shop.tests("src/shop/stock.py")] == [
        ("tests/test_goods.py", "imports a file that imports it")
    ]
    assert [use.path for use in shop.examples("src/shop/_till.py")] == ["examples/buy.py"]


def test_documents_are_found_by_links_and_distinctive_names(shop: Library) -> None:
    assert [(path, section.title) for path, section in shop.documents("src/shop/_till.py")] == [
        ("docs/guide.md", "Source")  # "sell" in the text is an English word
    ]
    assert [(path, section.title) for path, section in shop.documents("src/shop/stock.py")] == [
        ("docs/guide.md", "Counting")
    ]
    assert [edge.target for edge in shop.links("docs/guide.md")] == ["src/shop/_till.py"]
    assert [edge.source for edge in shop.linked("src/shop/_till.py")] == ["docs/guide.md"]


def test_related_files_are_given_once_with_a_reason(shop: Library) -> None:
    related = dict(shop.related("src/shop/goods.py"))
    assert related["tests/test_goods.py"] == "its test"
    assert related["src/shop/_till.py"] == "imports it"
    assert "src/shop/goods.py" not in related
    assert dict(shop.related("src/shop/stock.py"))["src/shop/goods.py"] == "imported by it"


def test_folders_contain_files_and_folders(shop: Library) -> None:
    assert shop.folders[""].folders == ("docs", "examples", "src", "tests")
    assert shop.folders[""].files == ("CHANGELOG.md", "pyproject.toml")
    assert shop.folders["src"].folders == ("src/shop",)
    assert shop.folders["src"].files == ()
    assert Library(Path("/"), "empty", {}).folders[""].files == ()


def test_circles_of_re_exports_and_bases_end(tmp_path: Path) -> None:
    made = library(
        tmp_path,
        {
            "a/__init__.py": "from .b import *\nfrom .b import x\n",
            "a/b.py": "from a import *\nfrom a import x\nclass A(B): ...\nclass B(A): ...\n",
            "a/c.py": "from a.b import x, y, A\nfrom .c import z\n",
            **{f"s/m{n}.py": "".join(f"from .m{k} import *\n" for k in range(30)) for n in range(30)},
            "s/__init__.py": "from .m0 import *\n",
        },
    )
    assert made.find("x", "a/c.py") is None
    assert made.find("A.nothing", "a/b.py") is None
    assert made.find("nothing_anywhere", "s/m3.py") is None
    assert made.find("A", "a/c.py") == Place(path="a/b.py", name="A", item=made.files["a/b.py"].items[0])


def test_data_classes_take_the_fields_of_bases_in_other_files(tmp_path: Path) -> None:
    made = library(
        tmp_path,
        {
            "base.py": """
                from dataclasses import dataclass, field
                @dataclass
                class Ware:
                    name: str
                    price: float = 1.0
                    tags: list = field(default_factory=list, kw_only=True)
            """,
            "tea.py": """
                from dataclasses import dataclass
                import base
                @dataclass
                class Tea(base.Ware):
                    leaves: str = "green"
                @dataclass
                class Other(Tea):
                    def __init__(self): ...
                class Plain(base.Ware): ...
            """,
        },
    )
    tea, other, plain = made.files["tea.py"].items
    assert tea.signature == "(name: str, price: float = 1.0, leaves: str = 'green', *, tags: list = list())"
    assert tea.parameters == ("name", "price", "leaves", "tags")
    assert other.signature == "()"
    assert plain.signature == ""


@pytest.mark.timeout(30)
def test_long_names_and_hostile_settings_take_no_time(tmp_path: Path) -> None:
    dots = "a" + ".b" * 5_000
    made = library(
        tmp_path,
        {
            "dots.py": f"import {dots}\nx = {dots}\n",
            "test_dots.py": f"import a\ndef test_it():\n    {dots}\n",
            "package.json": "/*" * 100_000,
            "app/tsconfig.json": "/*" * 16_000,
            "app/a.ts": f'import x from "{"../" * 20_000}y";\nimport "x";\n',
            "run.sh": f". {'$' * 50_000}\n",
            "Cargo.toml": "name\n" * 20_000,
            "lib.rs": f"use {'a::' * 20_000}b;\n",
        },
    )
    for path in made.files:
        for ask in (made.related, made.outside, made.public, made.tests, made.documents, made.chain):
            ask(path)
        assert made.find(dots, path) is None
        assert made.find("(" * 100_000, path) is None


def test_names_that_are_used_before_they_are_imported_in_a_try(tmp_path: Path) -> None:
    made = library(
        tmp_path,
        {
            "p/__init__.py": "fast = None\ntry:\n    from ._fast import fast\nfinally:\n    pass\n",
            "p/_fast.py": "def fast(): ...\n",
            "p/use.py": "from p import fast\n",
        },
    )
    place = made.find("fast", "p/use.py")
    assert place is not None
    assert place.path == "p/_fast.py"


def test_files_with_problems_are_part_of_the_library(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_bytes(b"def broken(:\n    import os\n\xff\xfe\x00")
    (tmp_path / "loop").symlink_to("loop")
    made = library(tmp_path, {"good.py": "import bad\nimport loop\n", "x.json": "{"})
    for path in made.files:
        for ask in (made.related, made.outside, made.public, made.tests, made.documents, made.chain):
            ask(path)
    assert sorted(made.files) == ["bad.py", "good.py", "loop", "x.json"]
