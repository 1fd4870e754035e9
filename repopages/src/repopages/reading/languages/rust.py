"""Rust."""

import re
from collections.abc import Iterator
from typing import ClassVar

from tree_sitter import Node

from repopages.reading.languages.reader import Draft, Reader, rules

_PANICS = {"panic", "unreachable", "todo", "unimplemented", "bail", "ensure"}
_ATTRIBUTES = {"", "rust", "ignore", "no_run", "should_panic", "compile_fail", "edition2018", "edition2021"}
_LINK = re.compile(r"\[(`[^`\]]+`)\](?:\([\w:!()]+\)|\[[^\]]*\])?")
_OPTION = re.compile(r"\b(long|short)\b(?:\s*=\s*[\"']([\w-]+)[\"'])?")


class Rust(Reader):
    """Rust."""

    grammar = ("tree_sitter_rust", "language")
    definitions: ClassVar = {
        "function_item": "function",
        "function_signature_item": "function",
        "struct_item": "struct",
        "union_item": "union",
        "enum_item": "enum",
        "enum_variant": "member",
        "trait_item": "trait",
        "mod_item": "module",
        "macro_definition": "macro",
        "const_item": "constant",
        "static_item": "variable",
        "type_item": "type",
        "associated_type": "type",
        "field_declaration": "attribute",
    }
    comments = frozenset({"line_comment", "block_comment"})
    attributes = frozenset({"attribute_item", "inner_attribute_item"})
    identifiers = frozenset({"identifier", "type_identifier", "field_identifier"})
    chains = frozenset({"scoped_identifier", "scoped_type_identifier", "field_expression"})
    strings = frozenset({"string_literal", "raw_string_literal"})
    loops = frozenset({"for_expression", "while_expression", "loop_expression"})
    evidence: ClassVar = {
        "unsafe_block": ("security", "unsafe block"),
        "closure_expression": ("pattern", "closure"),
        "await_expression": ("pattern", "awaits a future"),
        "async_block": ("pattern", "async block"),
        "match_expression": ("pattern", "match"),
    }
    effects: ClassVar = {
        **rules("security", "panics if there is no value", ".unwrap .expect .unwrap_err .expect_err"),
        **rules("security", "unchecked operation", ".get_unchecked .get_unchecked_mut .unwrap_unchecked"),
        **rules(
            "security", "reinterprets memory", "mem.transmute transmute from_raw_parts slice.from_raw_parts"
        ),
        **rules("security", "starts a process", "process.Command.new Command.new"),
        **rules(
            "security",
            "opens network connections",
            "net.TcpStream.connect net.TcpListener.bind TcpStream.connect TcpListener.bind UdpSocket.bind",
        ),
        **rules(
            "security",
            "writes or removes files",
            "fs.write fs.File.create File.create fs.remove_file fs.remove_dir_all fs.rename",
        ),
        **rules("security", "sets an environment variable", "env.set_var env.remove_var"),
        **rules("pattern", "starts threads", "thread.spawn tokio.spawn task.spawn"),
        **rules("pattern", "shares by reference counting", "sync.Arc.new Arc.new rc.Rc.new Rc.new"),
        **rules("pattern", "locks", "sync.Mutex.new Mutex.new RwLock.new sync.RwLock.new"),
        **rules("pattern", "ends the process", "process.exit process.abort"),
        **rules("performance", "reserves memory ahead", ".with_capacity .reserve"),
        **rules("performance", "works in parallel", ".par_iter .par_iter_mut .into_par_iter .par_chunks"),
    }
    getters = frozenset({"env.var", "env.var_os", "var", "var_os"})

    def comment(self, text: str) -> str:
        """Return a comment whose code says that it is Rust, without links to items and hidden lines."""
        made, fence = list[str](), ""
        for line in text.splitlines():
            if line.startswith("```"):
                is_rust = not fence and not set(line.strip("` ").split(",")) - _ATTRIBUTES
                fence = "" if fence else "rust" if is_rust else "other"
                line = "```rust" if is_rust else line
            line = line if fence else _LINK.sub(r"\1", line)
            if fence != "rust" or not re.match(r"#(?: |$)", line):
                made.append(line)
        return "\n".join(made)

    def is_public(self, node: Node, name: str, scope: Draft) -> bool:
        """Return whether a name is `pub`; members of enums and traits are as public as those."""
        if node.type == "enum_variant" or scope.kind in ("trait", "member") or scope.access == "trait":
            return scope.public
        if node.type == "macro_definition":
            return any("macro_export" in self.text(attribute) for attribute in self.pending)
        marks = [self.text(child) for child in node.named_children[:2] if child.type == "visibility_modifier"]
        return marks == ["pub"] and (scope.public or scope.kind == "implementation")

    def bases_of(self, node: Node) -> tuple[str, ...]:
        """Return the traits that a trait requires."""
        bounds = node.child_by_field_name("bounds")
        return tuple(self.line(child) for child in bounds.named_children) if bounds else ()

    def body_of(self, node: Node) -> Node | None:
        """Return the body; the types of a tuple are a part of the signature."""
        body = node.child_by_field_name("body")
        return None if body is None or body.type == "ordered_field_declaration_list" else body

    def parameter(self, node: Node) -> list[str]:
        """Return the name of a parameter; self is one."""
        return ["self"] if node.type == "self_parameter" else super().parameter(node)

    def define(
        self, node: Node, kind: str, scope: Draft, outer: Node | None = None, name: str = ""
    ) -> Draft | None:
        """Add a definition with what its attributes say."""
        if node.type == "mod_item" and not node.child_by_field_name("body"):
            self.take(f"self::{self.name_of(node)}", node, scope)
            self.pending.clear()
            return None
        attributes = [self._decorator(attribute) for attribute in self.pending]
        if any(re.match(r"(?:\w+::)*test\b|rstest|test_case", text) for text in attributes):
            self.tests += 1
        draft = super().define(node, kind, scope, outer, name)
        if draft is None:
            return None
        value = node.child_by_field_name("value")
        draft.value = self.line(value) if value and kind in ("constant", "variable", "member") else ""
        draft.bases += tuple(
            trait.strip()
            for text in attributes
            for trait in _derived(text)
            if trait.strip() not in draft.bases
        )
        if any(text.startswith(("arg(", "clap(", "structopt(", "argh(")) for text in attributes):
            self._option(draft, attributes, node)
        if re.search(r"\bunsafe\b", draft.signature.partition("(")[0]) and kind == "function":
            self.find("security", "unsafe function", node)
        return draft

    def _option(self, draft: Draft, attributes: list[str], node: Node) -> None:
        """Add the options that clap makes of a field."""
        for length, given in _OPTION.findall(" ".join(attributes)):
            long = draft.name.replace("_", "-")
            word = f"--{given or long}" if length == "long" else f"-{given or draft.name[0]}"
            self.mention(word, "option", node, draft.doc.partition("\n\n")[0])

    def on_impl_item(self, node: Node, scope: Draft) -> Draft:
        """Add methods to their type, and the trait to its bases."""
        name = re.split(r"[<(\s]", self.text(node.child_by_field_name("type")).lstrip("&"))[0]
        owner = self.own(name.rpartition("::")[2] or "(type)", scope, node)
        trait = node.child_by_field_name("trait")
        owner.access = "trait" if trait else ""
        if trait and self.line(trait) not in owner.bases:
            owner.bases += (self.line(trait),)
        return owner

    def on_use_declaration(self, node: Node, scope: Draft) -> None:
        """Add every name of a use."""
        tree = node.child_by_field_name("argument")
        for path, alias in self._used(tree, "") if tree else ():
            module, _, name = path.rpartition("::")
            self.take(module or name, node, scope, name if module else "", alias)
            if name not in ("*", "self"):
                self.aliases[alias or name] = path.replace("::", ".")
        if any(self.text(child) == "pub" for child in node.named_children[:1]):
            self.exports.update(path.rpartition("::")[2] for path, _ in self._used(tree, "") if tree)

    def _used(self, node: Node | None, prefix: str) -> Iterator[tuple[str, str]]:
        """Yield the full path and the alias of every name in a tree of use."""
        stack: list[tuple[Node | None, str]] = [(node, prefix)]
        while stack:
            child, before = stack.pop()
            if child is None or len(before) > 400:
                continue
            if child.type in ("scoped_use_list", "use_list"):
                path = self.text(child.child_by_field_name("path"))
                inside = child.child_by_field_name("list") if child.type == "scoped_use_list" else child
                here = f"{before}{path}::" if path else before
                stack.extend((part, here) for part in reversed(inside.named_children if inside else []))
            elif child.type == "use_as_clause":
                yield (
                    before + self.text(child.child_by_field_name("path")),
                    self.text(child.child_by_field_name("alias")),
                )
            elif child.type == "use_wildcard":
                yield before + self.text(child), ""
            elif child.type == "self":
                yield before.removesuffix("::"), ""
            elif child.type not in self.comments:
                yield before + self.text(child), ""

    def on_extern_crate_declaration(self, node: Node, scope: Draft) -> None:
        """Add an external crate."""
        self.take(self.name_of(node), node, scope, alias=self.text(node.child_by_field_name("alias")))

    def on_macro_invocation(self, node: Node, scope: Draft) -> None:
        """Add panics and the environment at compile time."""
        name = self.text(node.child_by_field_name("macro")).rpartition("::")[2]
        trees = [child for child in node.named_children if child.type == "token_tree"]
        inside = [child for tree in trees for child in tree.named_children]
        self.names.add(name)
        if name in _PANICS:
            self.fail(f"{name}!", node, scope, self.message([c for c in inside if c.type in self.strings]))
        elif name in ("env", "option_env") and inside:
            self.mention(self.string(inside[0]) or "", "environment", node)
        elif name in ("assert", "assert_eq", "assert_ne", "debug_assert"):
            self.find("pattern", "checks an assumption", node)

    def on_match_arm(self, node: Node, scope: Draft) -> None:
        """Add a handled error: Err(pattern) => ..."""
        pattern = self.text(node.child_by_field_name("pattern"))[:80]
        found = re.match(r"(?:Result::)?Err\(\s*([\w:]+)", pattern)
        if found:
            self.handle(found.group(1) if "::" in found.group(1) else "Err", node, scope)

    def call(self, name: str, node: Node, scope: Draft, loops: int) -> None:
        """Add options of clap's builders and work in loops."""
        last, given = name.rpartition(".")[2], self.arguments(node)
        if last in ("long", "short") and len(given) == 1 and self.text(given[0])[:1] in "\"'":
            self.mention(("--" if last == "long" else "-") + self.text(given[0]).strip("\"'"), "option", node)
        if loops and last in ("clone", "to_string", "to_owned", "to_vec") and "." in name:
            self.find("performance", "copies in a loop", node)
        if loops and name.endswith("Regex.new"):
            self.find("performance", "compiles a regular expression in a loop", node)


def _derived(attribute: str) -> list[str]:
    found = re.fullmatch(r"derive\((.*)\)", attribute)
    return found.group(1).strip(" ,").split(",") if found else []
