"""Raw HTML of documents, reduced to an allow list of tags, attributes and addresses.

A repository's Markdown is written by others. What passes the lists cannot run, load or send anything.
"""

import re
from collections.abc import Callable
from html import escape
from html.parser import HTMLParser

from repopages.site.dialect import GRAPH, SOURCE

SCHEMES = ("http", "https", "mailto")

Resolve = Callable[[str], str | None]
Picture = Callable[[str, str, bool], str]

_TAGS = frozenset(
    re.findall(
        r"\w+",
        """a abbr b blockquote br caption center code dd del details div dl dt em figcaption figure
        h1 h2 h3 h4 h5 h6 hr i img input ins kbd li mark ol p picture pre q s samp small span strike strong
        sub summary sup table tbody td tfoot th thead tr tt u ul var wbr""",
    )
)
_PARTS = frozenset(["caption", "tbody", "td", "tfoot", "th", "thead", "tr"])
_VOID = frozenset(["br", "hr", "img", "input", "wbr"])
_EVERYWHERE = frozenset(["align", "dir", "id", "lang", "title"])
_ATTRIBUTES = {
    "a": {"href", "name"},
    "details": {"open"},
    "img": {"height", "width"},
    "ol": {"start", "type"},
    "td": {"colspan", "rowspan", "valign"},
    "th": {"colspan", "rowspan", "valign"},
}


def scheme(address: str) -> str:
    """Return the scheme that a browser sees in an address, in small letters, or an empty text.

    Browsers skip tabs, line feeds and leading control characters: `java&#9;script:` is `javascript:`.
    """
    seen = re.sub(r"[\x00-\x20\x7f-\xa0]", "", address)
    found = re.match(r"([^/?#:]*):", seen)
    return found[1].lower() if found else ""


class Inert(HTMLParser):
    """A writer of harmless HTML, which balances tags between its construction and `end`.

    Args:
        resolve: Returns the address of a link on the site, or None for a link that becomes text.
        picture: Returns the HTML of a picture from its address and its description.
        trusted: Whether repopages wrote the text, which may then use classes and placeholders.
    """

    def __init__(self, resolve: Resolve, picture: Picture, trusted: bool) -> None:
        super().__init__(convert_charrefs=True)
        self._resolve, self._picture, self._trusted = resolve, picture, trusted
        self._open: list[str] = []
        self._parts: list[str] = []

    def clean(self, text: str) -> str:
        """Return what the lists allow of a piece of HTML. A later piece may close its tags."""
        self.feed(text)
        self.close()  # a tag that is cut off becomes text
        self.reset()
        return self._taken()

    def end(self) -> str:
        """Return the tags that close what is open."""
        while self._open:
            self._parts.append(f"</{self._open.pop()}>")
        return self._taken()

    def _taken(self) -> str:
        text, self._parts = "".join(self._parts), []
        return text

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Write a tag with the attributes that are allowed. A picture is written by `picture`."""
        given = {name: value or "" for name, value in reversed(attrs)}  # the first of two equal names counts
        if tag not in _TAGS or (tag in _PARTS and "table" not in self._open):
            return
        if tag == "img":
            size = "".join(
                f' {name}="{escape(given[name])}"' for name in ("width", "height") if name in given
            )
            linked = "a" in self._open
            drawn = self._picture(given.get("src", ""), given.get("alt", ""), linked)
            self._parts.append(drawn.replace("<img", f"<img{size}", 1) if drawn.startswith("<img") else drawn)
        elif tag == "input":
            if given.get("type") == "checkbox":
                self._parts.append(
                    f'<input type="checkbox" disabled{" checked" if "checked" in given else ""}>'
                )
        else:
            kept = {name: value for name, value in given.items() if self._allowed(tag, name)}
            if "href" in kept:
                address = self._resolve(kept.pop("href"))
                kept |= {} if address is None else {"href": address}
            written = "".join(f' {name}="{escape(value)}"' for name, value in kept.items())
            self._parts.append(f"<{tag}{written}>")
            if tag not in _VOID:
                self._open.append(tag)

    def _allowed(self, tag: str, name: str) -> bool:
        return name in _EVERYWHERE or name in _ATTRIBUTES.get(tag, ()) or (self._trusted and name == "class")

    def handle_endtag(self, tag: str) -> None:
        """Close a tag that is open, and those inside it. One that is not open would close the page's own."""
        if tag in self._open:
            while (last := self._open.pop()) != tag:
                self._parts.append(f"</{last}>")
            self._parts.append(f"</{tag}>")

    def handle_data(self, data: str) -> None:
        """Write text."""
        self._parts.append(escape(data, quote=False))

    def handle_comment(self, data: str) -> None:
        """Drop comments, except for the placeholders of repopages."""
        comment = f"<!--{data}-->"
        if self._trusted and comment in (SOURCE, GRAPH):
            self._parts.append(comment)
