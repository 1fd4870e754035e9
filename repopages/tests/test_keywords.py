"""The index has every name that files define, import, raise or mention, and leads to its explanation."""

import ast
import importlib.util
import json
from pathlib import Path

import pytest
from pages_of import broken_links, library_of, markdown_of
from repopages.pages import indexes
from repopages.pages.book import Book
from repopages.pages.dialect import GitHub
from repopages.pages.indexes import initial, keywords_from
from repopages.pages.keywords import all_keywords, keywords_of, look_up
from repopages.relations.library import Library, open_library

FILES = {
    "pkg/__init__.py": "from pkg.state import _Status\n",
    "pkg/state.py": '''"""State of a thing."""
import os.path as path
from collections import OrderedDict as Ordered
from enum import Enum


class _Status(Enum):
    UNINITIALIZED = 0


def outer(first, *rest, option: int = 3, **extra):
    """Return a function.

    Args:
        first: The first one.
    """

    def nested(inner_parameter):
        raise RuntimeError("no")

    try:
        return nested
    except KeyError:
        return os.environ["SECRET_PLACE"]
''',
    "guide.md": """# Guide

The **residual** is kept. `outer` does it.

## Warm-up

First steps, the *a* first.
""",
}


@pytest.fixture
def library(tmp_path: Path) -> Library:
    return library_of(tmp_path / "checkout", FILES)


def test_a_file_has_all_of_its_names(library: Library) -> None:
    found = keywords_of(Book(library, GitHub()), "pkg/state.py")
    places = {(keyword.word, keyword.kind): (keyword.section, keyword.anchor) for keyword in found}
    assert places["nested", "function"] == ("outer.nested", "outer.nested")
    assert places["inner_parameter", "parameter"] == ("outer.nested", "outer.nested")
    assert places["UNINITIALIZED", "member"] == ("_Status.UNINITIALIZED", "_Status.UNINITIALIZED")
    assert places["RuntimeError", "raised"] == ("Security and safety", "security-and-safety")
    assert places["KeyError", "caught"] == ("Security and safety", "security-and-safety")
    assert places["os.path", "imported module"] == ("Dependencies", "dependencies")
    assert places["collections", "imported module"] == ("Dependencies", "dependencies")
    for word in ("OrderedDict", "Ordered", "path", "Enum"):
        assert (word, "import") in places
    for word in ("first", "rest", "option", "extra"):
        assert places[word, "parameter"] == ("outer", "outer")
    assert places["pkg.state", "module"] == ("Purpose", "purpose")
    assert next(keyword.summary for keyword in found if keyword.word == "first") == "The first one."
    assert not {"self", "a", "the"} & {keyword.word for keyword in found}


def test_a_document_has_its_headings_and_terms(library: Library) -> None:
    found = {keyword.word: keyword for keyword in keywords_of(Book(library, GitHub()), "guide.md")}
    assert found["Warm-up"].kind == "heading"
    assert found["Warm-up"].anchor == "warm-up"
    assert found["residual"].kind == "term"
    assert found["residual"].section == "Guide"
    assert "a" not in found


def test_words_are_found_whole_then_in_part(library: Library) -> None:
    assert [keyword.path for keyword in look_up("RESIDUAL", library)] == ["guide.md"]
    found = look_up("outer", library)
    assert (found[0].kind, found[0].path) == ("function", "pkg/state.py")
    assert found[0].url() == "pkg/state.py_docs.md#outer"
    assert look_up("ninitial", library)[0].word == "UNINITIALIZED"
    assert look_up("nothing-like-it", library) == []


def test_the_index_is_split_by_letter_and_long_letters_into_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexes, "_MOST_WORDS", 5)
    names = "\n".join(f"def shared_{number}(): pass" for number in range(9))
    pages = markdown_of(tmp_path / "checkout", {"many.py": names, "_under.py": "_x = 1\n"}, tmp_path / "out")
    assert "keywords/S.md" in pages
    assert "- `shared_8`" in pages["keywords/S-2.md"]
    assert "`_x`" in pages["keywords/X.md"]
    assert "[S: shared\\_0" in pages["keywords.md"] or "[S: shared_0" in pages["keywords.md"]
    assert broken_links(pages) == []
    assert [initial(word) for word in ("_abc", "Zed", "3d", "--flag", "Ünder")] == [
        "A",
        "Z",
        "0-9",
        "F",
        "Other",
    ]


def test_programs_can_read_the_index(library: Library, tmp_path: Path) -> None:
    markdown_of(tmp_path / "checkout", {}, tmp_path / "out")
    text = (tmp_path / "out" / "keywords.json").read_text()
    entries = json.loads(text)["keywords"]
    nested = next(entry for entry in entries if entry["word"] == "nested")
    assert nested["url"] == "pkg/state.py_docs.md#outer.nested"
    assert nested["file"] == "pkg/state.py"
    found = all_keywords(Book(library, GitHub()))
    assert sorted(keyword for held in keywords_from(text).values() for keyword in held) == sorted(found)
    llms = (tmp_path / "out" / "llms.txt").read_text()
    assert "- [pkg/state.py](pkg/state.py_docs.md): State of a thing." in llms


def test_every_name_that_ast_finds_in_torch_is_in_the_index() -> None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        pytest.skip("torch is not installed")
    root = Path(spec.origin).parent / "distributed" / "algorithms"
    library = open_library(str(root))
    book = Book(library, GitHub())
    for path in library.files:
        words = {keyword.word for keyword in keywords_of(book, path)}
        missing = _names(ast.parse((root / path).read_text())) - words
        assert not missing, path


def _names(tree: ast.Module) -> set[str]:
    """Return definitions, parameters, imports, raised errors and used constants, as `ast` sees them."""
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.arg):
            found.add(node.arg)
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.name for alias in node.names} | {
                alias.asname for alias in node.names if alias.asname
            }
        if isinstance(node, ast.ImportFrom):
            found.add("." * node.level + (node.module or ""))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            found.add(ast.unparse(node.exc.func))
        if isinstance(node, ast.Attribute) and len(node.attr) > 2 and node.attr.isupper():
            found.add(node.attr)
    # Parameters of lambdas have no place that explains them.
    lambdas = {
        arg.arg
        for node in ast.walk(tree)
        if isinstance(node, ast.Lambda)
        for arg in ast.walk(node.args)
        if isinstance(arg, ast.arg)
    }
    return {name for name in found if name.strip("._")} - {"self", "cls"} - lambdas
