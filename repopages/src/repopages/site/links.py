"""Links of a finished site, checked against its files and anchors."""

import re
from collections.abc import Iterable
from functools import cache
from html import unescape
from pathlib import Path
from urllib.parse import unquote


def broken_links(site: Path, keywords: Iterable[str] = ()) -> list[str]:
    """Return the links within a site that lead to no file or to no anchor, sorted.

    Sphinx checks the links in Markdown. Drawings, keyword lists and listings are HTML, which it copies.

    Args:
        site: Folder of the site.
        keywords: Addresses of the keyword index, from the top of the site.
    """
    read = cache(_anchors_and_links)  # for this call only: the next build replaces the files

    def is_broken(page: Path, link: str) -> bool:
        address, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", address):  # https:, mailto:, data:
            return False
        target = (page.parent / unquote(address.partition("?")[0])).resolve() if address else page
        is_page = target.suffix == ".html" and target.exists()
        return not target.exists() or (is_page and bool(anchor) and unquote(anchor) not in read(target)[0])

    links = {(site / "keywords.json", url) for url in keywords}
    links |= {(page, link) for page in site.resolve().rglob("*.html") for link in read(page)[1]}
    return sorted(f"{page.name}: broken link to {link}" for page, link in links if is_broken(page, link))


def _anchors_and_links(page: Path) -> tuple[frozenset[str], frozenset[str]]:
    text = page.read_text(encoding="utf-8")
    anchors = re.findall(r'\b(?:id|name)="([^"]+)"', text)
    links = re.findall(r'<\w[^<>]*?\s(?:href|src)="([^"]+)"', text)
    return frozenset(map(unescape, anchors)), frozenset(map(unescape, links))
