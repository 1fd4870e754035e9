"""C, C++ and CUDA."""

import re
from typing import ClassVar

from tree_sitter import Node

from repopages.reading.languages.reader import FUNCTIONS, Draft, Reader, descendants, rules

_DECLARATORS = frozenset(
    {
        "pointer_declarator",
        "reference_declarator",
        "array_declarator",
        "init_declarator",
        "parenthesized_declarator",
        "function_declarator",
        "attributed_declarator",
        "variadic_declarator",
        "optional_parameter_declaration",
    }
)
_NAMES = frozenset(
    {
        "identifier",
        "field_identifier",
        "type_identifier",
        "qualified_identifier",
        "operator_name",
        "destructor_name",
        "operator_cast",
        "template_function",
        "primitive_type",
    }
)
_MACROS = re.compile(
    rb"""
    # For compilers of C++ only: extern "C" around a header of C. The brace ends in another directive.
    ^[ \t]*\#[ \t]*if[^\n]*__cplusplus[^\n]*\n [ \t]*(?:extern[ ]"C"[ \t]*\{|\})[^\n]*\n
      [ \t]*\#[ \t]*endif[^\n]*
    # Other directives stay as they are.
    | (?P<directive> ^[ \t]*\#(?:[^\n\\]|\\.)* )
    # Visibility of a class or a function.
    | (?: (?<=\bclass[ ]) | (?<=\bstruct[ ]) ) \s* [A-Z][A-Z0-9_]{2,} (?:\([^()\n]*\))? (?=\s+[A-Za-z_])
    | \b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)*_
      (?: API|EXPORTS?|PUBLIC|LOCAL|HIDDEN|VISIBILITY|DECL|DEPRECATED|NODISCARD|NORETURN|UNUSED|CONSTEXPR
        | NOEXCEPT|(?:FORCE|NO|ALWAYS_)?INLINE|HOST_DEVICE|DEVICE|HOST ) \b (?=\s+[A-Za-z_~])
    # A call on a line without a semicolon, which is not the head of a function.
    | ^[ \t]*[A-Z][A-Z0-9_]{4,}\([^;{}\n]*\)[ \t]*$ (?!\s*\{)
    # Statements, fields and parts of a text.
    | \bPy_(?:BEGIN|END)_ALLOW_THREADS\b | \bPyObject_(?:VAR_)?HEAD\b (?!_) | \bPRI[a-zA-Z]+[0-9]+\b
    # The result of a function in the C API of Python.
    | \bPy(?:API|MODEXPORT)_(?:FUNC|DATA)\((?P<result>[^()\n]*)\)
    """,
    re.MULTILINE | re.VERBOSE | re.DOTALL,
)
"""What only the preprocessor understands, and what makes the code around it unreadable for the grammar."""

_GUARD = re.compile(r".*_H(?:PP|XX|_)?_*")
_TESTS = re.compile(
    r"TEST(?:_F|_P|_CASE)?|TYPED_TEST(?:_P)?|BOOST_(?:AUTO|FIXTURE)_TEST_CASE|SCENARIO|BENCHMARK_F"
)


class C(Reader):
    """C."""

    grammar = ("tree_sitter_c", "language")
    definitions: ClassVar = {
        "function_definition": "function",
        "struct_specifier": "struct",
        "union_specifier": "union",
        "enum_specifier": "enum",
        "enumerator": "member",
        "preproc_function_def": "macro",
        "preproc_def": "macro",
    }
    preamble = frozenset({"identifier", "preproc_ifdef", "preproc_call", "preproc_directive", "preproc_arg"})
    identifiers = frozenset({"identifier", "type_identifier", "field_identifier", "namespace_identifier"})
    chains = frozenset({"field_expression", "qualified_identifier"})
    strings = frozenset({"string_literal", "concatenated_string", "raw_string_literal"})
    loops = frozenset({"for_statement", "while_statement", "do_statement", "for_range_loop"})
    evidence: ClassVar = {
        "goto_statement": ("pattern", "jumps with goto"),
        "gnu_asm_expression": ("pattern", "inline assembly"),
        "static_assert_declaration": ("pattern", "checks at compile time"),
    }
    effects: ClassVar = {
        **rules(
            "security",
            "writes text without a bound",
            "strcpy strcat sprintf vsprintf gets stpcpy",
        ),
        **rules("security", "reads text without a bound", "scanf sscanf fscanf"),
        **rules("security", "runs a command of the shell", "system popen _popen wordexp"),
        **rules(
            "security",
            "starts a process",
            "fork vfork execl execlp execle execv execvp execvpe execve posix_spawn CreateProcess",
        ),
        **rules("security", "loads code at run time", "dlopen dlsym LoadLibrary LoadLibraryA GetProcAddress"),
        **rules("security", "opens network connections", "socket connect bind listen accept getaddrinfo"),
        **rules("security", "uses predictable temporary files", "tmpnam mktemp tempnam"),
        **rules("security", "uses a weak random generator", "rand srand"),
        **rules("security", "writes or opens files", "fopen open creat unlink remove rename"),
        **rules(
            "pattern", "allocates memory by hand", "malloc calloc realloc strdup aligned_alloc posix_memalign"
        ),
        **rules("pattern", "frees memory by hand", "free"),
        **rules("pattern", "copies raw memory", "memcpy memmove memset"),
        **rules("pattern", "starts threads", "pthread_create CreateThread thrd_create"),
        **rules("pattern", "locks", "pthread_mutex_lock mtx_lock"),
        **rules("pattern", "ends the process", "exit abort _exit quick_exit terminate"),
        **rules("pattern", "checks an assumption", "assert"),
        **rules("pattern", "jumps out of functions", "longjmp setjmp"),
    }
    getters = frozenset({"getenv", "secure_getenv", "_dupenv_s", "c10.utils.get_env"})

    def prepared(self) -> bytes:
        """Blank macros that make the code around them unreadable for the grammar."""
        self.names.update(name.decode() for name in re.findall(rb"\b[A-Z][A-Z0-9_]{4,}\b", self.source))
        return _MACROS.sub(_blank, self.source)

    def name_of(self, node: Node) -> str:
        """Return the name in the innermost declarator; only types with a body are definitions."""
        if node.type in ("struct_specifier", "union_specifier", "enum_specifier", "class_specifier"):
            body = node.child_by_field_name("body")
            return _plain(self.text(node.child_by_field_name("name"))) if body else ""
        named = node.child_by_field_name("name") or self._innermost(node)
        return " ".join(self.text(named).split())

    def _innermost(self, node: Node) -> Node | None:
        found: Node | None = node
        while found is not None and found.type not in _NAMES:
            inside = found.child_by_field_name("declarator")
            if inside is None:
                # References have no field for what they refer to.
                children = found.named_children if found.type in _DECLARATORS else []
                inside = next((child for child in children if child.type in _DECLARATORS | _NAMES), None)
            found = inside
        return found

    def parameters_of(self, node: Node) -> tuple[str, ...]:
        """Return the parameters in the declarator of a function or macro."""
        own = node.child_by_field_name("parameters")
        while own is None and node is not None:
            inside = node.child_by_field_name("declarator") or next(
                (child for child in node.named_children if child.type in _DECLARATORS), None
            )
            if inside is None:
                return ()
            node, own = inside, inside.child_by_field_name("parameters")
        return tuple(name for child in own.named_children for name in self.parameter(child)) if own else ()

    def parameter(self, node: Node) -> list[str]:
        """Return the name of one parameter."""
        if node.type == "identifier":
            return [self.text(node)]
        inside = node.child_by_field_name("declarator")
        named = self._innermost(inside) if inside is not None else None
        return [self.text(named)] if named else []

    def body_of(self, node: Node) -> Node | None:
        """Return the body, or the initialisers before it."""
        first = [child for child in node.named_children if child.type == "field_initializer_list"]
        return first[0] if first else node.child_by_field_name("body")

    def is_public(self, node: Node, name: str, scope: Draft) -> bool:
        """Return whether a name is seen outside: not static, not private, not in an unnamed namespace."""
        if not scope.public or name.startswith("_") or name in ("detail", "internal", "impl"):
            return False
        if scope.kind in ("class", "struct", "union"):
            return (scope.access or ("private" if scope.kind == "class" else "public")) == "public"
        head = node.named_children[:3]
        return not any(
            child.type == "storage_class_specifier" and self.text(child) == "static" for child in head
        )

    def define(
        self, node: Node, kind: str, scope: Draft, outer: Node | None = None, name: str = ""
    ) -> Draft | None:
        """Add a definition, a method to its class, and tests by the names of their macros."""
        name = name or self.name_of(node)
        if kind == "macro" and _GUARD.fullmatch(name) and not node.child_by_field_name("value"):
            return None
        if kind == "function" and _TESTS.fullmatch(name):
            self.tests += 1
            inside = next(descendants(node, frozenset({"parameter_list"})), None)
            name = re.sub(r"\W+", "_", self.text(inside)).strip("_") or name
        if "::" in name:
            scope, name = self._owner(name, scope, node)
        draft = super().define(node, kind, scope, outer, name)
        if draft and kind in ("macro", "member"):
            draft.value = self._shown_value(node)
        return draft

    def _owner(self, name: str, scope: Draft, node: Node) -> tuple[Draft, str]:
        """Return the class of a method that is defined outside it, and the name of the method."""
        while len(name) != len(name := re.sub(r"(?<!operator)<[^<>]*>", "", name)):
            pass
        *path, name = [part.strip() for part in name.split("::")]
        if not path or not path[-1] or not name:
            return scope, name or path[-1]
        owner = self.own(path[-1], scope, node)
        declared = [member.public for member in owner.members if member.name == name]
        owner.access = "public" if not declared or any(declared) else "private"
        return owner, name

    def _shown_value(self, node: Node) -> str:
        value = node.child_by_field_name("value")
        return self.line(value) if value else ""

    def on_declaration(self, node: Node, scope: Draft) -> None:
        """Add prototypes, constants and variables of a file, namespace or class."""
        if scope.kind in FUNCTIONS:
            return
        fixed = [self.text(child) for child in node.named_children if child.type == "type_qualifier"]
        constant = {"const", "constexpr", "__constant__"} & set(fixed)
        for declarator in node.children_by_field_name("declarator"):
            name = " ".join(self.text(self._innermost(declarator)).split())
            kind = "constant" if constant else "variable"
            kind = "function" if self._is_function(declarator) else kind
            draft = self.define(node, kind, scope, None, name) if name else None
            if draft and kind != "function":
                draft.parameters = ()
                draft.value = self._shown_value(declarator) or self._shown_default(node)

    on_field_declaration = on_declaration

    def _shown_default(self, node: Node) -> str:
        value = node.child_by_field_name("default_value")
        return self.line(value) if value else ""

    def _is_function(self, declarator: Node) -> bool:
        node: Node | None = declarator
        while node is not None and node.type in (
            "pointer_declarator",
            "reference_declarator",
            "init_declarator",
        ):
            inside = [child for child in node.named_children if child.type in _DECLARATORS]
            node = node.child_by_field_name("declarator") or (inside[0] if inside else None)
        if node is None or node.type != "function_declarator":
            return False
        # A pointer to a function, int (*f)(int), is a variable.
        inner = node.child_by_field_name("declarator")
        return inner is None or inner.type != "parenthesized_declarator"

    def on_type_definition(self, node: Node, scope: Draft) -> Draft | None:
        """Add a typedef; a struct without a name gets that of its typedef."""
        declarator = node.child_by_field_name("declarator")
        name = self.text(self._innermost(declarator)) if declarator else ""
        inside = node.child_by_field_name("type")
        if not name or inside is None:
            return None
        if inside.child_by_field_name("body"):
            kind = self.definitions.get(inside.type, "type")
            own = self.text(inside.child_by_field_name("name"))
            draft = None if own else self.define(inside, kind, scope, node, name)
            if draft:
                draft.signature += f" {name}"
            return draft
        draft = self.define(node, "type", scope, None, name)
        if draft:
            draft.parameters = ()
        return None

    def on_preproc_include(self, node: Node, scope: Draft) -> None:
        """Add an include."""
        self.take(self.text(node.child_by_field_name("path")).strip('"'), node, scope)

    def on_initializer_list(self, node: Node, scope: Draft) -> None:
        """Add an option of getopt_long: {"help", no_argument, NULL, 'h'}."""
        inside = node.named_children
        if len(inside) in (3, 4) and re.fullmatch(r"(no|required|optional)_argument", self.text(inside[1])):
            self.mention(f"--{self.string(inside[0])}", "option", node)

    def call(self, name: str, node: Node, scope: Draft, loops: int) -> None:
        """Add options of getopt and gflags, tests, and allocation in loops."""
        short, given = name.rpartition(".")[2], self.arguments(node)
        if short in ("getopt", "getopt_long") and len(given) > 2:
            for letter in re.findall(r"[A-Za-z0-9]", self.string(given[2]) or ""):
                self.mention(f"-{letter}", "option", node)
        if (
            re.fullmatch(r"(?:DEFINE|ABSL_FLAG)_?\w*", short)
            and short.startswith("DEFINE_")
            and len(given) > 2
        ):
            self.mention(f"--{self.text(given[0])}", "option", node, self.string(given[-1]) or "")
        if _TESTS.fullmatch(short):
            self.tests += 1
        if loops and short in ("malloc", "calloc", "realloc"):
            self.find("performance", "allocates memory in a loop", node)


class Cpp(C):
    """C++."""

    grammar = ("tree_sitter_cpp", "language")
    definitions = C.definitions | {
        "class_specifier": "class",
        "namespace_definition": "namespace",
        "alias_declaration": "type",
        "concept_definition": "concept",
    }
    wrappers = frozenset({"template_declaration"})
    evidence = C.evidence | {
        "template_declaration": ("pattern", "template"),
        "lambda_expression": ("pattern", "lambda"),
        "co_await_expression": ("pattern", "coroutine"),
        "co_yield_statement": ("pattern", "coroutine"),
        "new_expression": ("pattern", "allocates with new"),
        "delete_expression": ("pattern", "frees with delete"),
    }
    effects = C.effects | {
        **rules(
            "pattern",
            "owns memory by smart pointers",
            "make_unique make_shared make_intrusive c10.make_intrusive",
        ),
        **rules("pattern", "locks", ".lock .unlock"),
        **rules("pattern", "starts threads", "thread async jthread"),
        **rules("performance", "reserves memory ahead", ".reserve"),
    }

    def prepared(self) -> bytes:
        """Read a header for both compilers as CUDA, whose words C++ does not know."""
        if re.search(rb"__(?:global|device|host)__", self.source):
            self.grammar = Cuda.grammar
        return super().prepared()

    def bases_of(self, node: Node) -> tuple[str, ...]:
        """Return the base classes."""
        lists = [child for child in node.named_children if child.type == "base_class_clause"]
        found = [child for clause in lists for child in clause.named_children]
        return tuple(self.line(child) for child in found if child.type not in ("access_specifier", "comment"))

    def name_of(self, node: Node) -> str:
        """Return the name; an unnamed namespace is not one, but hides what is inside it."""
        if node.type == "namespace_definition":
            return self.text(node.child_by_field_name("name")).replace("::", ".") or "(anonymous)"
        return super().name_of(node)

    def is_public(self, node: Node, name: str, scope: Draft) -> bool:
        """Return whether a name is seen outside its file and class."""
        return name != "(anonymous)" and super().is_public(node, name, scope)

    def on_access_specifier(self, node: Node, scope: Draft) -> None:
        """Note the visibility of the members that follow."""
        scope.access = self.text(node).strip(" :")

    def on_base_class_clause(self, node: Node, scope: Draft) -> None:
        """Forget the visibility of base classes, which are visited like that of members."""

    def on_throw_statement(self, node: Node, scope: Draft) -> None:
        """Add a throw."""
        value = node.named_children[0] if node.named_children else None
        name = self.text(value.child_by_field_name("function") or value) if value else "(again)"
        given = self.arguments(value) if value and value.type == "call_expression" else []
        self.fail(" ".join(name.split())[:80], node, scope, self.message(given))

    def on_catch_clause(self, node: Node, scope: Draft) -> None:
        """Add a handler."""
        inside = node.child_by_field_name("parameters")
        types = (
            [self.text(child.child_by_field_name("type")) for child in inside.named_children]
            if inside
            else []
        )
        self.handle(next(filter(None, types), "..."), node, scope)

    def on_using_declaration(self, node: Node, scope: Draft) -> None:
        """Note what a name from another namespace is called here."""
        name = self.dotted(node.named_children[-1]) if node.named_children else ""
        if "." in name and "namespace" not in self.text(node):
            self.aliases[name.rpartition(".")[2]] = name

    def call(self, name: str, node: Node, scope: Draft, loops: int) -> None:
        """Add the checks that torch and others write as macros."""
        super().call(name, node, scope, loops)
        if re.fullmatch(r"(?:TORCH|AT|C10|TORCH_INTERNAL|CAFFE)_(?:CHECK|ASSERT|ERROR|ENFORCE)\w*", name):
            self.fail(name, node, scope, self.message(self.arguments(node)[1:]))


class Cuda(Cpp):
    """CUDA."""

    grammar = ("tree_sitter_cuda", "language")
    evidence = Cpp.evidence | {"kernel_call_syntax": ("performance", "configuration of a kernel launch")}
    effects = Cpp.effects | {
        **rules("performance", "synchronises the threads of a block", "__syncthreads __syncwarp"),
        **rules("performance", "waits for the device", "cudaDeviceSynchronize cudaStreamSynchronize"),
        **rules("performance", "copies between host and device", "cudaMemcpy cudaMemcpyAsync"),
        **rules("performance", "allocates on the device", "cudaMalloc cudaMallocAsync cudaMallocManaged"),
        **rules(
            "performance", "updates memory atomically", "atomicAdd atomicCAS atomicMax atomicMin atomicExch"
        ),
        **rules("pattern", "frees on the device", "cudaFree cudaFreeAsync"),
    }

    def define(
        self, node: Node, kind: str, scope: Draft, outer: Node | None = None, name: str = ""
    ) -> Draft | None:
        """Add a definition; functions that run on the device are called kernels or device functions."""
        draft = super().define(node, kind, scope, outer, name)
        if draft and kind == "function":
            places = re.findall(r"\b__(global|device|host)__", draft.signature)
            if "global" in places:
                draft.kind = "kernel"
                self.find("pattern", "kernel, which runs on the device", node)
            draft.decorators += tuple(f"__{place}__" for place in dict.fromkeys(places))
        return draft

    def on_type_qualifier(self, node: Node, scope: Draft) -> None:
        """Note shared memory."""
        if self.text(node) == "__shared__":
            self.find("performance", "memory shared by the threads of a block", node)


def _plain(name: str) -> str:
    """Return a name without the arguments of a template."""
    return name.partition("<")[0].strip()


def _blank(found: re.Match[bytes]) -> bytes:
    """Return a macro as blanks, with its lines; keep directives and the result of a function."""
    if found["directive"] is not None:
        return found.group()
    if found["result"] is not None:
        return found["result"].rjust(len(found.group()) - 1) + b" "
    return re.sub(rb"[^\n]", b" ", found.group())
