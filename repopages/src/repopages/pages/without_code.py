"""Sections of pages of files that have no code: documents, data, and files that are not parsed."""

import re

from repopages.pages.book import Page
from repopages.pages.markup import code, counted, escape, listed

PARSED = ("Python", "C", "C++", "CUDA", "Rust", "Go", "JavaScript", "TypeScript", "Shell")
"""Languages whose syntax is read."""

_SECRET = re.compile(r"(passw(or)?d|secret|token|credential|private_?key|api_?key)", re.IGNORECASE)


_SOUGHT = {
    "pattern": {
        "Python": "generators, context managers, decorators, caches, data classes and the like",
        "": "idioms of the language, such as concurrency, checked assumptions and resource handling",
    },
    "performance": {
        "Python": "deep loops, copies, work repeated in loops, blocking and collective calls",
        "": "loops nested 3 deep, and calls in loops that allocate, copy or compile",
    },
    "security": {
        "Python": "processes, sockets, native code, pickles, evaluated text, written files, broad handlers",
        "C": "unbounded reads and copies, commands, loaded code, sockets, temporary and written files",
        "Rust": "unsafe code, unchecked values, processes, sockets and written files",
        "Go": "processes, sockets, unsafe memory, written files, weak hashes and random numbers",
        "JavaScript": "text run as code, HTML written into the page, processes, sockets, written files",
        "Shell": "text run as code, downloads that are run, other users, removed files, sockets",
    },
}
"""What syntax trees are searched for, by topic and language."""

_LIKE = {"C++": "C", "CUDA": "C", "TypeScript": "JavaScript"}
_WITHOUT = {"pattern": "idioms", "performance": "costly forms", "security": "unsafe effects"}


def is_prose(page: Page) -> bool:
    """Return whether a file is a document without code that runs. A notebook has such code."""
    return (
        page.facts.role == "document" and page.facts.language != "Notebook" and bool(page.facts.text.strip())
    )


def nothing_found(page: Page, topic: str) -> str:
    """Return one line for a topic of which nothing was found: what was looked for, or why nothing was."""
    sought, language = _SOUGHT[topic], page.facts.language
    words = sought.get(_LIKE.get(language, language), sought.get("", sought["Python"]))
    unread = f" A part was not understood: {escape(page.facts.problem)}." if page.facts.problem else ""
    return not_searched(page, _WITHOUT[topic]) or f"Searched for {words}: none found.{unread}"


def not_searched(page: Page, sought: str) -> str:
    """Return why a file was not searched, or an empty text if it was."""
    facts = page.facts
    if facts.hidden or not facts.text.strip():
        return f"Not searched for {sought}: {escape(facts.hidden) if facts.hidden else 'the file is empty'}."
    if facts.language in PARSED or facts.language == "Notebook":
        return ""
    return f"Not searched for {sought}: {escape(facts.language)} is not parsed."


def data_patterns(page: Page) -> str:
    """Return the shape of a data file."""
    names = [name for name, _ in page.facts.walk()]
    depth = max((_depth(item) for item in page.facts.items), default=0)
    return f"{counted(len(names), 'key')}, nested {depth} deep." if names else "It has no keys."


def _depth(item: object) -> int:
    return 1 + max((_depth(member) for member in getattr(item, "members", ())), default=0)


def data_safety(page: Page) -> str:
    """Return the keys of a data file whose names suggest a credential."""
    found = [
        (name, item)
        for name, item in page.facts.walk()
        # The name of a package says what the package is for.
        if _SECRET.search(item.name) and "dependencies." not in name.lower()
    ]
    if not found:
        count = counted(sum(1 for _ in page.facts.walk()), "key")
        return f"{count} searched for names of credentials (password, secret, token, key): none found."
    shown = [f"{code(name)} (line {page.line(item.line)})" for name, item in found]
    return f"Keys that are named like a credential: {listed(shown, 12)}."


def document_safety(page: Page) -> str:
    """Return the links of a document that leave the repository or are not encrypted."""
    outside = [target for target, _ in page.facts.links if re.match(r"(https?:)?//", target)]
    open_ = [(target, line) for target, line in page.facts.links if target.startswith("http://")]
    odd = [
        (target, line) for target, line in page.facts.links if re.match(r"(javascript|data|file):", target)
    ]
    leaving = counted(len(outside), "link") if outside else "No link"
    parts = [f"{leaving} out of the repository"]
    for what, held in (("not encrypted", open_), ("with a script, data or a local file", odd)):
        shown = [f"{code(target)} (line {page.line(line)})" for target, line in held]
        parts += [f"{counted(len(held), 'link')} {what}: {listed(shown, 6)}"] if held else []
    return "; ".join(parts) + "."


def document_performance(page: Page) -> str:
    """Return the length of a document."""
    words = len(re.findall(r"\w+", page.facts.text))
    minutes = max(1, round(words / 200))
    return f"Nothing in it runs. It has {counted(words, 'word')}, about {counted(minutes, 'minute')} to read."


def data_performance(page: Page) -> str:
    """Return the size of a data file."""
    facts = page.facts
    return f"Nothing in it runs. A reader parses {counted(facts.size, 'byte')} of {escape(facts.language)}."
