"""Markdown, reStructuredText, notebooks and plain text."""

import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reading_files import labels, read_as
from repopages.reading.model import Facts, Mention

MARKDOWN = """\
---
title: "The shop"
---

![badge](badge.svg)

# The `Shop` of *things*

It sells **tea** and
the `shop.Basket`, see [prices](docs/prices.md#tea).

- **Basket**: what you carry.
- **Price:** what you pay.
- **the**

## Install

```python
import shop
shop.open_door()
```

| word | meaning |
|---|---|
| **till** | where you pay |
| `--port` | where it listens |

## Install

<a href="https://shop.example">x</a> <script>alert(1)</script>
"""


def _terms(facts: Facts, number: int) -> dict[str, Mention]:
    return {mention.word: mention for mention in facts.sections[number].terms}


def test_markdown_sections() -> None:
    facts = read_as("README.md", MARKDOWN)
    assert facts.title == "The shop"
    assert facts.doc == "It sells tea and the shop.Basket, see prices."
    headings = [(s.title, s.level, s.line, s.anchor) for s in facts.sections if s.anchor]
    assert headings == [
        ("The Shop of things", 1, 7, "the-shop-of-things"),
        ("Install", 2, 16, "install"),
        ("Install", 2, 28, "install-1"),
    ]
    assert {"shop.open_door", "open_door", "shop"} <= facts.sections[1].words


def test_markdown_terms_and_links() -> None:
    facts = read_as("README.md", MARKDOWN)
    terms = _terms(facts, 0)
    assert (terms["tea"].kind, terms["tea"].line) == ("emphasised", 9)
    assert (terms["shop.Basket"].kind, terms["shop.Basket"].line) == ("code", 10)
    assert (terms["Basket"].kind, terms["Basket"].text) == ("defined", "what you carry.")
    assert terms["Price"].text == "what you pay."
    assert "the" not in terms
    assert _terms(facts, 1)["till"].text == "where you pay"
    assert _terms(facts, 1)["--port"].text == "where it listens"
    assert facts.links == (
        ("badge.svg", 5),
        ("docs/prices.md#tea", 10),
        ("https://shop.example", 30),
    )
    assert {("example in python", 18), ("raw HTML that can run code", 30)} <= labels(facts)


@pytest.mark.parametrize(
    ("title", "anchor"),
    [("A & B", "a--b"), ("`f(x)`: why?", "fx-why"), ("Über 3.5", "über-35"), ("a_b-c", "a_b-c"), ("🎉", "")],
)
def test_anchors_are_those_of_github(title: str, anchor: str) -> None:
    assert read_as("a.md", f"# {title}\n").sections[-1].anchor == anchor


RST = """\
========
The shop
========

It *sells* :class:`~shop.Basket` and ``tea``,
see `prices <https://shop.example/p>`_.

Words
-----

till
    Where you pay.

.. toctree::
   :maxdepth: 2

   intro
   Guide <guide/index>

.. code-block:: python

   **nothing here**

.. include:: /etc/passwd

Details
~~~~~~~
Literally::

   **nor here**

**Doors** it is.

Words
-----
"""


def test_rst() -> None:
    facts = read_as("index.rst", RST)
    assert facts.title == "The shop"
    assert facts.doc == "It sells shop.Basket and tea, see prices."
    assert [(s.title, s.level, s.line, s.anchor) for s in facts.sections] == [
        ("The shop", 1, 2, "the-shop"),
        ("Words", 2, 8, "words"),
        ("Details", 3, 26, "details"),
        ("Words", 2, 34, "words-1"),
    ]
    assert {word: mention.kind for word, mention in _terms(facts, 0).items()} == {
        "sells": "emphasised",
        "shop.Basket": "code",
        "tea": "code",
    }
    assert _terms(facts, 1)["till"].text == "Where you pay."
    assert set(_terms(facts, 2)) == {"Doors"}
    assert facts.links == (
        ("https://shop.example/p", 6),
        ("intro", 17),
        ("guide/index", 18),
        ("/etc/passwd", 24),
    )


def _notebook(*cells: dict[str, object]) -> str:
    return json.dumps({"cells": cells, "metadata": {"language_info": {"name": "python"}}, "nbformat": 4})


def test_notebook() -> None:
    text = _notebook(
        {"cell_type": "markdown", "source": ["# Shop\n", "With **tea**."]},
        {
            "cell_type": "code",
            "source": "%matplotlib inline\nimport os\ndef sell(thing):\n    return os.getcwd()",
            "outputs": [{"data": "x" * 5000}],
        },
        {"cell_type": "code", "source": "this is (no Python", "outputs": []},
    )
    facts = read_as("a.ipynb", text)
    assert facts.language == "Notebook"
    assert facts.title == "Shop"
    assert [(item.name, item.line) for item in facts.items] == [("sell", 7)]
    assert [(taken.module, taken.line) for taken in facts.imports] == [("os", 6)]
    lines = facts.text.splitlines()
    assert lines[1:3] == ["# # Shop", "# With **tea**."]
    assert lines[6] == "def sell(thing):"
    assert "xxxx" not in facts.text
    assert lines[8].startswith("# output of cell 2: 5,0")
    assert facts.sections[0].terms[0].word == "tea"


def test_text_and_requirements() -> None:
    facts = read_as("NOTES", "The shop\n========\n\nSells tea,\nsee https://shop.example/x.\n")
    assert (facts.title, facts.doc) == ("The shop", "Sells tea, see https://shop.example/x.")
    assert facts.links == (("https://shop.example/x", 4),)
    facts = read_as(
        "requirements.txt", "# For tests.\n-r base.txt\nclick>=8 # x\nrequests[socks]==2\n--hash=1\n"
    )
    assert [taken.module for taken in facts.imports] == ["click", "requests"]
    assert facts.links == (("base.txt", 2),)
    assert facts.doc == "For tests."


_ALL = {"a.md": MARKDOWN, "a.rst": RST, "a.txt": RST, "requirements.txt": RST, "a.ipynb": _notebook()}


@pytest.mark.parametrize("path", _ALL)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_no_text_makes_a_reader_fail(path: str, data: st.DataObject) -> None:
    source = _ALL[path]
    cut = data.draw(st.integers(0, len(source)))
    facts = read_as(path, source[:cut] + data.draw(st.text(max_size=60)) + source[cut:])
    pickle.dumps(facts)
    assert len({section.anchor for section in facts.sections if section.anchor}) == sum(
        1 for section in facts.sections if section.anchor
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["cells", "cell_type", "source", "metadata", "outputs"]), inner, max_size=4
            )
        ),
        max_leaves=12,
    )
)
def test_no_json_makes_the_reader_of_notebooks_fail(value: object) -> None:
    pickle.dumps(read_as("a.ipynb", json.dumps(value)))
    pickle.dumps(read_as("a.ipynb", json.dumps({"cells": [value, {"cell_type": "code", "source": value}]})))


@pytest.mark.parametrize("path", ["a.md", "a.rst", "a.txt"])
@pytest.mark.parametrize(
    "unit", ["> ", "*a ", "[", "![", "`", "<a ", "- ", "a/", ":::", "**", "    ", "| a ", "``a "]
)
def test_repeated_markup_is_read_in_time(path: str, unit: str) -> None:
    pickle.dumps(read_as(path, unit * (60_000 // len(unit))))


def test_a_heading_below_other_text_is_not_the_title() -> None:
    assert read_as("README.md", "[logo](x)\n\n### Contents\n\nText.\n\n# Tea\n").title == "Tea"
    assert read_as("README.md", "Words.\n\n## Contents\n").title == ""
    assert read_as("page.md", "## Tea\n\nText.\n").title == "Tea"
