"""The walk over a syntax tree of tree-sitter, shared by all languages.

A language is a subclass: tables of node types, and a method `on_<node type>` where a table does not suffice.
The walk goes through the tree once, in the order of the file, with a stack instead of recursion because
hostile files nest thousands of levels deep.
"""

import importlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from tree_sitter import Language, Node, Parser, Tree

from repopages.reading.languages.comments import Comments
from repopages.reading.model import Error, Facts, Finding, Import, Item, Mention

_DEEPEST = 20
"""Levels of definitions inside each other that are kept. Items are walked and pickled by recursion."""

_LONGEST = 160
"""Bytes of a dotted name and characters of evidence. Bounds the cost of chains like a.a.a.a, which nest."""

_SECONDS, _PART = 5, 1024
"""Time for parsing a file, and the bytes between two looks at the clock."""

_DOTTED = re.compile(r"[\w$]+(?:\.[\w$]+)*")
_SEPARATOR = re.compile(r"\s*(?:::<[^()]*>|\?\.|::|->|\.)\s*")
FUNCTIONS = ("function", "method", "kernel")
_TYPES = ("class", "struct", "enum", "union", "trait", "interface", "type", "implementation", "object")


@dataclass(eq=False)
class Draft:
    """A definition while its file is walked."""

    name: str
    kind: str
    row: int = 0
    end: int = 0
    signature: str = ""
    doc: str = ""
    parameters: tuple[str, ...] = ()
    decorators: tuple[str, ...] = ()
    bases: tuple[str, ...] = ()
    value: str = ""
    public: bool = True
    members: list["Draft"] = field(default_factory=list)
    parent: "Draft | None" = None
    access: str = ""

    @property
    def depth(self) -> int:
        """Number of definitions around it."""
        return 0 if self.parent is None else self.parent.depth + 1

    @property
    def dotted(self) -> str:
        """Its dotted name in the file."""
        above = self.parent.dotted if self.parent else ""
        return f"{above}.{self.name}" if above else self.name

    def item(self) -> Item:
        """Return the finished definition."""
        return Item(
            name=self.name,
            kind=self.kind,
            signature=self.signature,
            doc=self.doc,
            line=self.row + 1,
            end=self.end + 1,
            parameters=self.parameters,
            members=tuple(member.item() for member in self.members),
            decorators=self.decorators,
            bases=self.bases,
            value=self.value,
            public=self.public,
        )


def rules(topic: str, label: str, names: str) -> dict[str, tuple[str, str]]:
    """Return what calls of names show; a name with a leading dot is a method of any object."""
    return dict.fromkeys(names.split(), (topic, label))


class Reader:
    """The reader of one file. Subclasses are the languages.

    Class attributes:
        grammar: Module of the grammar and its function.
        definitions: Node types that define something, with the kind of Item.
        wrappers: Node types around a definition whose text and comment belong to it, such as `export`.
        comments: Node types of comments.
        preamble: Node types that stand above the comment at the top of a file, such as guards.
        attributes: Node types of attributes that stand before a definition.
        identifiers: Node types of simple names.
        chains: Node types of dotted names.
        calls: Node types of calls, with the field of what is called.
        strings: Node types of text literals.
        leaves: Node types whose inside is not looked at.
        loops: Node types of loops.
        evidence: Node types that are findings by themselves, with topic and label.
        effects: Called names that are findings, with topic and label. See `rules`.
        shared_top: Whether a comment at the top directly above a definition is about the file as well.
        getters: Called names whose first argument is an environment variable.
    """

    grammar: tuple[str, str]
    definitions: ClassVar[dict[str, str]] = {}
    wrappers: ClassVar[frozenset[str]] = frozenset()
    comments: ClassVar[frozenset[str]] = frozenset({"comment"})
    preamble: ClassVar[frozenset[str]] = frozenset({"identifier"})
    attributes: ClassVar[frozenset[str]] = frozenset()
    identifiers: ClassVar[frozenset[str]] = frozenset({"identifier"})
    chains: ClassVar[frozenset[str]] = frozenset()
    calls: ClassVar[dict[str, str]] = {"call_expression": "function"}
    strings: ClassVar[frozenset[str]] = frozenset()
    leaves: ClassVar[frozenset[str]] = frozenset()
    loops: ClassVar[frozenset[str]] = frozenset({"for_statement", "while_statement", "do_statement"})
    evidence: ClassVar[dict[str, tuple[str, str]]] = {}
    effects: ClassVar[dict[str, tuple[str, str]]] = {}
    getters: ClassVar[frozenset[str]] = frozenset()
    shared_top: ClassVar[bool] = False

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.source = facts.text.encode("utf-8", "replace")
        self.file = Draft("", "file")
        self.nowhere = Draft("", "nothing")
        self.notes = Comments()
        self.pending: list[Node] = []
        self.imports: list[Import] = []
        self.exports: set[str] = set()
        self.raised: list[Error] = []
        self.caught: list[Error] = []
        self.findings: list[Finding] = []
        self.mentions: dict[tuple[str, str], Mention] = {}
        self.names: set[str] = set()
        self.called: list[tuple[str, Node, Draft, int]] = []
        self.owners: dict[int, int] = {}
        self.types: dict[tuple[int, str], Draft] = {}
        self.tests = 0
        self.aliases: dict[str, str] = {}
        self.first = -1
        self.handlers: dict[str, Callable[[Node, Draft], Draft | None]] = {
            name[3:]: getattr(self, name) for name in dir(self) if name.startswith("on_")
        }

    # What a language may say differently.

    def prepared(self) -> bytes:
        """Return the source for the parser, of the same length, without what the grammar cannot know."""
        return self.source

    def name_of(self, node: Node) -> str:
        """Return the name that a node defines, or an empty text if it defines none."""
        return self.text(node.child_by_field_name("name"))

    def parameters_of(self, node: Node) -> tuple[str, ...]:
        """Return the names of the parameters of a function."""
        inside = node.child_by_field_name("parameters")
        found = [self.parameter(child) for child in inside.named_children] if inside else []
        return tuple(name for names in found for name in names)

    def parameter(self, node: Node) -> list[str]:
        """Return the names in one parameter."""
        if node.type in self.identifiers:
            return [self.text(node)]
        named = node.children_by_field_name("name") or node.children_by_field_name("pattern")
        return [self.text(child) for child in named if child.end_byte - child.start_byte < _LONGEST]

    def is_public(self, node: Node, name: str, scope: Draft) -> bool:
        """Return whether users may rely on a name."""
        return not name.startswith("_")

    def bases_of(self, node: Node) -> tuple[str, ...]:
        """Return what a class builds on."""
        return ()

    def body_of(self, node: Node) -> Node | None:
        """Return the body of a definition, before which its signature ends."""
        return node.child_by_field_name("body")

    def call(self, name: str, node: Node, scope: Draft, loops: int) -> None:
        """Look at a call, whose name has imported names spelt out."""

    def finish(self) -> None:
        """Look at the whole file after the walk."""

    # The walk.

    def read(self) -> Facts:
        """Return the facts of the file."""
        source = self.prepared()
        tree, end = _parse(self.grammar, source)
        self._walk(tree.root_node)
        for name, node, scope, loops in self.called:
            self._call(self.spelt(name), node, scope, loops)
        self.finish()
        self._beside(self.file)
        _join(self.file)
        first = min((draft.row for draft in self.file.members), default=None) if not self.shared_top else None
        return replace(
            self.facts,
            problem=self._problem(tree.root_node, end),
            doc=self.comment(self.notes.top(self.first, first)),
            items=tuple(draft.item() for draft in self.file.members),
            exports=tuple(sorted(self.exports)) if self.exports else None,
            imports=tuple(self.imports),
            raised=tuple(self.raised),
            caught=tuple(self.caught),
            findings=tuple(sorted(self.findings, key=lambda finding: finding.line)),
            mentions=tuple(self.mentions.values()),
            names=frozenset(self.spelt(name) for name in self.names),
            tests=self.tests,
        )

    def _walk(self, root: Node) -> None:
        stack: list[tuple[Node, Draft, int, Node | None]] = [(root, self.file, 0, None)]
        while stack:
            node, scope, loops, outer = stack.pop()
            kind = node.type
            if kind in self.comments:
                self._comment(node)
                continue
            if kind in self.attributes:
                self.pending.append(node)
                self.names.update(_DOTTED.findall(self.line(node)))
                continue
            inner = self._look(node, kind, scope, outer)
            if kind in self.loops:
                loops += 1
                if loops == 3:
                    self.find("performance", "loops nested 3 deep", node)
            if kind in self.calls:
                name = self.dotted(node.child_by_field_name(self.calls[kind]))
                if name:
                    self.called.append((name, node, scope, loops))
            if self.first < 0 and node is not root and kind not in self.preamble:
                self.first = node.start_point[0]
            if kind in self.leaves or inner is self.nowhere:
                continue
            wrapper = (outer or node) if kind in self.wrappers else None
            stack.extend([(child, inner, loops, wrapper) for child in reversed(node.named_children)])

    def _look(self, node: Node, kind: str, scope: Draft, outer: Node | None) -> Draft:
        """Take from a node what the tables say; return the scope of its children."""
        inner = scope
        if kind in self.definitions:
            inner = self.define(node, self.definitions[kind], scope, outer) or scope
        handler = self.handlers.get(kind)
        if handler:
            inner = handler(node, inner) or inner
        if kind not in self.wrappers:
            self.pending.clear()
        if kind in self.evidence:
            self.find(*self.evidence[kind], node)
        if kind in self.identifiers:
            self.names.add(self.text(node))
        elif kind in self.chains:
            name = self.dotted(node)
            if name:
                self.names.add(name.lstrip("."))
        return inner

    def define(
        self, node: Node, kind: str, scope: Draft, outer: Node | None = None, name: str = ""
    ) -> Draft | None:
        """Add a definition.

        Args:
            node: Its node.
            kind: Kind of Item; functions inside types become methods.
            scope: What it is defined in.
            outer: The outermost wrapper around the node.
            name: Its name, if the node alone does not say it.

        Returns:
            The definition, or None if the node defines nothing or is nested too deep.
        """
        name = name or self.name_of(node)
        if not name or len(name) > _LONGEST or scope.depth >= _DEEPEST:
            return None
        if kind in ("function", "variable", "constant") and scope.kind in _TYPES:
            kind = {"function": "method", "variable": "attribute"}.get(kind, kind)
        elif kind in ("variable", "constant") and scope.kind in FUNCTIONS:
            return None
        whole = outer or node
        first = min([whole.start_point[0], *(attribute.start_point[0] for attribute in self.pending)])
        draft = Draft(
            name=name,
            kind=kind,
            row=node.start_point[0] if self.pending else whole.start_point[0],
            end=_last_row(whole),
            signature=self.signature(node, whole),
            doc=self._doc(first, node),
            parameters=self.parameters_of(node),
            decorators=tuple(self._decorator(attribute) for attribute in self.pending),
            bases=self.bases_of(node),
            public=self.is_public(node, name, scope),
            parent=scope,
        )
        scope.members.append(draft)
        if kind in _TYPES:
            self.types[id(scope), name] = draft
        return draft

    def _doc(self, row: int, node: Node) -> str:
        """Return the comment above a row; of several definitions on a row it belongs to the first."""
        owner = self.owners.setdefault(row, node.start_byte)
        return self.comment(self.notes.above(row)) if owner == node.start_byte else ""

    def comment(self, text: str) -> str:
        """Return a comment for documentation in the markup of docstrings."""
        return text

    def signature(self, node: Node, whole: Node) -> str:
        """Return a definition as written, without its body, on one line."""
        body = self.body_of(node)
        end = body.start_byte if body else min(whole.end_byte, whole.start_byte + 4 * _LONGEST)
        text = self._shown(whole.start_byte, end, 4 * _LONGEST)
        return without_body(text)

    def own(self, owner: str, scope: Draft, node: Node) -> Draft:
        """Return the type that a method outside it belongs to, or a stand-in if it is not in the file."""
        if (id(scope), owner) in self.types:
            return self.types[id(scope), owner]
        for held in scope.members:
            if held.name == owner:  # a variable that gets methods, as in JavaScript
                self.types[id(scope), owner] = held
                return held
        draft = self.types[id(scope), owner] = Draft(
            owner, "implementation", node.start_point[0], node.end_point[0], parent=scope
        )
        draft.public = self.is_public(node, owner, scope)
        scope.members.append(draft)
        return draft

    # What the handlers of languages use.

    def text(self, node: Node | None, longest: int = 10_000) -> str:
        """Return a node as written, its start if it is long: nodes nest, and to copy all is quadratic."""
        if node is None:
            return ""
        end = min(node.end_byte, node.start_byte + longest)
        return self.source[node.start_byte : end].decode("utf-8", "replace")

    def line(self, node: Node) -> str:
        """Return a node as written, on one line and not too long."""
        return self._shown(node.start_byte, node.end_byte, _LONGEST)

    def _shown(self, start: int, end: int, longest: int) -> str:
        text = " ".join(self.source[start : min(end, start + 8 * longest)].decode("utf-8", "replace").split())
        return text if len(text) <= longest else f"{text[: longest - 1]}…"

    def dotted(self, node: Node | None) -> str:
        """Return a name with dots for every separator of the language, or an empty text if it is none."""
        if node is None or node.end_byte - node.start_byte > _LONGEST:
            return ""
        text = _SEPARATOR.sub(".", self.text(node)).strip(".")
        if _DOTTED.fullmatch(text):
            return text
        # A method of something longer: keep the name of the method.
        last = re.search(r"\.[A-Za-z_$][\w$]*$", text)
        return last.group() if last else ""

    def spelt(self, name: str) -> str:
        """Return a dotted name with an imported name at its start spelt out."""
        first, dot, rest = name.partition(".")
        return f"{self.aliases[first]}{dot}{rest}" if first in self.aliases else name

    def string(self, node: Node | None) -> str | None:
        """Return the content of a text literal with `…` for values, or None if the node is none."""
        if node is None or node.type not in self.strings:
            return None
        text = self.text(node)
        quoted = re.fullmatch(r"[a-zA-Z]*#*([\"'`])(.*)\1#*", text, re.DOTALL)
        text = quoted.group(2) if quoted else text
        return re.sub(r"\$\{[^}]*\}", "…", text)

    def arguments(self, node: Node) -> list[Node]:
        """Return the arguments of a call."""
        inside = node.child_by_field_name("arguments")
        return [child for child in inside.named_children if child.type not in self.comments] if inside else []

    def message(self, nodes: list[Node]) -> str:
        """Return the text of an error from the arguments that make it, with `…` for values."""
        for node in nodes:
            if node.type == "binary_expression":
                sides = [node.child_by_field_name("left"), node.child_by_field_name("right")]
                return re.sub(r"…+", "…", "".join(self.message([side]) for side in sides if side) or "…")
            text = self.string(node)
            if text is not None:
                return " ".join(re.sub(r"%[-+#0-9.]*[a-zA-Z]|\{[\w:?#.]*\}", "…", text).split())[:_LONGEST]
        return "…" if nodes else ""

    def find(self, topic: str, label: str, node: Node) -> None:
        """Add a finding."""
        line = node.start_point[0] + 1
        self.findings.append(Finding(topic=topic, label=label, code=self.line(node), line=line))

    def fail(self, name: str, node: Node, scope: Draft, message: str = "") -> None:
        """Add an error that the file raises."""
        line = node.start_point[0] + 1
        self.raised.append(Error(name=name, line=line, message=message, where=scope.dotted))

    def handle(self, name: str, node: Node, scope: Draft) -> None:
        """Add an error that the file handles."""
        self.caught.append(Error(name=name, line=node.start_point[0] + 1, where=scope.dotted))

    def mention(self, word: str, kind: str, node: Node, text: str = "") -> None:
        """Add an environment variable or an option, at its first line."""
        if re.fullmatch(r"[\w.-]{1,80}", word):
            line = node.start_point[0] + 1
            self.mentions.setdefault((word, kind), Mention(word=word, line=line, kind=kind, text=text))

    def options(self, written: str, node: Node, text: str = "") -> None:
        """Add the options in a text like "-p, --port <number>"."""
        for word in re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", written):
            self.mention(word, "option", node, text)

    def take(self, module: str, node: Node, scope: Draft, name: str = "", alias: str = "") -> None:
        """Add an import and the name that the file has for it."""
        inside = scope.kind in FUNCTIONS
        line = node.start_point[0] + 1
        self.imports.append(Import(module=module, name=name, alias=alias, line=line, inside=inside))

    # Parts of the walk.

    def _comment(self, node: Node) -> None:
        column = node.start_point[1]
        before = self.source[node.start_byte - column : node.start_byte] if column < _LONGEST else b"x"
        text, row = self.text(node).rstrip(), node.start_point[0]
        self.notes.add(text, row, row + text.count("\n"), alone=not before.strip())

    def _beside(self, scope: Draft) -> None:
        """Take comments behind members and fields, which have none above them."""
        for draft in scope.members:
            if not draft.doc and draft.row == draft.end and draft.kind not in FUNCTIONS:
                draft.doc = self.notes.beside(draft.row)
            self._beside(draft)

    def _decorator(self, node: Node) -> str:
        return re.sub(r"^#!?\[|\]$|^@", "", self.line(node))

    def _call(self, name: str, node: Node, scope: Draft, loops: int) -> None:
        short = name.removeprefix("std.")
        found = self.effects.get(short) or self.effects.get("." + name.rpartition(".")[2])
        if found:
            self.find(*found, node)
        given = self.arguments(node)
        if short in self.getters and given:
            self.mention(self.string(given[0]) or "", "environment", node)
        last = name.rpartition(".")[2].lower()
        if last in ("option", "requiredoption", "add_option", "add_flag", "add_argument", "addoption"):
            texts = [text for text in map(self.string, given) if text]
            if texts and texts[0].startswith("-"):
                self.options(texts[0], node, texts[-1] if len(texts) > 1 else "")
        self.call(name, node, scope, loops)

    def _problem(self, root: Node, end: int) -> str:
        """Return the line of the first error in the tree. Valid uses of macros can be errors, too."""
        if end < len(self.source):
            line = self.source.count(b"\n", 0, end) + 1
            return f"line {line}: not read from here on, the parser needed more than {_SECONDS} s"
        if not root.has_error:
            return ""
        node = root
        while not (node.is_error or node.is_missing):
            inside = next((child for child in node.children if child.has_error or child.is_missing), None)
            if inside is None:
                break
            node = inside
        return f"line {node.start_point[0] + 1}: not understood by the {self.facts.language} grammar"


def _parse(grammar: tuple[str, str], source: bytes) -> tuple[Tree, int]:
    """Return the tree of a source and how many of its bytes were read.

    tree-sitter has no limit, and its recovery from errors is quadratic for some inputs: 90 kB of tags in a
    file of TOML took 11 s. It asks for the source in parts, so it sees an end when the time is over.
    """
    deadline, read = time.process_time() + _SECONDS, 0

    def part(offset: int, _: object) -> bytes:
        nonlocal read
        if time.process_time() > deadline:
            return b""
        read = max(read, offset + _PART)
        return source[offset : offset + _PART]

    tree = Parser(_language(grammar)).parse(part)
    return tree, read


_LANGUAGES: dict[tuple[str, str], Language] = {}


def _language(grammar: tuple[str, str]) -> Language:
    """Return a grammar, loaded when the first file needs it."""
    if grammar not in _LANGUAGES:
        module: Any = importlib.import_module(grammar[0])
        _LANGUAGES[grammar] = Language(getattr(module, grammar[1])())
    return _LANGUAGES[grammar]


def _join(scope: Draft) -> None:
    """Move methods of stand-ins to the types that come later in the file."""
    known = {member.name: member for member in scope.members if member.kind in _TYPES[:-2]}
    for member in list(scope.members):
        _join(member)
        owner = known.get(member.name)
        if member.kind == "implementation" and owner:
            owner.members.extend(member.members)
            owner.bases += tuple(base for base in member.bases if base not in owner.bases)
            scope.members.remove(member)


def _last_row(node: Node) -> int:
    """Return the last row of a node; directives of the preprocessor end at the start of the next line."""
    row, column = node.end_point
    return max(row - (column == 0), node.start_point[0])


def descendants(node: Node, types: frozenset[str]) -> Iterator[Node]:
    """Yield the nodes of some types inside a node, outermost only."""
    stack = [node]
    while stack:
        child = stack.pop()
        if child.type in types and child != node:
            yield child
        else:
            stack.extend(reversed(child.named_children))


def without_body(text: str) -> str:
    """Return the head of a definition without the signs that begin its body.

    The only parameter of an arrow function gets parentheses, or it would look like the value of a variable.
    """
    text = re.sub(r"((?:=|\basync)\s*)([\w$]+)\s*=>\s*$", r"\1(\2)", text)
    return re.sub(r"(?:\s|[;{,]|=>?$)+$", "", text)
