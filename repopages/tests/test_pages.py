"""Pages say what is in the files, lead to each other, and show what a file contains as inert text."""

import re
from pathlib import Path

import pytest
from pages_of import broken_links, html_of, library_of, markdown_of, pages_in, section
from repopages.errors import OptionError
from repopages.pages.addresses import document_page, file_page, folder_index, relative
from repopages.pages.api import wrapped
from repopages.pages.book import SECTIONS
from repopages.pages.dialect import GitHub, Graph
from repopages.pages.drawing import beside, svg
from repopages.pages.markup import code, escape, fenced, table
from repopages.pages.write import MANIFEST, write_pages

SHOP = {
    "README.md": """# The shop

Sells tea. See [the till](shop/till.py).

## Prices

Ask `sell` for them.
""",
    "shop/__init__.py": '''"""Sell things."""

from shop.till import Till, sell

__all__ = ["Till", "sell"]
''',
    "shop/till.py": '''"""The till.

It counts.

Performance:
    One lookup for each sale.
"""

import os
import subprocess

from shop import goods

LIMIT = 3
"""Most things in one sale."""


class Till(dict):
    """A till for `goods.Tea`."""

    currency: str = "EUR"

    def count(self) -> int:
        """Count the money."""
        def inner(coin: str) -> int:
            return 1
        return sum(map(inner, self))


def sell(what: str, *, price: float = 1.0) -> bool:
    """Sell one thing.

    Args:
        what: The thing, such as `goods.Tea`.
        price: In euros.

    Raises:
        ValueError: If the price is negative.

    Example::

        sell("tea")
    """
    if price < 0:
        raise ValueError(f"price={price} is negative")
    subprocess.run([os.environ["SHELL"]])
    return True
''',
    "shop/goods.py": "class Tea:\n    leaves = 3\n",
    "shop/native/fast.c": '/* Counts coins. */\n#include "fast.h"\n\nint count(int *coins) { return 1; }\n',
    "shop/native/fast.h": "int count(int *coins);\n",
    "tests/test_till.py": "from shop.till import sell\n\n\ndef test_sell():\n    assert sell('tea')\n",
    "package.json": '{"name": "shop", "description": "A shop of tea", "scripts": {"test": "true"}}\n',
    "Makefile": "test:\n\tpytest\n",
    "empty.txt": "",
}


@pytest.fixture
def shop(tmp_path: Path) -> dict[str, str]:
    return markdown_of(tmp_path / "checkout", SHOP, tmp_path / "out")


def test_every_file_and_folder_has_its_pages(shop: dict[str, str]) -> None:
    expected = {f"{path}{end}.md" for path in SHOP for end in ("_docs", "_kw")}
    folders = ("", "shop/", "shop/native/", "tests/")
    expected |= {f"{folder}{name}.md" for folder in folders for name in ("index", "doc")}
    assert {path for path in shop if not path.startswith("keywords")} == expected


def test_every_page_has_every_section_in_order_and_none_is_empty(shop: dict[str, str]) -> None:
    for path in SHOP:
        parts = re.split(r"^## (.*)$", shop[f"{path}_docs.md"], flags=re.M)
        # The source of a document contains headings too.
        titles = [title for title in parts[1::2] if title in (*SECTIONS, "Keywords")]
        assert titles == [*SECTIONS, "Keywords"]
        for title in SECTIONS:
            assert len(section(shop[f"{path}_docs.md"], title)) > 8, (path, title)


def test_every_link_leads_somewhere(shop: dict[str, str]) -> None:
    assert broken_links(shop) == []


def test_a_page_has_what_the_source_says(shop: dict[str, str]) -> None:
    page = shop["shop/till.py_docs.md"]
    assert section(page, "Purpose") == "The till."
    metadata = section(page, "File metadata")
    assert "| path | `shop/till.py` |" in metadata
    assert "| module | `shop.till` |" in metadata
    assert section(page, "Original source").startswith('```python\n"""The till.')
    overview = section(page, "High-level overview")
    assert "It counts." in overview
    assert "| [`sell`](#sell) | function | 30 | Sell one thing. |" in overview
    api = section(page, "Detailed analysis")
    assert "def sell(what: str, *, price: float = 1.0) -> bool" in api
    assert "- `what`: The thing, such as [`goods.Tea`](goods.py_docs.md#Tea)." in api
    assert '### <a id="Till"></a>`Till`' in api
    assert '##### <a id="Till.count.inner"></a>`Till.count.inner`' in api
    assert '<a id="LIMIT"></a>`LIMIT = 3`' in api
    assert "Most things in one sale." in api
    assert "One lookup for each sale." in section(page, "Performance considerations")
    safety = section(page, "Security and safety")
    assert "| `ValueError` | price=… is negative | [`sell`](#sell), line 45 |" in safety
    assert "`SHELL`" in safety
    assert "`subprocess.run(" in safety
    usage = section(page, "Testing and usage")
    assert '```python\nsell("tea")\n```' in usage
    assert "[`tests/test_till.py`](../tests/test_till.py_docs.md)" in usage
    assert "[`shop/__init__.py`](__init__.py_docs.md)" in section(page, "Cross-references")


def test_the_same_for_other_files(shop: dict[str, str]) -> None:
    header = section(shop["shop/native/fast.c_docs.md"], "Dependencies")
    assert "[`shop/native/fast.h`](fast.h_docs.md)" in header
    assert section(shop["shop/native/fast.c_docs.md"], "Purpose") == "Counts coins."
    assert section(shop["package.json_docs.md"], "Purpose") == "A shop of tea (its key `description`)"
    assert "`scripts`" in section(shop["package.json_docs.md"], "High-level overview")
    assert "Prices" in section(shop["README.md_docs.md"], "High-level overview")
    assert "[`shop/till.py`](shop/till.py_docs.md)" in section(shop["README.md_docs.md"], "Cross-references")
    assert section(shop["empty.txt_docs.md"], "Original source") == "The file is empty."
    assert "[`Till`](till.py_docs.md#Till)" in section(
        shop["shop/__init__.py_docs.md"], "High-level overview"
    )


def test_a_folder_says_what_is_in_it(shop: dict[str, str]) -> None:
    index = shop["shop/index.md"]
    assert "| [`till.py`](till.py_docs.md) | Python | 47 lines | The till. |" in index
    assert "| [`native/`](native/index.md) | 2 files |" in index
    assert "| `sell` | function | [`till.py`](till.py_docs.md#sell) |" in index
    page = shop["shop/doc.md"]
    assert section(page, "Purpose") == "Sell things."
    assert "| Python | 3 |" in section(page, "Statistics")
    assert "tests/test_till.py" in section(page, "Testing and usage")
    assert "tests" in section(page, "Architecture and design")


def test_a_drop_in_replacement_shows_the_imports_to_change(tmp_path: Path) -> None:
    files = {
        "new/__init__.py": "",
        "new/hooks.py": '''"""Drop-in replacement for `old.hooks`.

Differences from `old`: none.
"""


def hook():
    pass
''',
    }
    page = markdown_of(tmp_path / "checkout", files, tmp_path / "out")["new/hooks.py_docs.md"]
    overview = section(page, "High-level overview")
    assert "### Switch from old" in overview
    assert "# before\nfrom old.hooks import hook\n\n# after\nfrom new.hooks import hook" in overview


NAMES = [
    "a b#c?d.py",
    "100%.md",
    "ünï/çödé.py",
    "index.md/inner.py",
    "doc",
    "index",
    ".hidden/.file",
    "_sources/x.py",
    "keywords/A.md",
    "keywords.json/x.txt",
    "x.py_docs.md",
    "x.py",
    "(1)/[2]/<3>|`4`.py",
    "long" * 60 + ".py",
]


def test_any_name_of_a_file_has_a_page_and_links_to_it(tmp_path: Path) -> None:
    files = dict.fromkeys(NAMES, '"""Doc of x."""\n\n\ndef f():\n    pass\n')
    pages = markdown_of(tmp_path / "checkout", files, tmp_path / "out")
    assert broken_links(pages) == []
    for name in NAMES:
        assert f"{file_page(name)}.md" in pages
    linked = html_of(pages["index.md"])
    assert 'href="a%20b%23c%3Fd.py_docs.md"' in linked


HOSTILE = (
    "<script>alert(1)</script> <img src=x onerror=alert(1)> {{ 7*7 }} {% raw %} [x](javascript:alert(1)) "
    "[y](file:///etc/passwd) <a href='javascript:alert(1)'>z</a> ```` | `` | $x$ &lt;b&gt;"
)
BAD = f'''"""{HOSTILE}

{HOSTILE}
"""

X = {HOSTILE!r}
"""{HOSTILE}"""


def f(x={HOSTILE!r}):
    """{HOSTILE}

    Args:
        x: {HOSTILE}

    Example:
        {HOSTILE}
    """
    raise ValueError({HOSTILE!r})
'''
HARMLESS = """
    a blockquote br code details em h1 h2 h3 h4 h5 h6 hr li ol p pre strong summary
    table tbody td th thead tr ul
"""


def test_what_a_file_contains_is_inert(tmp_path: Path) -> None:
    name = "<img src=x onerror=alert(1)>.py"
    files = {
        "bad.py": BAD,
        "bad.md": f"# {HOSTILE}\n\n{HOSTILE}\n\n## **{HOSTILE}**\n\n```\n{HOSTILE}\n```\n",
        "bad.json": '{"<script>alert(1)</script>": "' + HOSTILE.replace('"', "'") + '"}',
        "bad.js": f"// {HOSTILE}\nfunction f() {{}}\n",
        "bad.txt": f"```\n{HOSTILE}\n````\n~~~\n<script>\n",
        "bad.sh": f"#!/bin/sh {HOSTILE}\n",
        f"{name}": "x = 1\n",
    }
    pages = markdown_of(tmp_path / "checkout", files, tmp_path / "out")
    assert broken_links(pages) == []
    for path, text in pages.items():
        html = html_of(text)
        tags = set(re.findall(r"<(\w+)", html))
        assert tags <= set(HARMLESS.split()), path
        for attributes in re.findall(r"<\w+([^>]*)>", html):
            assert re.fullmatch(r'( (href|id|class|style|start)="[^"]*")*', attributes), (path, attributes)
        assert not re.search(r'href="(javascript|file|data):', html), path


def test_long_tables_say_what_they_leave_out(tmp_path: Path) -> None:
    files = {"many.py": "\n".join(f"VALUE_{number} = {number}" for number in range(50))}
    pages = markdown_of(tmp_path / "checkout", files, tmp_path / "out")
    assert "and 10 more." in section(pages["many.py_docs.md"], "High-level overview")
    assert pages["many.py_kw.md"].count("- `VALUE_") == 50
    assert broken_links(pages) == []


def test_only_pages_with_new_input_are_written_again(tmp_path: Path) -> None:
    root, out = tmp_path / "checkout", tmp_path / "out"
    first = write_pages(library_of(root, SHOP), GitHub(), out)
    assert first.removed == ()
    assert write_pages(library_of(root), GitHub(), out).written == ()
    before = pages_in(out)

    (root / "shop" / "goods.py").write_text('"""All goods."""\n\n\nclass Coffee:\n    pass\n')
    (root / "shop" / "native" / "fast.h").unlink()
    (root / "shop" / "native" / "fast.c").unlink()
    second = write_pages(library_of(root), GitHub(), out)
    assert "shop/goods.py_docs.md" in second.written
    assert "shop/till.py_docs.md" in second.written  # its link to `Tea` leads nowhere now
    assert "package.json_docs.md" not in second.written
    assert {"shop/native/doc.md", "shop/native/fast.c_kw.md"} <= set(second.removed)
    assert not (out / "shop" / "native").exists()
    incremental = pages_in(out)
    assert incremental != before
    write_pages(library_of(root), GitHub(), tmp_path / "anew")
    assert incremental == pages_in(tmp_path / "anew")


def test_a_page_that_someone_removed_is_written_again(tmp_path: Path) -> None:
    root, out = tmp_path / "checkout", tmp_path / "out"
    write_pages(library_of(root, SHOP), GitHub(), out)
    (out / "index.md").unlink()
    assert write_pages(library_of(root), GitHub(), out).written == ("index.md",)
    (out / MANIFEST).write_text("{broken")
    assert write_pages(library_of(root), GitHub(), out).written == ()


def test_a_folder_with_other_files_is_not_touched(tmp_path: Path) -> None:
    library = library_of(tmp_path / "checkout", SHOP)
    mine = tmp_path / "out" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("keep")
    with pytest.raises(OptionError, match="a folder with other files"):
        write_pages(library, GitHub(), mine.parent)
    assert [path.name for path in mine.parent.iterdir()] == ["mine.txt"]
    with pytest.raises(OptionError, match="is a file"):
        write_pages(library, GitHub(), mine)


def test_lines_and_sections_link_to_the_repository_if_the_output_lies_in_it(tmp_path: Path) -> None:
    write_pages(library_of(tmp_path, SHOP), GitHub(root="../.."), tmp_path / "docs" / "pages")
    page = (tmp_path / "docs" / "pages" / "shop" / "till.py_docs.md").read_text()
    assert "[30](../../../shop/till.py#L30)" in page
    assert "[Prices](../../../README.md#prices)" in page


@pytest.mark.parametrize(
    ("path", "address"),
    [
        ("src/a.py", "src/a.py_docs"),
        ("index.md/a.py", "index.md_/a.py_docs"),
        ("index.md_/a.py", "index.md__/a.py_docs"),
        ("_sources/a", "_sources_/a_docs"),
    ],
)
def test_addresses(path: str, address: str) -> None:
    assert file_page(path) == address


def test_addresses_are_valid_names() -> None:
    assert folder_index("") == "index"
    assert document_page("README.md") == "index"
    assert document_page("docs/README.md") == "documents/docs/README"
    odd = file_page("a\udcff\n.py")
    assert odd.isprintable()
    assert odd.encode()
    assert odd != file_page("a\udcfe\n.py")
    assert relative("a/b_docs", "../x y.py", "L 1") == "../../x%20y.py#L%201"


@pytest.mark.parametrize(
    "text", ["a|b", "`", "a `b` c", "<b>", "*x*", "1. x", "- x", "# x", "_x_", "a_b", "\\", "&lt;"]
)
def test_text_is_shown_as_it_is(text: str) -> None:
    shown = html_of(table(["a", "b"], [[escape(text), code(text)]]))
    cells = [cell.strip() for cell in re.findall(r"<td>(.*?)</td>", shown)]
    plain = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    assert cells == [plain, f"<code>{plain}</code>"]
    assert plain in html_of(fenced(f"```\n{text}\n```"))
    assert "<li>" not in html_of(escape(text))


def test_long_signatures_have_a_parameter_on_each_line() -> None:
    short = "f(a, b=',')"
    assert wrapped(short) == short
    long = f"def f(first: dict[str, int], second=',)', {'x' * 90}) -> int"
    assert wrapped(long) == f"def f(\n    first: dict[str, int],\n    second=',)',\n    {'x' * 90},\n) -> int"


def test_neighbours_are_drawn() -> None:
    graph = Graph(path="a", name='a"]', left=(("<b>", "b.html"),), right=())
    assert "&lt;b&gt;" in svg(graph)
    assert '<a href="b.html">' in svg(graph)
    assert 'here["a#34;#93;"]' in GitHub().drawing(graph)
    assert beside("a/b/c/x.py", "a/d") == "a/b"
    assert beside("a/x.py", "a/d") == "a"
    assert beside("a/d/e/x.py", "a/d") == "a/d"


def test_types_with_members_and_blank_files_leave_no_broken_link(tmp_path: Path) -> None:
    files = {
        "src/types.ts": "export type Ref<T> = { current: T; deep: { id: number } };\n",
        "src/render.js": "export const use = wrap(function () {\n  const id = 1;\n});\n",
        "blank.txt": "\n",
    }
    pages = markdown_of(tmp_path / "in", files, tmp_path / "out")
    assert not broken_links(pages)
    assert '<a id="Ref.current">' in pages["src/types.ts_docs.md"]
