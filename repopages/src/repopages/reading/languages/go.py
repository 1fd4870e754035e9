"""Go."""

import re
from typing import ClassVar

from tree_sitter import Node

from repopages.reading.languages.reader import Draft, Reader, rules

_FLAGS = re.compile(
    r"(?:Bool|Int|Int64|Uint|Uint64|Float64|String|Duration|Text|Func|StringSlice|\w*Array)(Var)?P?"
)


class Go(Reader):
    """Go."""

    grammar = ("tree_sitter_go", "language")
    definitions: ClassVar = {
        "function_declaration": "function",
        "type_spec": "type",
        "type_alias": "type",
        "method_elem": "function",
    }
    wrappers = frozenset({"type_declaration", "const_declaration", "var_declaration"})
    preamble = frozenset({"package_clause", "package_identifier"})
    identifiers = frozenset({"identifier", "type_identifier", "field_identifier"})
    chains = frozenset({"selector_expression", "qualified_type"})
    strings = frozenset({"interpreted_string_literal", "raw_string_literal"})
    loops = frozenset({"for_statement"})
    evidence: ClassVar = {
        "go_statement": ("pattern", "starts a goroutine"),
        "defer_statement": ("pattern", "defers a call"),
        "select_statement": ("pattern", "waits for channels"),
        "send_statement": ("pattern", "sends on a channel"),
        "channel_type": ("pattern", "channel"),
        "func_literal": ("pattern", "closure"),
    }
    effects: ClassVar = {
        **rules(
            "security",
            "starts a process",
            "os/exec.Command os/exec.CommandContext os.StartProcess syscall.Exec",
        ),
        **rules(
            "security",
            "opens network connections",
            "net.Dial net.Listen net/http.Get net/http.Post net/http.ListenAndServe net.DialTimeout",
        ),
        **rules(
            "security",
            "writes or removes files",
            "os.Create os.WriteFile os.Remove os.RemoveAll os.Rename os.OpenFile io/ioutil.WriteFile",
        ),
        **rules("security", "sets an environment variable", "os.Setenv os.Unsetenv"),
        **rules("security", "uses unsafe memory", "unsafe.Pointer"),
        **rules("security", "inserts text into HTML unescaped", "html/template.HTML html/template.JS"),
        **rules("security", "uses a weak random generator", "math/rand.Int math/rand.Intn math/rand.Seed"),
        **rules(
            "security", "uses a broken hash", "crypto/md5.New crypto/md5.Sum crypto/sha1.New crypto/sha1.Sum"
        ),
        **rules("pattern", "ends the process", "os.Exit log.Fatal log.Fatalf log.Fatalln"),
        **rules("pattern", "recovers from a panic", "recover"),
        **rules("pattern", "locks", ".Lock .RLock"),
        **rules("pattern", "waits for goroutines", ".Wait"),
    }
    getters = frozenset({"os.Getenv", "os.LookupEnv", "os.ExpandEnv"})

    def is_public(self, node: Node, name: str, scope: Draft) -> bool:
        """Return whether a name starts with a capital, which exports it."""
        return name[:1].isupper()

    def parameter(self, node: Node) -> list[str]:
        """Return the names of a group of parameters."""
        return [self.text(child) for child in node.children_by_field_name("name")]

    def body_of(self, node: Node) -> Node | None:
        """Return the body of a function or the fields of a type."""
        inside = node.child_by_field_name("type")
        if inside is not None and inside.type in ("struct_type", "interface_type"):
            fields = [child for child in inside.children if child.type in ("{", "field_declaration_list")]
            return fields[0] if fields else None
        return node.child_by_field_name("body")

    def define(
        self, node: Node, kind: str, scope: Draft, outer: Node | None = None, name: str = ""
    ) -> Draft | None:
        """Add a definition; a type is a struct, an interface or another name."""
        inside = node.child_by_field_name("type")
        if node.type == "type_spec" and inside is not None:
            kind = {"struct_type": "struct", "interface_type": "interface"}.get(inside.type, kind)
        if outer is not None and outer.named_child_count > 1:
            outer = None  # One of several in parentheses: its own lines, not those of all.
        draft = super().define(node, kind, scope, outer, name)
        if draft and node.type == "function_declaration" and self.facts.path.endswith("_test.go"):
            self.tests += bool(re.match(r"(?:Test|Fuzz|Example)(?![a-z])", draft.name))
        return draft

    def on_method_declaration(self, node: Node, scope: Draft) -> Draft | None:
        """Add a method to the type of its receiver."""
        found = re.search(
            r"(\w+)\s*(?:\[[^\]]*\])?\s*\)$", self.text(node.child_by_field_name("receiver"))[:400]
        )
        owner = self.own(found.group(1), scope, node) if found else scope
        return super().define(node, "function", owner)

    def on_field_declaration(self, node: Node, scope: Draft) -> None:
        """Add the fields of a struct; an embedded type is a base."""
        names = node.children_by_field_name("name")
        for name in names:
            self.define(node, "attribute", scope, None, self.text(name))
        if not names and scope.kind == "struct":
            scope.bases += (self.line(node),)

    def on_type_elem(self, node: Node, scope: Draft) -> None:
        """Add an embedded interface."""
        if scope.kind == "interface":
            scope.bases += (self.line(node),)

    def _on_values(self, node: Node, scope: Draft, kind: str) -> None:
        values = node.child_by_field_name("value")
        texts = [self.line(child) for child in values.named_children] if values else []
        for number, name in enumerate(node.children_by_field_name("name")):
            draft = self.define(node, kind, scope, None, self.text(name))
            if draft and number < len(texts):
                draft.value = texts[number]

    def on_const_spec(self, node: Node, scope: Draft) -> None:
        """Add constants."""
        self._on_values(node, scope, "constant")

    def on_var_spec(self, node: Node, scope: Draft) -> None:
        """Add variables."""
        self._on_values(node, scope, "variable")

    def on_import_spec(self, node: Node, scope: Draft) -> None:
        """Add an import. The local name of a package is the last part of its path, without a version."""
        module = self.string(node.child_by_field_name("path")) or ""
        alias = self.text(node.child_by_field_name("name"))
        self.take(module, node, scope, "*" if alias == "." else "", alias.strip("."))
        last = re.sub(r"/v\d+$", "", module).rpartition("/")[2]
        self.aliases[alias or last] = module

    def call(self, name: str, node: Node, scope: Draft, loops: int) -> None:
        """Add panics, new errors, flags and work in loops."""
        first, _, last = name.rpartition(".")
        given = self.arguments(node)
        if name in ("panic", "errors.New", "fmt.Errorf", "log.Fatal", "log.Fatalf", "log.Panic"):
            self.fail(name, node, scope, self.message(given))
        if name in ("errors.Is", "errors.As") and len(given) > 1:
            self.handle(self.line(given[1]), node, scope)
        found = _FLAGS.fullmatch(last)
        if found and given and first.rpartition("/")[2] in ("flag", "pflag", ".Flags()", "fs", "flags"):
            texts = [self.string(child) for child in given]
            named = texts[1] if found.group(1) and len(texts) > 1 else texts[0]
            self.mention(f"--{named}" if named else "", "option", node, texts[-1] or "")
        if loops and name in ("regexp.MustCompile", "regexp.Compile"):
            self.find("performance", "compiles a regular expression in a loop", node)
        if name == "make" and len(given) > 2:
            self.find("performance", "reserves memory ahead", node)
