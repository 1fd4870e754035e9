"""Repositories made of texts, and the links and anchors of the pages that are written of them."""

import re
from html import unescape
from pathlib import Path
from urllib.parse import unquote

from markdown_it import MarkdownIt
from repopages.pages.dialect import GitHub
from repopages.pages.markup import slug
from repopages.pages.write import write_pages
from repopages.reading.read import read
from repopages.reading.repository import Repository
from repopages.relations.library import Library

_PARSER = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])


def library_of(root: Path, files: dict[str, str] | None = None) -> Library:
    """Return the library of a folder, after writing `files` to it."""
    for name, text in (files or {}).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    repository = Repository.open(str(root))
    facts = {path: read(repository.root, path) for path in repository.files}
    return Library(repository.root, repository.name, facts, repository.prefix)


def markdown_of(root: Path, files: dict[str, str], out: Path) -> dict[str, str]:
    """Return all pages of a repository by their path in the output."""
    write_pages(library_of(root, files), GitHub(), out)
    return pages_in(out)


def pages_in(out: Path) -> dict[str, str]:
    """Return the text of all pages in an output."""
    return {path.relative_to(out).as_posix(): path.read_text() for path in sorted(out.rglob("*.md"))}


def section(page: str, title: str) -> str:
    """Return the text below one heading of a page."""
    return re.split(r"^## ", page.split(f"\n## {title}\n", 1)[1], flags=re.M)[0].strip()


def html_of(page: str) -> str:
    """Return a page as GitHub's parser reads it, before GitHub removes harmful HTML."""
    return str(_PARSER.render(page))


def broken_links(pages: dict[str, str]) -> list[str]:
    """Return the links between pages that lead to no page or to no place on it."""
    anchors, links = dict[str, set[str]](), dict[str, set[str]]()
    for path, text in pages.items():
        html = html_of(text)
        headings = re.findall(r"<h\d>(.*?)</h\d>", html)
        anchors[path] = {slug(unescape(re.sub(r"<[^>]*>", "", heading))) for heading in headings}
        anchors[path] |= {unescape(name) for name in re.findall(r'<a id="([^"]*)"', html)}
        links[path] = {unescape(link) for link in re.findall(r'<a href="([^"]*)"', html)}
    broken = []
    for path, held in links.items():
        for link in held:
            address, _, anchor = link.partition("#")
            if re.match(r"https?:", link):
                continue
            there = _joined(path, unquote(address)) if address else path
            if there not in pages or (anchor and unquote(anchor) not in anchors[there]):
                broken.append(f"{path}: {link}")
    return sorted(broken)


def _joined(here: str, link: str) -> str:
    parts = here.split("/")[:-1]
    for part in link.split("/"):
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)
