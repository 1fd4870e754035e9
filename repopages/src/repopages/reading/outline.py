"""The outline of a document while it is read: sections, their anchors, terms and words, and links."""

import re
import unicodedata
from dataclasses import dataclass, field, replace

from repopages.reading.model import Facts, Finding, Mention, Section

_STOP = re.compile(
    r"an?|about|above|after|again|all|also|and|any|are|as|at|be|because|been|before|below|between|both|but|by|can"
    r"|could|did|do|does|each|e\.g|etc|few|for|from|further|had|has|have|he|her|here|him|his|how|i|i\.e|if|in|into"
    r"|is|it|its|itself|just|may|me|more|most|must|my|never|new|no|nor|not|note|now|of|off|old|on|once|one|only|or"
    r"|other|our|out|over|own|same|see|shall|she|should|so|some|still|such|than|that|the|their|them|then|there"
    r"|these|they|this|those|through|to|too|under|until|up|us|used?|uses|using|very|via|was|we|were|what|when"
    r"|where|which|while|who|why|will|with|would|yes|yet|you|your",
    re.IGNORECASE,
)
"""Words that are never a term."""

_IDENTIFIER = re.compile(r"[^\W\d]\w*(?:(?:\.|::)[^\W\d]\w*)*")
_PATH = re.compile(r"(?<![\w./-])[\w.-]+(?:/[\w.-]+)+")
_LONGEST = 60
"""Characters of a term."""

PARAGRAPH = 600
"""Characters of a first paragraph that are kept."""


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
    """Return the words of a text that can be names of code: identifiers, parts of dotted ones, paths."""
    found = {word.replace("::", ".") for word in _IDENTIFIER.findall(text)}
    found |= {part for word in found if "." in word for part in word.split(".")}
    found.update(_PATH.findall(text))
    return {word for word in found if len(word) > 1 and not _STOP.fullmatch(word)}


def term(text: str) -> str:
    """Return an emphasised or defined text as a term, or an empty text if it is a sentence or a stop word."""
    word = " ".join(text.split()).strip(" .:;,!?\"'")
    words = word.split()
    usable = 0 < len(word) <= _LONGEST and len(words) <= 5 and any(char.isalpha() for char in word)
    return word if usable and not all(_STOP.fullmatch(part) for part in words) else ""


def code_term(text: str) -> str:
    """Return a code span as a term: a name, an option, a path or a short command, or an empty text."""
    word = " ".join(text.split())
    usable = 1 < len(word) <= _LONGEST and len(word.split()) <= 3 and any(char.isalpha() for char in word)
    return word if usable and not _STOP.fullmatch(word) else ""


@dataclass
class Part:
    """A section while its document is read."""

    title: str
    level: int
    line: int
    anchor: str
    text: str = ""
    words: set[str] = field(default_factory=set)
    terms: dict[str, Mention] = field(default_factory=dict)

    def add(self, word: str, kind: str, line: int, text: str = "") -> None:
        """Add a term; a definition replaces a mere emphasis."""
        known = self.terms.get(word.lower())
        if word and (known is None or (kind == "defined" and known.kind != "defined")):
            self.terms[word.lower()] = Mention(word=word, line=line, kind=kind, text=text[:PARAGRAPH])

    def section(self) -> Section:
        """Return the finished section."""
        return Section(
            title=self.title,
            level=self.level,
            line=self.line,
            anchor=self.anchor,
            text=self.text,
            words=frozenset(self.words),
            terms=tuple(self.terms.values()),
        )


@dataclass
class Outline:
    """What is known of a document while it is read."""

    title: str = ""
    doc: str = ""
    parts: list[Part] = field(default_factory=list)
    links: list[tuple[str, int]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    anchors: dict[str, int] = field(default_factory=dict)

    @property
    def part(self) -> Part:
        """The section that is read now; text above the first heading is a section without one."""
        if not self.parts:
            self.parts.append(Part("", 1, 1, ""))
        return self.parts[-1]

    def head(self, title: str, level: int, line: int) -> None:
        """Start a section."""
        title = " ".join(title.split())
        # A lower heading below other text is that of a part, such as "Table of contents".
        if not self.title and (level == 1 or not self.parts):
            self.title = title
        self.parts.append(Part(title, level, line, slug(title, self.anchors)))
        self.part.words |= identifiers(title)

    def say(self, text: str) -> None:
        """Add a paragraph, which introduces its section and the document if it is the first."""
        text = " ".join(text.split())
        self.part.text = self.part.text or text[:PARAGRAPH]
        self.doc = self.doc or text[:PARAGRAPH]
        self.part.words |= identifiers(text)

    def find(self, topic: str, label: str, code: str, line: int) -> None:
        """Add a finding."""
        self.findings.append(Finding(topic=topic, label=label, code=" ".join(code.split())[:160], line=line))

    def facts(self, facts: Facts) -> Facts:
        """Return the facts of the document; a section without a heading is named by the file."""
        for part in self.parts:
            part.title = part.title or self.title or facts.name
        return replace(
            facts,
            title=self.title,
            doc=self.doc,
            sections=tuple(part.section() for part in self.parts),
            links=tuple(dict.fromkeys(self.links)),
            findings=tuple(sorted(self.findings, key=lambda finding: finding.line)),
        )
