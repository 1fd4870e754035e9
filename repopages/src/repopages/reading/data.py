"""TOML, YAML and JSON: keys with their lines, values and comments, and what known files depend on.

The files are parsed by tree-sitter, not loaded: a broken file still has keys, aliases of YAML are not
expanded and tags construct nothing.
"""

import re
from dataclasses import dataclass, replace
from typing import ClassVar

from tree_sitter import Node

from repopages.reading.languages.reader import Draft, Reader, descendants
from repopages.reading.model import Facts, Finding

_DEPTH, _MEMBERS, _KEYS = 6, 300, 2000
"""Levels, keys of one mapping and keys of a file that become items; the others are counted."""

_DEEPEST = 100
_PREVIEW = 80
_SECRET = re.compile(
    r"(?:^|[_-])(?:password|passwd|secret|api[_-]?key|private[_-]?key|access[_-]?token)$", re.I
)


@dataclass(frozen=True)
class _Known:
    """What a key of a well-known file depends on.

    Attributes:
        files: Pattern of the path of the file.
        keys: Pattern of the dotted keys.
        what: "name" if the key, or the group `name` of the pattern, is the dependency; "requirements" and
            "values" for the texts of the value; "files" for paths from the folder of the file.
    """

    files: str
    keys: str
    what: str


_KNOWN = (
    _Known(r"package\.json", r"(?:dev|peer|optional)?[dD]ependencies\.(?P<name>.+)", "name"),
    _Known(r"package\.json", r"main|module|types|typings|browser|bin(?:\..+)?", "files"),
    _Known(r"tsconfig.*\.json", r"extends|references\.path", "values"),
    _Known(
        r"pyproject\.toml",
        r"project\.dependencies|project\.optional-dependencies\..+|build-system\.requires|dependency-groups\..+",
        "requirements",
    ),
    _Known(r"pyproject\.toml", r"tool\.poetry\.(?:.+\.)?(?:dev-)?dependencies\.(?P<name>[^.]+)", "name"),
    _Known(
        r"Cargo\.toml",
        r"(?:.+\.)?(?:dev-|build-)?dependencies\.(?P<name>[^.]+)(?:\.workspace|\.version)?",
        "name",
    ),
    _Known(r"Cargo\.toml", r"workspace\.members|lib\.path|bin\.path", "files"),
    _Known(r"(?:.*/)?workflows/[^/]+|(?:.*/)?action\.ya?ml", r"(?:.+\.)?uses", "values"),
    _Known(r"\.pre-commit-config\.yaml", r"repos\.repo", "values"),
)


def read_data(facts: Facts) -> Facts:
    """Return the facts of a file of TOML, YAML or JSON.

    Args:
        facts: Its language and text.

    Returns:
        The same with its keys as items, the comment at its top, and the dependencies that well-known files
        such as package.json and pyproject.toml state.
    """
    readers: dict[str, type[_Data]] = {"TOML": _Toml, "YAML": _Yaml, "JSON": _Json}
    return readers[facts.language](facts).read()


class _Data(Reader):
    """The walk over keys, shared by the three formats."""

    identifiers = frozenset()
    calls: ClassVar = {}
    shared_top = True
    sequences: ClassVar[frozenset[str]]
    mappings: ClassVar[frozenset[str]]

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self.count = 0
        self.keys: dict[tuple[int, str], Draft] = {}
        self.left_out: dict[int, tuple[Draft, int, int]] = {}
        self.known = [known for known in _KNOWN if re.fullmatch(rf"(?:.*/)?{known.files}", facts.path)]

    def value_of(self, node: Node) -> Node | None:
        """Return the value of a pair, without what wraps it."""
        return node.child_by_field_name("value")

    def unquoted(self, node: Node | None) -> str:
        """Return the text of a key or a value without quotes."""
        text = self.text(node).strip()
        return text[1:-1] if len(text) > 1 and text[0] in "\"'" and text[-1] == text[0] else text

    def is_public(self, node: Node, name: str, scope: Draft) -> bool:
        """Return True: keys are not private."""
        return True

    def define(
        self, node: Node, kind: str, scope: Draft, outer: Node | None = None, name: str = ""
    ) -> Draft | None:
        """Add a key, once if elements of a list repeat it, and not more keys than the limits say."""
        name, value = " ".join(self.name_of(node).split())[:_PREVIEW], self.value_of(node)
        if not name:
            return None
        known = self.keys.get((id(scope), name))
        if known is not None:
            self._depends(known, node, value)
            return known
        if scope.depth >= _DEPTH or len(scope.members) >= _MEMBERS or self.count >= _KEYS:
            _, number, line = self.left_out.get(id(scope), (scope, 0, node.start_point[0] + 1))
            self.left_out[id(scope)] = (scope, number + 1, line)
            return self.nowhere
        draft = super().define(node, "key", scope, None, name)
        if draft is not None:
            self.count += 1
            self.keys[id(scope), name] = draft
            draft.signature, draft.parameters, draft.value = "", (), self._preview(value)
            self._depends(draft, node, value)
            if _SECRET.search(name) and re.fullmatch(r"[\"']?[\w+/=.-]{8,}[\"']?", self.text(value)):
                line = node.start_point[0] + 1
                self.findings.append(
                    Finding(
                        topic="security", label="value of a key that is named a secret", code=name, line=line
                    )
                )
        return draft

    def _preview(self, value: Node | None) -> str:
        """Return a value on one line, or the size of a list or mapping."""
        if value is None:
            return ""
        inside = [child for child in value.named_children if child.type not in self.comments]
        if value.type in self.mappings:
            return f"{len(inside):,} key{'s' * (len(inside) != 1)}"
        text = self._shown(value.start_byte, value.end_byte, _PREVIEW)
        if value.type in self.sequences and (len(text) >= _PREVIEW or "{" in text or ":" in text):
            return f"{len(inside):,} element{'s' * (len(inside) != 1)}"
        return text

    def _depends(self, draft: Draft, node: Node, value: Node | None) -> None:
        """Add what a key of a well-known file depends on."""
        for known in self.known:
            found = re.fullmatch(known.keys, draft.dotted)
            if not found or (value is not None and known.what == "files" and value.type in self.mappings):
                continue
            if known.what == "name":
                self._take(found.group("name"), known.what, node)
            elif value is not None:
                strings = [value] if value.type in self.strings else descendants(value, self.strings)
                for child in strings:
                    self._take(self.unquoted(child), known.what, child)

    def _take(self, name: str, what: str, node: Node) -> None:
        if what == "requirements":
            found = re.match(r"[A-Za-z0-9][\w.-]*", name)
            name = found.group() if found else ""
        elif what == "files" and not name.startswith("."):
            name = f"./{name}"
        if name and not any(taken.module == name for taken in self.imports):
            self.take(name, node, self.file)

    def finish(self) -> None:
        """Say how many keys are not listed."""
        for scope, number, line in self.left_out.values():
            text = f"{scope.dotted + ': ' if scope.name else ''}and {number:,} more keys"
            self.findings.append(
                Finding(topic="pattern", label="keys that are not listed", code=text, line=line)
            )


class _Json(_Data):
    grammar = ("tree_sitter_json", "language")
    definitions: ClassVar = {"pair": "key"}
    strings = leaves = frozenset({"string"})
    sequences = frozenset({"array"})
    mappings = frozenset({"object"})
    preamble = frozenset({"object"})

    def name_of(self, node: Node) -> str:
        return self.unquoted(node.child_by_field_name("key"))


class _Toml(_Data):
    grammar = ("tree_sitter_toml", "language")
    definitions: ClassVar = {"pair": "key", "table": "key", "table_array_element": "key"}
    strings = leaves = frozenset({"string"})
    sequences = frozenset({"array"})
    mappings = frozenset({"inline_table"})

    def name_of(self, node: Node) -> str:
        key = next(iter(node.named_children), None)
        if key is not None and key.type == "dotted_key":
            return re.sub(r"\s*\.\s*", ".", self.text(key)).replace('"', "")
        return self.unquoted(key)

    def value_of(self, node: Node) -> Node | None:
        return node.named_children[1] if node.type == "pair" and len(node.named_children) > 1 else None


class _Yaml(_Data):
    grammar = ("tree_sitter_yaml", "language")
    definitions: ClassVar = {"block_mapping_pair": "key", "flow_pair": "key"}
    strings = leaves = frozenset({"plain_scalar", "double_quote_scalar", "single_quote_scalar"})
    sequences = frozenset({"block_sequence", "flow_sequence"})
    mappings = frozenset({"block_mapping", "flow_mapping"})
    preamble = frozenset({"document", "block_node", "block_mapping"})
    evidence: ClassVar = {
        "anchor": ("pattern", "anchor, a value that aliases repeat"),
        "alias": ("pattern", "alias, which repeats an anchor"),
    }

    def name_of(self, node: Node) -> str:
        return self.unquoted(node.child_by_field_name("key"))

    def read(self) -> Facts:
        """Return the facts; deep nesting would make the scanner of the grammar write beyond its buffer."""
        if _levels(self.facts.text) > _DEEPEST:
            return replace(self.facts, problem=f"not read: nested more than {_DEEPEST} levels deep")
        return super().read()

    def value_of(self, node: Node) -> Node | None:
        value = node.child_by_field_name("value")
        inside = (
            [child for child in value.named_children if child.type not in ("anchor", "tag")] if value else []
        )
        return inside[0] if inside else value

    def on_tag(self, node: Node, scope: Draft) -> None:
        """Note tags that construct objects in programs that load the file."""
        if re.match(r"!!?(?:python|ruby|java|javax)", self.text(node)):
            self.find("security", "tag that constructs an object", node)


def _levels(text: str) -> int:
    """Return an upper bound of the levels of YAML's blocks: columns at which lines and their marks start."""
    deepest, open_columns = 0, list[int]()
    for line in text.splitlines():
        marks = re.match(r"\s*(?:[-?:]\s+)*", line)
        end = marks.end() if marks else 0
        columns = [found.start() for found in re.finditer(r"[-?:]", line[:end])] + [end]
        if end == len(line) and len(columns) == 1:
            continue
        while open_columns and open_columns[-1] >= columns[0]:
            open_columns.pop()
        open_columns += columns
        deepest = max(deepest, len(open_columns))
    return deepest
