"""thinwire's site, built by repopages: every file and every public name, every section filled, no warning."""

import inspect
import json
import re
from functools import cache
from pathlib import Path

import pytest
from repopages.pages.book import SECTIONS, Book, Keyword, Page
from repopages.pages.dialect import GitHub
from repopages.pages.indexes import llms_text
from repopages.pages.keywords import all_keywords
from repopages.pages.layout import file_text
from repopages.reading.docstrings import parse
from repopages.reading.model import Item
from repopages.relations.library import Library, open_library

import thinwire
from tests.surface.test_surface import ARRIVED

ROOT = Path(__file__).parents[2]
PACKAGE = "src/thinwire/"


@pytest.fixture(scope="module", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REPOPAGES_CACHE", str(tmp_path_factory.mktemp("cache")))
        library()  # read once, by all tests


@cache
def library() -> Library:
    return open_library(str(ROOT), exclude=["/site/"])


@cache
def book() -> Book:
    return Book(library(), GitHub())


@cache
def text_of(path: str) -> str:
    return file_text(Page(book(), path))


@cache
def keywords() -> list[Keyword]:
    return all_keywords(book())


@cache
def sources() -> dict[str, str]:
    """The path of every module of the package, by its name."""
    return {
        library().module(path): path
        for path in library().files
        if path.startswith(PACKAGE) and path.endswith(".py")
    }


@cache
def public() -> dict[str, tuple[str, str, Item]]:
    """Path, dotted name in the file and definition of every public name: exported, or of a drop-in module."""
    found = {}
    drop_in = {f"thinwire.{module.removeprefix('algorithms.')}" for module in ARRIVED}
    for path in sources().values():
        for name, inner, item in library().public(path):
            module, _, last = name.rpartition(".")
            exports = library().files[sources()[module]].exports if module in sources() else None
            if last in (exports or ()) or (not exports and module in drop_in and "." not in inner):
                found[name] = (path, inner, item)
    return found


def test_every_file_of_the_package_is_documented() -> None:
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / PACKAGE).rglob("*.py")}
    assert files == set(sources().values())
    assert {
        "Makefile",
        "pyproject.toml",
        "docs/api.md",
        ".github/workflows/docs.yml",
    } <= library().files.keys()


def test_every_exported_name_is_documented_exactly_once_and_in_the_index() -> None:
    exported = {
        f"{module}.{name}"
        for module, path in sources().items()
        for name in library().files[path].exports or ()
    }
    words = {keyword.word for keyword in keywords()}
    for name in exported:
        module, _, last = name.rpartition(".")
        place = library().find(last, sources()[module])
        assert place is not None, name
        if place.name:  # not a module
            anchor = book().anchors(place.path)[place.name]
            assert text_of(place.path).count(f'<a id="{anchor}"></a>') == 1, name
        assert last in words, name


def test_the_public_names_are_those_of_the_package() -> None:
    names = set(public()) | set(sources())
    assert {f"thinwire.{name}" for name in thinwire.__all__} <= names


@pytest.mark.parametrize("role", ["source", "test", "document", "data", "other"])
def test_every_page_has_every_section_and_none_is_empty(role: str) -> None:
    paths = [path for path, facts in library().files.items() if facts.role == role]
    assert paths
    for path in paths:
        text = text_of(path)
        parts = re.split(
            r"^## (.*)$", re.sub(r"^(`{3,}).*?^\1$", "code of it", text, flags=re.M | re.S), flags=re.M
        )
        assert parts[1::2] == [*SECTIONS, "Keywords"], path
        for title, body in zip(parts[1::2], parts[2::2], strict=True):
            assert len(re.sub(r"[\s|`:-]", "", body)) > 2, f"{title} of {path} is empty"


@pytest.mark.parametrize("module", ARRIVED)
def test_pages_of_torchs_modules_say_what_differs_and_how_to_switch(module: str) -> None:
    text = text_of(sources()[f"thinwire.{module.removeprefix('algorithms.')}"])
    switch = text.split("### Switch from torch\n")[1].split("\n## ")[0]
    assert "# before\nfrom torch.distributed" in switch
    assert "# after\nfrom thinwire" in switch


def test_keywords_lead_to_sections_that_exist_and_concepts_to_the_glossary() -> None:
    found = [keyword for keyword in keywords() if keyword.path.startswith(PACKAGE)]
    for path in sources().values():
        text = text_of(path)
        headings = re.findall(r"^#+ (.*)$", text, flags=re.M)
        anchors = {title.lower().replace(" ", "-") for title in headings} | set(
            re.findall(r'<a id="([^"]*)"', text)
        )
        lost = [keyword for keyword in found if keyword.path == path and keyword.anchor not in anchors]
        assert lost == []
    residual = [keyword for keyword in keywords() if keyword.word.lower() == "residual"]
    assert any(keyword.path == "docs/glossary.md" for keyword in residual)
    (hook,) = [keyword for keyword in found if keyword.word == "powerSGD_hook" and keyword.kind == "function"]
    assert hook.url("files/", ".html") == (
        "files/src/thinwire/ddp_comm_hooks/powerSGD_hook.py_docs.html#powerSGD_hook"
    )


def test_assistants_get_every_page() -> None:
    text = llms_text(book())
    assert text.startswith("# ")
    assert all(f"({path}_docs.md)" in text for path in sources().values())


def test_the_api_page_has_every_public_name_with_its_summary() -> None:
    rows = dict(re.findall(r"^\| `([\w.]+)` \| (.*) \|$", (ROOT / "docs/api.md").read_text(), flags=re.M))
    entries = {name.removeprefix("thinwire."): item for name, (_, _, item) in public().items()}
    expected = {name: parse(item.doc).summary for name, item in entries.items() if item.doc}
    assert {name: rows.get(name) for name in expected} == expected
    assert rows.keys() == entries.keys()


def test_a_signature_has_the_options_of_the_base_class() -> None:
    path, inner, diloco = public()["thinwire.DiLoCo"]
    options = tuple(inspect.signature(thinwire.DiLoCo).parameters)
    assert diloco.parameters == options
    assert "warmup_steps" in options
    assert "program: Program = Exact()" in diloco.signature
    assert f'<a id="{inner}"></a>' in text_of(path)


@pytest.mark.slow  # a minute of Sphinx
def test_the_site_is_built_without_a_warning_or_a_broken_link(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="the site is built with Sphinx, which needs Python 3.11")
    from repopages.site.build import build

    built = build(library(), tmp_path / "site")
    assert built.warnings == ()
    assert built.missing == ()
    assert built.pages > 600
    assert built.keywords > 20_000
    start = (tmp_path / "site" / "index.html").read_text()
    assert "<h1>thinwire" in start
    assert "Two commands" in start
    found = json.loads((tmp_path / "site" / "keywords.json").read_text())["keywords"]
    assert {name.rpartition(".")[2] for name in public()} <= {entry["word"] for entry in found}
