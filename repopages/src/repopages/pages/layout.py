"""The page of a file, section by section."""

from collections.abc import Callable

from repopages.pages import evidence, sections
from repopages.pages.book import SECTIONS, Page
from repopages.pages.indexes import keyword_list
from repopages.pages.keywords import by_word, keywords_of
from repopages.pages.markup import code, counted, escape

_WRITERS: tuple[Callable[[Page], str], ...] = (
    sections.metadata,
    sections.purpose,
    sections.source,
    sections.overview,
    sections.analysis,
    sections.architecture,
    evidence.dependencies,
    evidence.patterns,
    evidence.performance,
    evidence.safety,
    evidence.testing,
    evidence.related,
    evidence.references,
)


def file_text(page: Page) -> str:
    """Return the page of a file."""
    parts = [f"# {escape(page.facts.name)}"]
    if page.book.dialect.trail:
        names = page.facts.folder.split("/") if page.facts.folder else []
        above = ["/".join(names[:depth]) for depth in range(len(names) + 1)]
        trail = " / ".join(page.folder(path, index=True) for path in above)
        parts.append(f"{trail} / {code(page.facts.name)}")
    for title, write in zip(SECTIONS, _WRITERS, strict=True):
        parts += [f"## {title}", write(page)]
    found = keywords_of(page.book, page.path)
    parts.append("## Keywords")
    if page.book.dialect.keyword_pages:
        parts.append(f"[{counted(len(by_word(found)), 'keyword')} of this file]({page.keywords_link})")
    else:
        parts.append(keyword_list(page, found))
    return "\n\n".join(parts) + "\n"
