"""The facts of one file, the same for every language. Readers fill them in, relations and pages use them.

Repository  ──walk──▶  File  ──reader of its language──▶  Facts  ──all together──▶  Library  ──▶  pages

Everything here is plain data that can be pickled, so that files are read by several processes and unchanged
files are not read again.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Item:
    """A definition: a function, class, constant, macro, key of a data file and so on.

    Attributes:
        name: Its name, without those of what contains it.
        kind: The word that its language has for it: "function", "class", "exception", "enum", "struct",
            "trait", "interface", "namespace", "macro", "type"; inside them "method", "property", "attribute",
            "member" (of an enum); for values "constant", "variable"; in data files "key".
        signature: Parameters and result as written, the type of an attribute, or the value of a key.
        doc: Its docstring or the comment above it, without comment marks.
        line: First line in the file, from 1.
        end: Last line in the file.
        parameters: Names of its parameters.
        members: Definitions inside it: methods, attributes, nested functions and classes.
        decorators: Decorators or attributes as written, without the sign before them.
        bases: Base classes, interfaces and traits, as written.
        value: The value of a constant as written, or an empty text.
        public: Whether its language or its name says that users may rely on it.
    """

    name: str
    kind: str
    signature: str = ""
    doc: str = ""
    line: int = 1
    end: int = 1
    parameters: tuple[str, ...] = ()
    members: tuple["Item", ...] = ()
    decorators: tuple[str, ...] = ()
    bases: tuple[str, ...] = ()
    value: str = ""
    public: bool = True

    def walk(self, prefix: str = "") -> Iterator[tuple[str, "Item"]]:
        """Yield this item and all inside it, each with its dotted name in the file."""
        name = f"{prefix}.{self.name}" if prefix else self.name
        yield name, self
        for member in self.members:
            yield from member.walk(name)


@dataclass(frozen=True, kw_only=True)
class Import:
    """An import, include, use or require.

    Attributes:
        module: The module, header, crate path or file as written: "os.path", "torch/extension.h", "./view".
        name: The imported name, "*", or an empty text for the whole module.
        alias: The local name, if it is another one.
        line: Its line.
        level: Leading dots of a relative import in Python.
        inside: Whether it stands in a function, so that it runs late.
        types_only: Whether only type checkers read it, as below Python's `if TYPE_CHECKING`.
    """

    module: str
    name: str = ""
    alias: str = ""
    line: int = 1
    level: int = 0
    inside: bool = False
    types_only: bool = False

    @property
    def local(self) -> str:
        """The name that the file uses for it."""
        return self.alias or self.name or self.module


@dataclass(frozen=True, kw_only=True)
class Error:
    """A raise, throw or panic, or a handler of one.

    Attributes:
        name: The exception as written, such as "ValueError".
        line: Its line.
        message: Its text, with `…` for values.
        where: Dotted name of the function around it, or an empty text.
    """

    name: str
    line: int
    message: str = ""
    where: str = ""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A fact in the syntax tree that a reader should know of.

    Attributes:
        topic: "pattern", "performance" or "security".
        label: What it is, in a few words without the code: "starts a process", "loops nested 3 deep".
        code: The evidence as written, on one line.
        line: Its line.
    """

    topic: str
    label: str
    code: str
    line: int


@dataclass(frozen=True, kw_only=True)
class Mention:
    """A word at a line: an environment variable, a command-line option, a term of a document.

    Attributes:
        word: The word.
        line: Its line.
        kind: "environment", "option"; in documents "emphasised", "defined" or "code".
        text: Its meaning, if the file says it: an option's help, a definition.
    """

    word: str
    line: int
    kind: str
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a document, from one heading to the next.

    Attributes:
        title: The heading, without markup.
        level: 1 for the title of the document.
        line: Line of the heading.
        anchor: The heading's anchor as GitHub makes it, unique in the document.
        text: Its first paragraph, without markup.
        words: All identifiers in it, by which relations find the files that it is about.
        terms: Emphasised, defined and code words.
    """

    title: str
    level: int
    line: int
    anchor: str
    text: str = ""
    words: frozenset[str] = frozenset()
    terms: tuple[Mention, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All that is known of a file from its content alone.

    Attributes:
        path: Its path from the root of the repository, with "/".
        size: Bytes.
        language: "Python", "C", "C++", "CUDA", "Rust", "Go", "JavaScript", "TypeScript", "Shell", "Markdown",
            "reStructuredText", "TOML", "YAML", "JSON", "Notebook", "Text" or "Binary".
        role: "source", "test", "document", "data" or "other".
        lexer: Pygments' name of the language, such as "python".
        encoding: "utf-8", "latin-1" and so on, or an empty text for binary files.
        digest: Hash of its content.
        text: Its text, empty if it is not shown.
        hidden: Why the text is not shown: "binary", "52,428,800 bytes, more than ...". Empty if it is shown.
        problem: Why facts are missing: "line 3: invalid syntax". Empty if all of it was understood.
        doc: A docstring of a module, the comment at the top of a file, or the first paragraph of a document.
        title: Title of a document.
        items: Its top-level definitions, in the order of the file.
        exports: Names that it declares public (`__all__`, `export`), or None if it declares none.
        imports: Its imports, in the order of the file.
        raised: Errors that it raises.
        caught: Errors that it catches.
        findings: Patterns, performance and security.
        mentions: Environment variables and command-line options.
        sections: Sections of a document; the cells of a notebook under its headings.
        links: Targets of a document's links, as written, with the line.
        names: Identifiers that the file uses, dotted where they are written so ("torch.nn.Linear"), with
            imported names spelt out.
        tests: Number of tests in it.
    """

    path: str
    size: int
    language: str
    role: str
    lexer: str = "text"
    encoding: str = ""
    digest: str = ""
    text: str = field(default="", repr=False)
    hidden: str = ""
    problem: str = ""
    doc: str = ""
    title: str = ""
    items: tuple[Item, ...] = ()
    exports: tuple[str, ...] | None = None
    imports: tuple[Import, ...] = ()
    raised: tuple[Error, ...] = ()
    caught: tuple[Error, ...] = ()
    findings: tuple[Finding, ...] = ()
    mentions: tuple[Mention, ...] = ()
    sections: tuple[Section, ...] = ()
    links: tuple[tuple[str, int], ...] = ()
    names: frozenset[str] = frozenset()
    tests: int = 0

    @property
    def name(self) -> str:
        """Name of the file."""
        return self.path.rpartition("/")[2]

    @property
    def folder(self) -> str:
        """Path of its folder, empty for the root."""
        return self.path.rpartition("/")[0]

    @property
    def lines(self) -> int:
        """Number of lines, 0 for a file that is not shown."""
        return self.text.count("\n") + bool(self.text and not self.text.endswith("\n"))

    def walk(self) -> Iterator[tuple[str, Item]]:
        """Yield all definitions, nested ones too, each with its dotted name in the file."""
        for item in self.items:
            yield from item.walk()
