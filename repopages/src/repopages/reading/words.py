"""Words of documents: anchors of headings, identifiers and terms."""

import re
import unicodedata

_STOP = frozenset(
    """a about above after again all also an and any are as at be because been before below between both but by can
    could did do does each e.g etc few for from further had has have he her here him his how i i.e if in into is it
    its itself just may me more most must my never no nor not note now of off on once one only or other our out over
    own same see shall she should so some still such than that the their them then there these they this those through
    to too under until up us use used uses using very via was we were what when where which while who why will with
    would yes yet you your new old""".split()
)
_IDENTIFIER = re.compile(r"[^\W\d]\w*(?:(?:\.|::)[^\W\d]\w*)*")
_PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)+")
_LONGEST = 60


def slug(title: str, seen: dict[str, int]) -> str:
    """Return the anchor that GitHub gives to a heading.

    Args:
        title: The heading, without markup.
        seen: The anchors of the document so far, each with the number of its repetitions. Changed.
    """
    kept = (char for char in title.strip().lower() if char in " -_" or unicodedata.category(char)[0] in "LMN")
    plain = "".join(kept).replace(" ", "-")
    anchor = plain
    while anchor in seen:
        seen[plain] += 1
        anchor = f"{plain}-{seen[plain]}"
    seen[anchor] = 0
    return anchor


def identifiers(text: str) -> set[str]:
    """Return the words in a text that can be names of code: identifiers, dotted ones with their parts, paths."""
    found = {word.replace("::", ".") for word in _IDENTIFIER.findall(text)}
    found |= {part for word in found if "." in word for part in word.split(".")}
    found.update(_PATH.findall(text))
    return {word for word in found if len(word) > 1 and word.lower() not in _STOP}


def term(text: str) -> str:
    """Return an emphasised or defined text as a term, or an empty text if it is a sentence or a stop word."""
    word = " ".join(text.split()).strip(" .:;,!?\"'")
    words = word.split()
    usable = 0 < len(word) <= _LONGEST and len(words) <= 5 and any(char.isalpha() for char in word)
    return word if usable and any(part.lower() not in _STOP for part in words) else ""


def code_term(text: str) -> str:
    """Return a code span as a term: a name, an option, a path or a short command, or an empty text."""
    word = " ".join(text.split())
    usable = 1 < len(word) <= _LONGEST and len(word.split()) <= 3 and any(char.isalpha() for char in word)
    return word if usable and word.lower() not in _STOP else ""
