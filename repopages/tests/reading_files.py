"""Read a text as a file of a repository, for the tests of readers."""

from repopages.reading.data import read_data
from repopages.reading.detect import language_of
from repopages.reading.documents import read_markdown, read_text
from repopages.reading.languages import LANGUAGES, read
from repopages.reading.model import Facts, Item
from repopages.reading.notebooks import read_notebook
from repopages.reading.rst import read_rst

READERS = dict.fromkeys(LANGUAGES, read) | {
    "TOML": read_data,
    "YAML": read_data,
    "JSON": read_data,
    "Markdown": read_markdown,
    "Text": read_text,
    "reStructuredText": read_rst,
    "Notebook": read_notebook,
}


def read_as(path: str, text: str) -> Facts:
    """Return the facts of a text that has this path in its repository."""
    language, lexer, role = language_of(path, text.encode("utf-8", "replace")[:4000])
    size = len(text.encode("utf-8", "replace"))
    return READERS[language](
        Facts(path=path, size=size, language=language, lexer=lexer, role=role, text=text)
    )


def items(facts: Facts) -> dict[str, Item]:
    """Return the definitions of a file by their dotted names."""
    return dict(facts.walk())


def labels(facts: Facts) -> set[tuple[str, int]]:
    """Return the findings of a file with their lines."""
    return {(finding.label, finding.line) for finding in facts.findings}


def words(facts: Facts, kind: str) -> dict[str, int]:
    """Return the environment variables or options of a file with their lines."""
    return {mention.word: mention.line for mention in facts.mentions if mention.kind == kind}
