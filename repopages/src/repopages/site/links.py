"""Links of a finished site, checked against its files and anchors."""

import posixpath
import re
from collections.abc import Iterable
from html import unescape
from pathlib import Path
from urllib.parse import unquote

_ANCHOR = re.compile(r'\s(?:id|name)="([^"]+)"')
_LINK = re.compile(r'<\w[^<>]*?\s(?:href|src)="([^"]+)"')


def broken_links(site: Path, keywords: Iterable[str] = ()) -> list[str]:
    """Return the links within a site that lead to no file or to no anchor, sorted.

    Sphinx checks none of them: pages are written with their addresses, and drawings, listings and the sidebar
    are put into finished HTML.

    Args:
        site: Folder of the site.
        keywords: Addresses of the keyword index, from the top of the site.
    """
    files = {file.relative_to(site).as_posix() for file in site.rglob("*") if file.is_file()}
    anchors: dict[str, frozenset[str]] = {}
    # Pages of one folder have most links in common, so that each is resolved once: target -> link -> pages.
    wanted: dict[tuple[str, str], dict[str, str]] = {}
    for page in sorted(name for name in files if name.endswith(".html") and not name.startswith("_static/")):
        anchors[page], links = _anchors_and_links(site / page)
        for link in links:
            wanted.setdefault((posixpath.dirname(page) if link[0] != "#" else page, link), {})[page] = link
    for link in keywords:
        wanted.setdefault(("", link), {})["keywords.json"] = link
    broken = [
        f"{page}: broken link to {link}"
        for (base, link), pages in wanted.items()
        if _is_broken(base, link, files, anchors)
        for page in pages
    ]
    return sorted(broken)


def _is_broken(base: str, link: str, files: set[str], anchors: dict[str, frozenset[str]]) -> bool:
    address, _, anchor = link.partition("#")
    if re.match(r"[a-z]+:", address):  # https:, mailto:, data:
        return False
    there = unquote(address.partition("?")[0])
    target = posixpath.normpath(posixpath.join(base, there)) if there else base
    return target not in files or (
        bool(anchor) and target in anchors and unquote(anchor) not in anchors[target]
    )


def _anchors_and_links(page: Path) -> tuple[frozenset[str], frozenset[str]]:
    text = page.read_text(encoding="utf-8", errors="surrogateescape")
    anchors, links = set(_ANCHOR.findall(text)), set(_LINK.findall(text))
    return frozenset(map(unescape, anchors)), frozenset(map(unescape, links))
