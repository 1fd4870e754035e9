"""JavaScript and TypeScript."""

import re
from typing import ClassVar

from tree_sitter import Node

from repopages.reading.languages.reader import Draft, Reader, rules, without_body
from repopages.reading.model import Facts

_FUNCTIONS = ("arrow_function", "function_expression", "generator_function")
_TESTS = re.compile(r"(?:it|test)(?:\.(?:only|skip|each|concurrent|failing|todo))?")


class JavaScript(Reader):
    """JavaScript, as modules of ES or of CommonJS."""

    grammar = ("tree_sitter_javascript", "language")
    definitions: ClassVar = {
        "function_declaration": "function",
        "generator_function_declaration": "function",
        "class_declaration": "class",
        "method_definition": "function",
        "field_definition": "attribute",
    }
    wrappers = frozenset(
        {"export_statement", "ambient_declaration", "lexical_declaration", "variable_declaration"}
    )
    comments = frozenset({"comment", "html_comment", "hash_bang_line"})
    preamble = frozenset({"identifier", "expression_statement", "string", "string_fragment"})
    attributes = frozenset({"decorator"})
    identifiers = frozenset(
        {"identifier", "property_identifier", "shorthand_property_identifier", "type_identifier"}
    )
    chains = frozenset({"member_expression", "nested_identifier", "nested_type_identifier"})
    strings = frozenset({"string", "template_string"})
    loops = frozenset({"for_statement", "for_in_statement", "while_statement", "do_statement"})
    calls: ClassVar = {"call_expression": "function", "new_expression": "constructor"}
    evidence: ClassVar = {
        "await_expression": ("pattern", "awaits a promise"),
        "yield_expression": ("pattern", "generator"),
        "with_statement": ("security", "changes the scope of names"),
        "debugger_statement": ("pattern", "stops in a debugger"),
    }
    effects: ClassVar = {
        **rules(
            "security",
            "runs text as code",
            "eval Function vm.runInContext vm.runInThisContext",
        ),
        **rules(
            "security", "writes HTML into the page", "document.write document.writeln .insertAdjacentHTML"
        ),
        **rules(
            "security",
            "starts a process",
            "child_process.exec child_process.execSync child_process.execFile child_process.execFileSync"
            " child_process.spawn child_process.spawnSync child_process.fork execa",
        ),
        **rules(
            "security",
            "opens network connections",
            "fetch XMLHttpRequest WebSocket http.request https.request http.get https.get http.createServer"
            " https.createServer net.connect net.createServer axios axios.get axios.post",
        ),
        **rules(
            "security",
            "writes or removes files",
            "fs.writeFile fs.writeFileSync fs.unlink fs.unlinkSync fs.rm fs.rmSync fs.appendFile"
            " fs.createWriteStream fs.rename fs.renameSync fs/promises.writeFile fs/promises.rm",
        ),
        **rules("security", "uses a weak random generator", "Math.random"),
        **rules("security", "stores data in the browser", "localStorage.setItem sessionStorage.setItem"),
        **rules(
            "performance",
            "blocks while it reads files",
            "fs.readFileSync fs.readdirSync fs.statSync fs.existsSync",
        ),
        **rules("performance", "copies through JSON", "structuredClone"),
        **rules("pattern", "waits for several promises", "Promise.all Promise.allSettled Promise.race"),
        **rules("pattern", "makes a promise", "Promise"),
        **rules("pattern", "uses a timer", "setTimeout setInterval setImmediate requestAnimationFrame"),
        **rules("pattern", "listens to events", ".addEventListener .on .once"),
        **rules("pattern", "ends the process", "process.exit"),
    }

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self.required: set[str] = set()

    def take(self, module: str, node: Node, scope: Draft, name: str = "", alias: str = "") -> None:
        """Add an import."""
        self.required.add(module)
        super().take(module, node, scope, name, alias)

    def name_of(self, node: Node) -> str:
        """Return the name; fields of JavaScript call it property."""
        named = node.child_by_field_name("name") or node.child_by_field_name("property")
        return self.text(named).strip("\"'`")

    def is_public(self, node: Node, name: str, scope: Draft) -> bool:
        """Return whether neither a sign nor a word makes a name private; exports are known at the end."""
        words = [
            self.text(child) for child in node.named_children[:2] if child.type == "accessibility_modifier"
        ]
        return not name.startswith(("_", "#")) and not {"private", "protected"}.intersection(words)

    def parameter(self, node: Node) -> list[str]:
        """Return the names in a parameter, those of a destructuring too."""
        if node.type in ("required_parameter", "optional_parameter"):
            inside = node.child_by_field_name("pattern")
            return self._bound(inside) if inside else []
        return self._bound(node)

    def parameters_of(self, node: Node) -> tuple[str, ...]:
        """Return the names of the parameters; an arrow function may have one without parentheses."""
        value = node.child_by_field_name("value")
        function = value if value is not None and value.type in _FUNCTIONS else node
        single = function.child_by_field_name("parameter")
        return tuple(self.parameter(single)) if single else super().parameters_of(function)

    def _bound(self, node: Node) -> list[str]:
        """Return the names that a pattern binds."""
        found: list[str] = []
        stack = [node]
        while stack:
            child = stack.pop()
            if child.type in ("identifier", "shorthand_property_identifier_pattern", "this"):
                found.append(self.text(child))
            elif child.type in ("assignment_pattern", "object_assignment_pattern"):
                stack.extend(child.children_by_field_name("left"))
            elif child.type == "pair_pattern":
                stack.extend(child.children_by_field_name("value"))
            elif child.type in ("object_pattern", "array_pattern", "rest_pattern"):
                stack.extend(reversed(child.named_children))
        return found

    def bases_of(self, node: Node) -> tuple[str, ...]:
        """Return the class that it extends and the interfaces that it implements."""
        found: list[str] = []
        for child in node.named_children:
            if child.type in ("class_heritage", "extends_type_clause"):
                inside = [part for part in child.named_children if not part.type.endswith("_clause")]
                clauses = [part for part in child.named_children if part.type.endswith("_clause")]
                inside += [part for clause in clauses for part in clause.named_children]
                found += [self.line(part) for part in inside if part.type != "type_arguments"]
        return tuple(found)

    def body_of(self, node: Node) -> Node | None:
        """Return the body of a definition or of the function that a variable holds."""
        value = node.child_by_field_name("value")
        if value is not None and value.type in (*_FUNCTIONS, "class"):
            return value.child_by_field_name("body")
        return node.child_by_field_name("body")

    def define(
        self, node: Node, kind: str, scope: Draft, outer: Node | None = None, name: str = ""
    ) -> Draft | None:
        """Add a definition; a field that holds a function is a method."""
        value = node.child_by_field_name("value")
        if kind == "attribute" and value is not None and value.type in _FUNCTIONS:
            kind = "function"
        if outer is not None and outer.named_child_count > 1 and not outer.type.startswith("export"):
            outer = None  # One of several variables in a declaration.
        if outer is not None and outer.type == "export_statement" and scope is self.file:
            self.exports.add(name or self.name_of(node))
        draft = super().define(node, kind, scope, outer, name)
        if draft and value is not None and draft.kind in ("attribute", "constant", "variable", "member"):
            draft.value = self.line(value)
        return draft

    def _look(self, node: Node, kind: str, scope: Draft, outer: Node | None) -> Draft:
        """Take variables with their wrapper, which says whether they are constant and exported."""
        inner = super()._look(node, kind, scope, outer)
        return self._variable(node, scope, outer) or inner if kind == "variable_declarator" else inner

    def _variable(self, node: Node, scope: Draft, outer: Node | None) -> Draft | None:
        name, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        if name is None:
            return None
        module = self._required(value)
        if module is not None:
            self._take_required(module, name, node, scope)
            return None
        if name.type != "identifier":
            if outer is not None and outer.type == "export_statement":
                self.exports.update(self._bound(name))
            return None
        if value is not None and value.type in _FUNCTIONS:
            return self.define(node, "function", scope, outer)
        if value is not None and value.type == "class":
            return self.define(node, "class", scope, outer)
        whole = self._shown(outer.start_byte, outer.start_byte + 20, 20) if outer else ""
        kind = "constant" if re.match(r"(?:export |declare )*const\b", whole) else "variable"
        draft = self.define(node, kind, scope, outer)
        if draft and value is not None and value.type == "object":
            draft.kind = "object"
        return draft

    def _required(self, value: Node | None) -> str | None:
        """Return the module of `require("...")`, also of an attribute of it, or None."""
        while value is not None and value.type in ("member_expression", "await_expression"):
            value = value.child_by_field_name("object") or next(iter(value.named_children), None)
        if value is None or value.type != "call_expression":
            return None
        function = self.text(value.child_by_field_name("function"))
        given = self.arguments(value)
        return self.string(given[0]) if function in ("require", "import") and given else None

    def _take_required(self, module: str, name: Node, node: Node, scope: Draft) -> None:
        plain = module.removeprefix("node:")
        if name.type == "identifier":
            self.take(module, node, scope, alias=self.text(name))
            self.aliases[self.text(name)] = plain
            return
        for part in name.named_children:
            key = self.text(part.child_by_field_name("key")) or self.text(part)
            local = next(iter(self._bound(part)), key)
            self.take(module, node, scope, key, local if local != key else "")
            self.aliases[local] = f"{plain}.{key}"

    def on_import_statement(self, node: Node, scope: Draft) -> None:
        """Add every name of an import."""
        module = self.string(node.child_by_field_name("source")) or ""
        plain = module.removeprefix("node:")
        clauses = [child for child in node.named_children if child.type == "import_clause"]
        if not clauses and module:
            self.take(module, node, scope)
        for part in (part for clause in clauses for part in clause.named_children):
            if part.type == "identifier":
                self.take(module, node, scope, "default", self.text(part))
                self.aliases[self.text(part)] = plain
            elif part.type == "namespace_import" and part.named_children:
                self.take(module, node, scope, alias=self.text(part.named_children[-1]))
                self.aliases[self.text(part.named_children[-1])] = plain
            elif part.type == "named_imports":
                for specifier in part.named_children:
                    name = self.text(specifier.child_by_field_name("name"))
                    alias = self.text(specifier.child_by_field_name("alias"))
                    self.take(module, specifier, scope, name, alias)
                    self.aliases[alias or name] = f"{plain}.{name}"

    def on_export_statement(self, node: Node, scope: Draft) -> None:
        """Add exported names and what is exported from another module."""
        source = self.string(node.child_by_field_name("source"))
        clauses = [child for child in node.named_children if child.type == "export_clause"]
        names = [specifier for clause in clauses for specifier in clause.named_children]
        for specifier in names:
            name = self.text(specifier.child_by_field_name("name"))
            alias = self.text(specifier.child_by_field_name("alias"))
            self.exports.add(alias or name)
            if source:
                self.take(source, specifier, scope, name, alias)
        if source and not names:
            self.take(source, node, scope, "*")
        value = node.child_by_field_name("value")
        if value is not None:
            self.exports.add(self.text(value) if value.type == "identifier" else "default")
            if value.type in (*_FUNCTIONS, "class"):
                self.define(value, "class" if value.type == "class" else "function", scope, node, "default")

    def on_assignment_expression(self, node: Node, scope: Draft) -> Draft | None:
        """Add exports of CommonJS and methods of prototypes."""
        left, right = node.child_by_field_name("left"), node.child_by_field_name("right")
        target = self.dotted(left)
        if target.endswith((".innerHTML", ".outerHTML")):
            self.find("security", "writes HTML into the page", node)
        if right is None or not target:
            return None
        exported = re.fullmatch(r"(?:module\.)?exports\.(\w+)", target)
        if exported:
            self.exports.add(exported.group(1))
            if right.type in _FUNCTIONS:
                return self._assigned(node, right, scope, exported.group(1))
        elif target == "module.exports":
            return self._exported(node, right, scope)
        method = re.fullmatch(r"(\w+)\.(?:prototype\.)?(\w+)", target)
        if method and not exported and right.type in _FUNCTIONS and scope is self.file:
            return self._assigned(node, right, self.own(method.group(1), scope, node), method.group(2))
        return None

    def _assigned(self, node: Node, right: Node, scope: Draft, name: str) -> Draft | None:
        draft = self.define(node, "function", scope, None, name)
        if draft:
            draft.parameters = self.parameters_of(right)
            body = right.child_by_field_name("body")
            end = body.start_byte if body else node.end_byte
            draft.signature = without_body(self._shown(node.start_byte, end, 400))
        return draft

    def _exported(self, node: Node, right: Node, scope: Draft) -> Draft | None:
        """Add `module.exports = ...`: its names, or the function or class itself."""
        if right.type == "object":
            for child in right.named_children:
                key = child.child_by_field_name("key") or child.child_by_field_name("name") or child
                if child.type != "spread_element":
                    self.exports.add(self.text(key).strip("\"'"))
        elif right.type in ("identifier", "member_expression"):
            self.exports.add(self.text(right)[:80])
        else:
            module = self._required(right)
            if module is not None:
                self.take(module, node, scope, "*")
            name = self.name_of(right) if right.type in (*_FUNCTIONS, "class") else ""
            self.exports.add(name or "module.exports")
            if right.type in _FUNCTIONS:
                return self._assigned(node, right, scope, name or "module.exports")
        return None

    def on_member_expression(self, node: Node, scope: Draft) -> None:
        """Add process.env.NAME."""
        name = self.dotted(node)
        found = re.fullmatch(r"(?:globalThis\.)?(?:process|import\.meta|Bun|Deno)\.env\.(\w+)", name)
        if found and found.group(1) not in ("get", "set", "has", "toObject"):
            self.mention(found.group(1), "environment", node)

    def on_subscript_expression(self, node: Node, scope: Draft) -> None:
        """Add process.env["NAME"]."""
        if self.dotted(node.child_by_field_name("object")) == "process.env":
            self.mention(self.string(node.child_by_field_name("index")) or "", "environment", node)

    def on_jsx_attribute(self, node: Node, scope: Draft) -> None:
        """Note HTML that React does not escape."""
        if self.text(node).startswith("dangerouslySetInnerHTML"):
            self.find("security", "writes HTML into the page", node)

    def on_throw_statement(self, node: Node, scope: Draft) -> None:
        """Add a throw."""
        value = node.named_children[0] if node.named_children else None
        if value is not None and value.type in ("new_expression", "call_expression"):
            called = value.child_by_field_name("constructor") or value.child_by_field_name("function")
            self.fail(self.text(called)[:80], node, scope, self.message(self.arguments(value)))
        elif value is not None:
            self.fail(self.line(value)[:80], node, scope)

    def on_catch_clause(self, node: Node, scope: Draft) -> None:
        """Add a handler, and the classes that it tells apart."""
        found = re.findall(r"\binstanceof\s+([\w.]+)", self.text(node, 4000))
        for name in dict.fromkeys(found) or ["any error"]:
            self.handle(name, node, scope)

    def call(self, name: str, node: Node, scope: Draft, loops: int) -> None:
        """Add imports inside expressions, tests, options and waiting in loops."""
        given = self.arguments(node)
        if name in ("require", "import") and given:
            module = self.string(given[0])
            if module and module not in self.required:
                self.take(module, node, scope)
            elif module is None:
                self.find("security", "imports a module named at run time", node)
        self.tests += bool(_TESTS.fullmatch(name) and len(given) > 1)
        if name == "RegExp" and loops:
            self.find("performance", "compiles a regular expression in a loop", node)

    def finish(self) -> None:
        """Make public at the top of the file only what is exported, if anything is."""
        if self.exports:
            for draft in self.file.members:
                draft.public = draft.name in self.exports or draft.kind == "implementation"


class TypeScript(JavaScript):
    """TypeScript."""

    grammar = ("tree_sitter_typescript", "language_typescript")
    definitions = JavaScript.definitions | {
        "abstract_class_declaration": "class",
        "interface_declaration": "interface",
        "enum_declaration": "enum",
        "type_alias_declaration": "type",
        "internal_module": "namespace",
        "module": "namespace",
        "function_signature": "function",
        "method_signature": "function",
        "abstract_method_signature": "function",
        "property_signature": "attribute",
        "public_field_definition": "attribute",
    }
    evidence = JavaScript.evidence | {
        "non_null_expression": ("security", "claims that a value is not null"),
        "as_expression": ("pattern", "states a type that is not checked"),
    }

    def on_enum_body(self, node: Node, scope: Draft) -> None:
        """Add members; those without a value are bare names."""
        for child in node.named_children:
            if child.type not in self.comments:
                name = child.child_by_field_name("name") or child
                self.define(child, "member", scope, None, self.text(name).strip("\"'"))

    def on_ambient_declaration(self, node: Node, scope: Draft) -> None:
        """Note that a file declares types for code elsewhere."""
        self.find("pattern", "declares types of code elsewhere", node)

    def on_predefined_type(self, node: Node, scope: Draft) -> None:
        """Note where types are not checked."""
        if self.text(node) == "any":
            self.find("pattern", "type any, which is not checked", node)

    def on_import_require_clause(self, node: Node, scope: Draft) -> None:
        """Add `import name = require("...")`."""
        module = self.string(node.child_by_field_name("source"))
        if module:
            self.take(module, node, scope, alias=self.text(next(iter(node.named_children), None)))


class Tsx(TypeScript):
    """TypeScript with elements of JSX."""

    grammar = ("tree_sitter_typescript", "language_tsx")
