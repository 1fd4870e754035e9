"""Readers of programming languages by tree-sitter: one walk, and a table for each language.

comments   texts of comments, those above definitions and at the top of a file
reader     the walk over the tree, which all languages share
c          C, C++, CUDA
rust, go, javascript (and TypeScript), shell
"""

from repopages.reading.languages.c import C, Cpp, Cuda
from repopages.reading.languages.go import Go
from repopages.reading.languages.javascript import JavaScript, Tsx, TypeScript
from repopages.reading.languages.reader import Reader
from repopages.reading.languages.rust import Rust
from repopages.reading.languages.shell import Shell
from repopages.reading.model import Facts

_READERS: dict[str, type[Reader]] = {
    "C": C,
    "C++": Cpp,
    "CUDA": Cuda,
    "Rust": Rust,
    "Go": Go,
    "JavaScript": JavaScript,
    "TypeScript": TypeScript,
    "Shell": Shell,
}

LANGUAGES = tuple(_READERS)
"""Languages that `read` understands."""


def read(facts: Facts) -> Facts:
    """Return the facts of a source file: its definitions, imports, errors and findings.

    Args:
        facts: Its language and its text, with role, path and lexer.

    Returns:
        The same with what the syntax tree says. Broken syntax is named in `problem`.
    """
    reader = Tsx if facts.lexer == "tsx" else _READERS[facts.language]
    return reader(facts).read()
