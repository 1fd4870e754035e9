"""Answers from the keyword index without a site: `thinwire docs KEYWORD`."""

from thinwire.docs.book import Book
from thinwire.docs.keywords import Keyword, all_keywords
from thinwire.docs.project import Project

_KINDS = ("class", "exception", "function", "concept", "module", "method", "property", "parameter")


def look_up(word: str, package: str) -> list[Keyword]:
    """Return the places that explain a word, best first.

    Args:
        word: An identifier or a concept, in any case. A part of it is enough if there is no whole match.
        package: Name of an importable package, or its folder. It is not imported.

    Returns:
        Whole matches, or else keywords that contain the word. Empty if there are none.

    Example::

        for one in look_up("residual", "thinwire"):
            print(one.word, one.url, one.summary)
    """
    found, sought = all_keywords(Book(Project.find(package))), word.lower()
    exact = [one for one in found if one.word.lower() == sought or one.anchor.lower() == sought]
    hits = exact or [one for one in found if sought in one.word.lower()]
    unique = {(one.word, one.kind, one.url): one for one in hits}

    def rank(one: Keyword) -> tuple[int, int, bool, str]:
        kind = _KINDS.index(one.kind) if one.kind in _KINDS else len(_KINDS)
        return kind, len(one.word), not one.summary, one.url

    return sorted(unique.values(), key=rank)
