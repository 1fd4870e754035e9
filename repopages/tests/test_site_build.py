"""The site as files: inert, complete, without a broken link, and quick to build again."""

import json
import os
import re
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hostile_checkout import write_hostile
from repopages.errors import OptionError
from repopages.relations.library import open_library
from repopages.site.inert import scheme
from repopages.site.links import broken_links

pytest.importorskip("sphinx", reason="the site is built with Sphinx, which needs Python 3.11")
from repopages.site.build import Built, build


def built_from(folder: Path, out: Path) -> Built:
    return build(open_library(str(folder), jobs=1), out, jobs=1)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("hostile")
    return built_from(write_hostile(folder / "checkout"), folder / "site")


def article(built: Built, page: str) -> str:
    text = (built.folder / f"{page}.html").read_text(encoding="utf-8")
    found = re.search(r'<article role="main".*</article>', text, flags=re.S)
    assert found
    return found[0]


class Tags(HTMLParser):
    """All tags of a page with their attributes, as a browser sees them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_a_hostile_repository_is_inert(hostile: Built) -> None:
    assert hostile.warnings == ()
    assert [file.name for file in (hostile.folder / "_pictures").rglob("*.*")] == ["pic.svg"]
    pages = [page for page in hostile.folder.rglob("*.html") if "_static" not in page.parts]
    assert len(pages) > 30
    for page in pages:
        name = page.relative_to(hostile.folder).as_posix().removesuffix(".html")
        text = article(hostile, name)
        assert "root:x:" not in text
        for tag, attributes in Tags(text).found if name != "search" else ():
            assert tag not in ("base", "embed", "form", "iframe", "link", "meta", "object", "script", "style")
            assert not {key for key in attributes if key.startswith("on") or key in ("style", "srcdoc")}
            assert scheme(attributes.get("href") or "") in ("", "https"), attributes
            assert scheme(attributes.get("src") or "") == "", attributes


def test_directives_are_text(hostile: Built) -> None:
    start = article(hostile, "index")
    assert ".. include:: /etc/passwd" in start
    assert ":::{include} /etc/passwd" in start
    assert "{{ 7*7 }} {% raw %}" in start
    assert "gfm_only" not in start


def test_links_of_documents_lead_to_pages(hostile: Built) -> None:
    start = article(hostile, "index")
    assert 'href="documents/docs/page.html#two"' in start
    assert 'href="files/src/a%20b%23.py_docs.html#L-2"' in start
    assert 'href="files/src/index.html"' in start
    assert 'src="_pictures/docs/pic.svg"' in start
    assert (hostile.folder / "_pictures/docs/pic.svg").exists()
    assert 'href="../../index.html"' in article(hostile, "documents/docs/page")
    assert set(hostile.missing) == {
        "README.md: '../../../etc/passwd.png' is not in the repository",
        "README.md: 'docs/pipe.png' is not in the repository",
        "README.md: 'docs/secret.png' is not in the repository",
        "README.md: 'x' is not in the repository",
        "README.md:44: '../../../etc/passwd' is not in the repository",
        "docs/page.md:5: 'gone.md' is not in the repository",
    }


def test_markdown_is_shown_as_on_github(hostile: Built) -> None:
    start = article(hostile, "index")
    assert "<s>gone</s>" in start
    assert "A note." in start
    assert "problematic" not in start
    assert start.count("<details>") == start.count("</details>") == 1


def test_every_file_has_a_page_and_a_listing_with_lines(hostile: Built) -> None:
    for name in ("README.md", "src/a b#.py", "src/100%?.py", "src/binary.bin", "docs/empty.md"):
        assert (hostile.folder / f"files/{name}_docs.html").exists(), name
    page = article(hostile, "files/src/a b#.py_docs")
    assert 'id="L-2"' in page
    assert "&lt;script&gt;alert(99)" in page
    assert "repopages:source" not in page


def test_sources_are_not_in_the_search_index(hostile: Built) -> None:
    index = (hostile.folder / "searchindex.js").read_text(encoding="utf-8")
    assert "percent" in index
    assert "alert" not in index.partition('"terms"')[2] or "alert(96)" not in index


@pytest.mark.slow  # four builds
def test_a_second_build_writes_only_what_changed(tmp_path: Path) -> None:
    checkout, out = write_hostile(tmp_path / "checkout"), tmp_path / "site"
    first = built_from(checkout, out)
    again = built_from(checkout, out)
    assert (again.pages, again.written, again.missing) == (first.pages, 0, first.missing)
    (checkout / "src" / "a b#.py").write_text("x = 2\ny = 3\n")
    os.utime(checkout / "src" / "a b#.py", (time.time() + 5,) * 2)
    changed = built_from(checkout, out)
    assert 1 < changed.written < first.pages / 2
    assert "y" in article(changed, "files/src/a b#.py_docs")
    (checkout / "docs" / "deep.md").unlink()
    shorter = built_from(checkout, out)
    assert shorter.warnings == ()
    assert not (out / "documents/docs/deep.html").exists()
    assert not (out / "files/docs/deep.md_docs.html").exists()
    assert "deep" not in (out / "index.html").read_text(encoding="utf-8")


def test_a_folder_with_other_files_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(OptionError, match="a folder with other files"):
        built_from(write_hostile(tmp_path / "checkout"), tmp_path)
    assert (tmp_path / "mine.txt").exists()


def test_python_names_are_objects(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    (checkout / "pot").mkdir(parents=True)
    (checkout / "pot" / "__init__.py").write_text('"""A pot."""\n\ndef brew(minutes):\n    """Brew tea."""\n')
    (checkout / "lid.c").write_text("/* Close the pot. */\nint close_lid(void) { return 0; }\n")
    built = built_from(checkout, tmp_path / "site")
    assert built.warnings == ()
    index = (built.folder / "searchindex.js").read_text()
    objects = json.loads(re.search(r'"objects":\s*({.*?}),\s*"objnames"', index, flags=re.S)[1])  # type: ignore[index]
    assert "brew" in str(objects)
    assert "close_lid" in str(objects)
    assert (built.folder / "objects.inv").exists()


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "page.html").write_text(
        '<a id="here" href="#here"></a><a href="https://x.org/y"></a><a href="#there"></a><img src="no.png">'
        '<a href="deep/a%20b.html#x%20y">'
    )
    (tmp_path / "deep" / "a b.html").write_text(
        '<p id="x y"><a href="../page.html#here"><a href="../gone.html">'
    )
    assert broken_links(tmp_path, ["page.html#here", "page.html#none", "none.html"]) == [
        "deep/a b.html: broken link to ../gone.html",
        "keywords.json: broken link to none.html",
        "keywords.json: broken link to page.html#none",
        "page.html: broken link to #there",
        "page.html: broken link to no.png",
    ]


def test_the_start_page_of_a_repository_without_a_readme_leads_to_its_files(tmp_path: Path) -> None:
    (tmp_path / "in" / "tea").mkdir(parents=True)
    (tmp_path / "in" / "tea" / "green.py").write_text('"""Green tea."""\n')
    built = built_from(tmp_path / "in", tmp_path / "site")
    assert built.warnings == ()
    start = article(built, "index")
    assert 'href="files/tea/green.py_docs.html"' in start
    assert "Green tea." in start
    assert "All documents" not in start
