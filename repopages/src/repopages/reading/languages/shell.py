"""Shell."""

import re
from typing import ClassVar

from tree_sitter import Node

from repopages.reading.languages.reader import Draft, Reader, rules
from repopages.reading.model import Facts

_OWN = re.compile(
    r"IFS|OPT(ARG|IND|ERR)|RANDOM|SECONDS|LINENO|FUNCNAME|BASH(PID|_\w+)?|PIPESTATUS|REPLY|P?PID|E?UID|GROUPS"
    r"|DIRSTACK|(OLD)?PWD|SHLVL|COLUMNS|LINES|ZSH_VERSION|EPOCHSECONDS"
)
"""Variables that the shell itself sets."""

_ASSIGNING = {"read", "mapfile", "readarray", "getopts", "unset", "printf"}
_SHELLS = {"sh", "bash", "zsh", "dash", "ksh", "sudo", "python", "python3"}


class Shell(Reader):
    """Shell scripts of sh, bash and zsh."""

    grammar = ("tree_sitter_bash", "language")
    definitions: ClassVar = {"function_definition": "function"}
    identifiers = frozenset({"command_name"})
    calls: ClassVar = {"command": "name"}
    strings = frozenset({"string", "raw_string", "word"})
    loops = frozenset({"for_statement", "while_statement", "c_style_for_statement"})
    evidence: ClassVar = {
        "subshell": ("pattern", "subshell"),
        "heredoc_redirect": ("pattern", "text in the script"),
        "process_substitution": ("pattern", "output of a command as a file"),
    }
    effects: ClassVar = {
        **rules("security", "runs text as code", "eval"),
        **rules("security", "works as another user", "sudo su doas"),
        **rules("security", "opens network connections", "curl wget nc ssh scp rsync ftp"),
        **rules("security", "changes rights", "chmod chown"),
        **rules("pattern", "handles signals", "trap"),
        **rules("pattern", "waits for processes", "wait"),
        **rules("pattern", "ends the script", "exit"),
        **rules("pattern", "checks a condition", "set"),
    }

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self.assigned: set[str] = set()
        self.used: dict[str, Node] = {}

    def arguments(self, node: Node) -> list[Node]:
        """Return the arguments of a command."""
        return node.children_by_field_name("argument")

    def dotted(self, node: Node | None) -> str:
        """Return the name of a command as written."""
        text = self.text(node) if node and node.end_byte - node.start_byte < 100 else ""
        return text if re.fullmatch(r"[\w./+-]+", text) else ""

    def spelt(self, name: str) -> str:
        """Return a name as it is: imports of the shell give no names."""
        return name

    def on_function_definition(self, node: Node, scope: Draft) -> None:
        """Count tests of shunit2."""
        self.tests += bool(re.match(r"test_?[A-Za-z]", self.name_of(node)) and self.facts.role == "test")

    def on_variable_assignment(self, node: Node, scope: Draft) -> None:
        """Add a variable; capitals are constants."""
        name = self.text(node.child_by_field_name("name"))
        value = node.child_by_field_name("value")
        # NAME=${NAME:-default} reads the environment before it sets the variable.
        if value is not None and re.search(rf"\$\{{?{re.escape(name)}\b", self.text(value)[:400]):
            self.used.setdefault(name, node)
        known = name in self.assigned
        self.assigned.add(name)
        if scope is self.file and not known and re.fullmatch(r"\w+", name):
            draft = self.define(node, "constant" if name.isupper() else "variable", scope)
            if draft and value is not None:
                draft.value = self.line(value)

    def on_declaration_command(self, node: Node, scope: Draft) -> None:
        """Note variables that are declared without a value, and exports."""
        for child in node.named_children:
            if child.type == "variable_name":
                self.assigned.add(self.text(child))

    def on_for_statement(self, node: Node, scope: Draft) -> None:
        """Note the variable of a loop."""
        self.assigned.add(self.text(node.child_by_field_name("variable")))

    def on_variable_name(self, node: Node, scope: Draft) -> None:
        """Note a variable that is read."""
        name = self.text(node)
        if name not in self.assigned and re.fullmatch(r"[A-Z][A-Z0-9_]+", name) and not _OWN.fullmatch(name):
            self.used.setdefault(name, node)

    def on_case_item(self, node: Node, scope: Draft) -> None:
        """Add the options of a case."""
        for value in node.children_by_field_name("value"):
            self.options(self.text(value)[:200], node, self.notes.beside(node.start_point[0]))

    def on_pipeline(self, node: Node, scope: Draft) -> None:
        """Note a download that is run at once."""
        names = [self.text(child.child_by_field_name("name")) for child in node.named_children]
        if names and names[0] in ("curl", "wget") and _SHELLS.intersection(names[1:]):
            self.find("security", "runs a download at once", node)

    def call(self, name: str, node: Node, scope: Draft, loops: int) -> None:
        """Add sourced files, removals and options of getopts."""
        given = self.arguments(node)
        words = [self.text(child) for child in given]
        if name in ("source", ".") and words:
            self.take(words[0].strip("\"'"), node, scope)
        elif name in _ASSIGNING:
            self.assigned.update(word for word in words if re.fullmatch(r"\w+", word))
        if name == "rm" and any(re.match(r"-\w*[rRf]", word) for word in words):
            named = any("$" in word for word in words)
            self.find("security", "removes what a variable names" if named else "removes files", node)
        if name == "getopts" and words:
            for letter in re.findall(r"[A-Za-z0-9]", words[0]):
                self.mention(f"-{letter}", "option", node)
        if name == "exit" and words and words[0] != "0":
            self.fail(f"exit {words[0]}"[:40], node, scope)
        if name == "@test":
            self.tests += 1

    def finish(self) -> None:
        """Add variables that are read and never set: they come from the environment."""
        for name, node in self.used.items():
            if name not in self.assigned or self._before(name, node):
                self.mention(name, "environment", node)

    def _before(self, name: str, node: Node) -> bool:
        return node.type == "variable_assignment" and self.text(node.child_by_field_name("name")) == name
