"""Docstrings of every style become Markdown, and nothing in them is obeyed."""

import ast
import importlib.util
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token
from repopages.reading.docstrings import Docstring, Field, inline, markdown, parse, span


def link(code: str, shown: str = "") -> str:
    """Link names with a capital, as pages do for names that they know."""
    return (
        f"[{span(shown or code)}](#{code})" if re.fullmatch(r"[\w.]*[A-Z]\w*", code) else span(shown or code)
    )


GOOGLE = """Sell a thing, such
as :class:`Tea`.

More on it.

Args:
    what (str, optional): The thing. Default: ``None``
        More of it.

        - one
    *rest: Others.
    **options (Dict[str, Tuple[int, int]]): Options.

Returns:
    bool: Whether it was sold.

Raises:
    ValueError: If sold out.
    shop.LateError: At night.

Example::

    >>> sell("tea")
    True

Note:
    Not on Sundays.

The end.
"""

NUMPY = """Sell a thing.

Parameters
----------
what : str, optional
    The thing.
x, y : int
    Where.
*rest
    Others.

Returns
-------
sold : bool
    Whether it was sold.
float

Raises
------
ValueError
    If sold out.

See Also
--------
a.buy : Buy a thing.
other

Notes
-----
Not on Sundays.

Odd title
---------
Text.
"""

REST = """Sell a thing.

:param str what: The thing,
    or two.
:param price: In euros.
:type price: float
:returns: Whether it was sold.
:rtype: bool
:raises ValueError: If sold out.

The end.
"""


def test_google_style() -> None:
    doc = parse(GOOGLE)
    assert doc.summary == "Sell a thing, such as :class:`Tea`."
    assert doc.body == "More on it.\n\nThe end."
    assert doc.fields == [
        Field("param", "what", "str, optional", "The thing. Default: ``None``\nMore of it.\n\n- one"),
        Field("param", "*rest", "", "Others."),
        Field("param", "**options", "Dict[str, Tuple[int, int]]", "Options."),
        Field("returns", "", "bool", "Whether it was sold."),
        Field("raises", "ValueError", "", "If sold out."),
        Field("raises", "shop.LateError", "", "At night."),
    ]
    assert markdown(doc.texts["example"], link) == '```pycon\n>>> sell("tea")\nTrue\n```'
    assert doc.texts["note"] == "Not on Sundays."


def test_numpy_style() -> None:
    doc = parse(NUMPY)
    assert doc.fields == [
        Field("param", "what", "str, optional", "The thing."),
        Field("param", "x, y", "int", "Where."),
        Field("param", "*rest", "", "Others."),
        Field("returns", "", "bool", "Whether it was sold."),
        Field("returns", "", "float", ""),
        Field("raises", "ValueError", "", "If sold out."),
    ]
    assert doc.texts == {"see also": "- `a.buy`: Buy a thing.\n- `other`: ", "notes": "Not on Sundays."}
    assert markdown(doc.body, link) == "**Odd title**\n\nText."


def test_rest_style() -> None:
    doc = parse(REST)
    assert doc.fields == [
        Field("param", "what", "str", "The thing,\nor two."),
        Field("param", "price", "float", "In euros."),
        Field("returns", "", "bool", "Whether it was sold."),
        Field("raises", "ValueError", "", "If sold out."),
    ]
    assert doc.body == "The end."


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("Use ``a_b`` and `c`.", "Use `a_b` and `c`."),
        (
            ":class:`Foo` :func:`~a.b.Bar` :meth:`the bar <a.Bar>`",
            "[`Foo`](#Foo) [`Bar`](#a.b.Bar) [`the bar`](#a.Bar)",
        ),
        (":py:class:`!Foo` :ref:`Here <there>` :ref:`there`", "`Foo` Here there"),
        (":math:`x_i \\cdot y` and :pep:`8`", "`x_i \\cdot y` and PEP 8"),
        (
            "See `the paper <https://a.org/x_y>`_ or https://b.org/c_d.",
            "See [the paper](<https://a.org/x_y>) or <https://b.org/c_d>.",
        ),
        ("[text](https://a.org) [bad](javascript:x)", r"[text](<https://a.org>) \[bad\](javascript:x)"),
        ("`bad <javascript:x>`_ and [1]_", r"bad and \[1\]"),
        (
            "A **bold** and *soft* word, *args and **kwargs",
            r"A **bold** and *soft* word, \*args and \*\*kwargs",
        ),
        ("snake_case _x_ a*b*c 2 < 3 & <b>", r"snake_case \_x\_ a\*b\*c 2 \< 3 \& \<b\>"),
        ("- 1. no list", r"\- 1. no list"),
        ("1. no list", r"1\. no list"),
        ("# no heading", r"\# no heading"),
    ],
)
def test_inline_markup(given: str, expected: str) -> None:
    assert inline(given, link) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("Look::\n\n    x = 1\n\nDone.", "Look:\n\n```python\nx = 1\n```\n\nDone."),
        ("Look:\n\n    x = f(1)", "Look:\n\n```python\nx = f(1)\n```"),
        ("Shape:\n    - Input: (N, C)\n    - Output: (N)", "Shape:\n\n- Input: (N, C)\n- Output: (N)"),
        ("- one\n  more\n- two\n\n  - inner", "- one more\n\n- two\n\n  - inner"),
        ("3. three\n4. four", "3. three\n4. four"),
        ("1) one\ngoes on\n2) two", "1. one goes on\n2. two"),
        ("Of::\n\n    Say:\n\n    >>> x\n    1", "Of:\n\nSay:\n\n```pycon\n>>> x\n1\n```"),
        (">>> # doctest: +SKIP\n>>> x  # doctest: +SKIP\n1", "```pycon\n>>> x\n1\n```"),
        ("Of:\n- one\n- two", "Of:\n\n- one\n- two"),
        (">>> 1 + 1\n2\n\n>>> 3\n3\n\nEnd.", "```pycon\n>>> 1 + 1\n2\n\n>>> 3\n3\n```\n\nEnd."),
        ("```sh\nls\n```", "```sh\nls\n```"),
        ("Root\n├── leaf", "```text\nRoot\n├── leaf\n```"),
        (".. warning::\n    Hot.\n\n    Very.", "> [!WARNING]\n> Hot.\n>\n> Very."),
        (".. note :: Cold ``x``.", "> [!NOTE]\n> Cold `x`."),
        ("- one\n\n  .. note::\n     Cold.", "- one\n\n  > **Note**\n  >\n  > Cold."),
        (".. seealso:: :class:`Foo`", "> [!NOTE]\n> **See also**\n>\n> [`Foo`](#Foo)"),
        (".. versionadded:: 1.2\n   The x.", "*Added in version 1.2.* The x."),
        (".. deprecated:: 1.2", "*Deprecated since version 1.2.*"),
        (".. math::\n    a^2 + b", "```latex\na^2 + b\n```"),
        (".. code-block:: python\n   :linenos:\n\n   x = 1", "```python\nx = 1\n```"),
        (".. _target:\n\n.. a comment\n   of two lines\n\nText.", "Text."),
        (".. [1] A. Hat, `hats`", r"\[1\] A. Hat, `hats`"),
        (
            "===  ===\na    b\n===  ===\n1    2\n===  ===",
            "```text\n===  ===\na    b\n===  ===\n1    2\n===  ===\n```",
        ),
        ("term\n    Its meaning.", "- **term**\n\n  Its meaning."),
        ("Title\n-----\nText.", "**Title**\n\nText."),
    ],
)
def test_blocks(given: str, expected: str) -> None:
    assert markdown(given, link) == expected


def rendered(doc: Docstring) -> str:
    """Return all of a docstring as Markdown, as a page has it."""
    parts = [inline(doc.summary, link), markdown(doc.body, link)]
    for field in doc.fields:
        text = textwrap.indent(markdown(field.text, link, nested=True), "  ")
        parts.append(f"- {inline(field.name, link)} {inline(field.type, link)}\n\n{text}")
    return "\n\n".join([*parts, *(markdown(text, link) for text in doc.texts.values())])


def tokens(text: str) -> Iterator[Token]:
    for token in MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text):
        yield token
        yield from token.children or ()


HOSTILE = [
    "<script>alert(1)</script>",
    "Text\n<script>\nalert(1)\n</script>",
    "{raw}`x` and ```{eval-rst}\n.. raw:: html\n\n    <script>x</script>\n```",
    ".. raw:: html\n\n    <script>alert(1)</script>",
    ".. include:: /etc/passwd",
    "![x](file:///etc/passwd) [y](file:///etc/passwd) <javascript:alert(1)>",
    "`x <javascript:alert(1)>`_ :ref:`<b> <javascript:x>`",
    "``a`<b>`` and ` <i> ` and `` ` `` <b>",
    ".. code-block:: ```{evil}\n\n    ```\n    <script>x</script>",
    "Look::\n\n    ```\n    <script>x</script>\n    ````",
    "Args:\n    <b>x</b> (<i>): <u>\n    y: ![](file:///x)\n",
    "a\n===\n\n# b\n\n---\n\n+++\n:::{note}\n:::",
    ".. note:: <b>\n\n    <script>x</script>",
    ".. <b>:: x\n\n- <b>\n\n  <script>\n\n1. <i>\n",
    "<b>\n    <i>: x\n",
    "&lt;b&gt; \\<b> \\\\<b> \\\\\\<b>",
    'https://a.org/<script> <https://a.org/"onclick=x> https://a.org/)<b>',
    "[a](https://a.org/)<b>) [`a`<b>](https://a.org)",
    ":class:`<b>` :foo:`![x](y)` :class:`a <b>`",
]


@pytest.mark.parametrize("doc", HOSTILE)
def test_hostile_docstrings_are_inert(doc: str) -> None:
    for token in tokens(rendered(parse(doc))):
        assert token.type not in ("html_block", "html_inline", "image", "heading_open"), token
        assert re.fullmatch(r"[\w+-]*", token.info) or token.type != "fence", token.info
        address = str(token.attrs.get("href", "#"))
        assert address.startswith(("#", "https://")), address


def docstrings_of(package: str, folder: str) -> Iterator[str]:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    for path in sorted(Path(spec.origin).parent.joinpath(folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                yield ast.get_docstring(node) or ""


@pytest.mark.parametrize(
    ("package", "folder"),
    [("torch", "distributed/algorithms"), ("torch", "optim"), ("click", ""), ("numpy", "linalg")],
)
def test_no_markup_of_real_docstrings_is_shown(package: str, folder: str) -> None:
    for doc in docstrings_of(package, folder):
        for token in tokens(rendered(parse(doc))):
            assert token.type not in ("html_block", "html_inline", "image", "heading_open"), doc
            if token.type == "text":
                assert not re.search(
                    r":(class|func|meth|attr|ref|math|param|returns)\b[^:]*:|^\.\. |``|::$", token.content
                ), doc
