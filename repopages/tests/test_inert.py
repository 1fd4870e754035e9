"""Raw HTML of documents is reduced to what can neither run nor load anything."""

import pytest
from repopages.site.inert import Inert, scheme


def clean(*pieces: str, trusted: bool = False) -> str:
    inert = Inert(
        lambda target: None if scheme(target) == "javascript" else target,
        lambda target, alt, linked: f"<img src={target!r} alt={alt!r}>",
        trusted,
    )
    return "".join([*map(inert.clean, pieces), inert.end()])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ('<b onclick="x()">bold</b>', "<b>bold</b>"),
        ('<div style="a" class="b" align="center">x</div>', '<div align="center">x</div>'),
        ('<a href="javascript:x()">y</a>', "<a>y</a>"),
        ('<a href="one" href="javascript:x()">y</a>', '<a href="one">y</a>'),
        ('<form action="x"><button>go</button></form>', "go"),
        ("<svg onload=x()><p>a</p></svg>", "<p>a</p>"),
        ('<a id="&quot;><script>">y</a>', '<a id="&quot;&gt;&lt;script&gt;">y</a>'),
        ("a < b & c", "a &lt; b &amp; c"),
        ("<!-- x --><![CDATA[ x ]]><?php x ?>y", "y"),
        ("<!--repopages:source-->", ""),
        (
            "<input type=text><input type=checkbox checked onclick=x>",
            '<input type="checkbox" disabled checked>',
        ),
        ("<td>x</td><table><tr><td>y</td></tr></table>", "x<table><tr><td>y</td></tr></table>"),
        ("<img src=a alt=b onerror=x width=3>", "<img width=\"3\" src='a' alt='b'>"),
    ],
)
def test_only_listed_tags_and_attributes_pass(given: str, expected: str) -> None:
    assert clean(given) == expected


def test_tags_are_balanced_over_all_pieces() -> None:
    assert clean("<details>", "<p>x", "</details>") == "<details><p>x</p></details>"
    assert clean("</div></article>x<div>") == "x<div></div>"


def test_pages_of_repopages_may_use_classes_and_placeholders() -> None:
    assert clean('<p class="a"><!--repopages:graph--></p>', trusted=True) == (
        '<p class="a"><!--repopages:graph--></p>'
    )


@pytest.mark.parametrize(
    "address",
    ["javascript:x", "JavaScript:x", " javascript:x", "java\tscript:x", "\x01javascript:x", "java\nscript:x"],
)
def test_the_scheme_is_the_one_that_a_browser_sees(address: str) -> None:
    assert scheme(address) == "javascript"


@pytest.mark.parametrize("address", ["a/b:c", "?x:y", "#x:y", "plain", "./a:b"])
def test_a_relative_address_has_no_scheme(address: str) -> None:
    assert scheme(address) == ""
