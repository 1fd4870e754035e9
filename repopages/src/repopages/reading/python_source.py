"""A Python file as a syntax tree with parents, spelt-out names and comments."""

import ast
import builtins
import re
import warnings
from collections.abc import Iterator
from functools import cached_property
from typing import TypeVar

Function = ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.AsyncFor | ast.While
Node = TypeVar("Node", bound=ast.AST)

BUILTINS = frozenset(dir(builtins))

_NEWLINE = re.compile(r"\r\n|\r|\n")  # str.splitlines also splits at form feeds, which ast does not count
_ATTEMPTS = 20
_LONGEST = 160
_PRAGMA = re.compile(r"(noqa|type:|pragma|fmt:|mypy|flake8|ruff|pylint|pyre-|isort:|yapf|-\*-|!|vim?:)", re.I)
_LICENSE = re.compile(r"copyright|licen[sc]e|SPDX|all rights reserved|warrant(y|ies)", re.I)
_UNITS = (ast.expr_context, ast.operator, ast.unaryop, ast.cmpop, ast.boolop)  # one object for the whole tree


class Source:
    """A parsed file.

    Args:
        text: Its text.
        tree: Its syntax tree.

    Attributes:
        lines: Its lines, without their ends.
        tree: Its syntax tree.
        imported: Dotted names that it imports, by local name; those of relative imports start with dots.
    """

    def __init__(self, text: str, tree: ast.Module) -> None:
        self.lines = _NEWLINE.split(text)
        self.tree = tree
        self._parents: dict[ast.AST, ast.AST] = {}
        self._found: dict[type[ast.AST], list[ast.AST]] = {}
        # Not recursive: an expression such as `a + b + ...` is as deep as it is long.
        waiting: list[ast.AST] = [tree]
        while waiting:
            node = waiting.pop()
            self._found.setdefault(type(node), []).append(node)
            for child in ast.iter_child_nodes(node):
                if not isinstance(child, _UNITS):
                    self._parents[child] = node
                    waiting.append(child)
        self.imported = dict(self._imported())

    def of(self, kind: type[Node]) -> Iterator[Node]:
        """Yield all nodes of a kind, in no particular order."""
        yield from self._found.get(kind, ())  # type: ignore[misc]

    def functions(self) -> Iterator[Function]:
        """Yield all functions and methods."""
        yield from self.of(ast.FunctionDef)
        yield from self.of(ast.AsyncFunctionDef)

    def assignments(self) -> Iterator[tuple[ast.stmt, list[ast.expr], ast.expr]]:
        """Yield (statement, targets, value) of all assignments of the form `x = ...` and `x: T = ...`."""
        for node in self.of(ast.Assign):
            yield node, node.targets, node.value
        for annotated in self.of(ast.AnnAssign):
            if annotated.value is not None:
                yield annotated, [annotated.target], annotated.value

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield what contains a node, from the inside out."""
        while node in self._parents:
            node = self._parents[node]
            yield node

    def function(self, node: ast.AST) -> Function | None:
        """Return the function around a node, or None."""
        return next((outer for outer in self.around(node) if isinstance(outer, Function)), None)

    def loops(self, node: ast.AST) -> int:
        """Return how many loops are around a node, in the same function."""
        count = 0
        for outer in self.around(node):
            if isinstance(outer, Function | ast.Lambda | ast.ClassDef):
                break
            # What a loop iterates over, and its `else`, run once.
            once = isinstance(outer, Loop) and (node is getattr(outer, "iter", None) or node in outer.orelse)
            count += isinstance(outer, Loop) and not once
            node = outer
        return count

    def where(self, node: ast.AST) -> str:
        """Return the dotted name of the functions and classes around a node, or an empty text."""
        outer = [scope.name for scope in self.around(node) if isinstance(scope, Function | ast.ClassDef)]
        return ".".join(reversed(outer))

    def written(self, node: ast.AST | None) -> str:
        """Return a node as written, on one line; a long one is cut."""
        if node is None:
            return ""
        first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0)
        if first != last or not 0 < first <= len(self.lines):
            return self._joined(node, first, last)
        line, start, end = (
            self.lines[first - 1],
            getattr(node, "col_offset", 0),
            getattr(node, "end_col_offset", 0),
        )
        # Columns count bytes of UTF-8.
        return line[start:end] if line.isascii() else line.encode()[start:end].decode(errors="replace")

    def _joined(self, node: ast.AST, first: int, last: int) -> str:
        if last - first > 60:  # ast.unparse on a table of thousands of lines takes seconds
            return f"{self.lines[first - 1].strip()} …"
        try:
            return ast.unparse(node)
        except (RecursionError, ValueError):
            return f"{self.lines[first - 1].strip()} …"

    def evidence(self, node: ast.AST) -> str:
        """Return a node as written, on one line of limited length."""
        text = " ".join(self.written(node).split())
        return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 2]} …"

    def dotted(self, node: ast.AST) -> str:
        """Return `a.b.c` as written, or an empty text for what is not a name."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""

    def spelt(self, node: ast.AST) -> str:
        """Return the dotted name of a node, with its imported part spelt out."""
        first, dot, rest = self.dotted(node).partition(".")
        return f"{self.imported.get(first, first)}{dot}{rest}"

    def known(self, node: ast.AST) -> str:
        """Return the spelt-out name of something imported or built in, or an empty text."""
        first = self.dotted(node).partition(".")[0]
        if first in self.imported or (first in BUILTINS and not self._is_bound(node, first)):
            return self.spelt(node)
        return ""

    def _is_bound(self, node: ast.AST, name: str) -> bool:
        """Tell whether the module, or a function around a node, has a name of its own like a built-in's."""
        scopes: list[Function | None] = [outer for outer in self.around(node) if isinstance(outer, Function)]
        return any((scope, name) in self.bound for scope in [*scopes, None])

    @cached_property
    def bound(self) -> dict[tuple[Function | None, str], list[ast.AST]]:
        """What binds each name, by function (None for the module): assignments, parameters, definitions."""
        found: dict[tuple[Function | None, str], list[ast.AST]] = {}
        for name in self.of(ast.Name):
            if isinstance(name.ctx, ast.Store):
                found.setdefault((self.function(name), name.id), []).append(self._parents[name])
        for argument in self.of(ast.arg):
            found.setdefault((self.function(argument), argument.arg), []).append(argument)
        for node in self.functions():
            if not isinstance(self._parents[node], ast.ClassDef):
                found.setdefault((self.function(node), node.name), []).append(node)
        return found

    def _imported(self) -> Iterator[tuple[str, str]]:
        for node in self.of(ast.Import):
            for name in node.names:
                first = name.name.partition(".")[0]
                yield (name.asname, name.name) if name.asname else (first, first)
        for chosen in self.of(ast.ImportFrom):
            module = f"{'.' * chosen.level}{chosen.module or ''}"
            for name in chosen.names:
                yield (
                    name.asname or name.name,
                    f"{module}.{name.name}" if chosen.module else module + name.name,
                )

    def comment(self, line: int, end: ast.AST | None = None) -> str:
        """Return the comment on the lines directly above `line`, or after `end` on its last line."""
        if end is not None:
            number, column = getattr(end, "end_lineno", 1), getattr(end, "end_col_offset", 0)
            after = self.lines[number - 1].encode()[column:].decode(errors="replace").strip()
            if after.startswith("#") and not _PRAGMA.match(after.lstrip("#: ")):
                return after.lstrip("#: ").strip()
        held: list[str] = []
        while line > 1 and self.lines[line - 2].lstrip().startswith("#"):
            line -= 1
            held.append(self.lines[line - 1])
        text = _uncommented(held[::-1])
        return "" if _LICENSE.search(text) else text

    def top_comment(self) -> str:
        """Return the first comment at the top of the file that is neither a licence nor an instruction."""
        blocks: list[list[str]] = [[]]
        for line in self.lines:
            if line.strip() and not line.lstrip().startswith("#"):
                break
            if line.strip("# \t"):
                blocks[-1].append(line)
            else:
                blocks.append([])
        licensed = [number for number, block in enumerate(blocks) if _LICENSE.search("\n".join(block))]
        after = blocks[licensed[-1] + 1 :] if licensed else blocks
        return next((text for block in after if (text := _uncommented(block))), "")


def terms(node: ast.expr) -> list[ast.expr]:
    """Return the terms of a sum, without recursion: it may have thousands."""
    found: list[ast.expr] = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        found.append(node.right)
        node = node.left
    return [node, *reversed(found)]


def constant_text(node: ast.expr) -> str:
    """Return a text as in its source, with constants unchanged and values as `…`."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(constant_text(part) if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.BinOp):
        is_sum = isinstance(node.op, ast.Add)
        return "".join(map(constant_text, terms(node))) if is_sum else constant_text(node.left)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        return re.sub(r"\{[^{}]*\}", "…", constant_text(node.func.value))
    return "…"


def _uncommented(lines: list[str]) -> str:
    """Return the text of comment lines, without marks, rules and instructions to tools."""
    texts = [re.sub(r"^\s*#+:? ?", "", line).rstrip() for line in lines]
    kept = [text for text in texts if not _PRAGMA.match(text) and not re.fullmatch(r"[-=#*~_ ]{3,}", text)]
    return "\n".join(kept).strip("\n")


def parse(text: str) -> tuple[Source, str]:
    """Parse a file as far as possible.

    Returns:
        The file, without the top-level statements that do not parse, and the first problem, if any.
    """
    lines, problem = _NEWLINE.split(text.removeprefix("\ufeff")), ""
    for _ in range(_ATTEMPTS):
        tree, wrong, number = _tree("\n".join(lines))
        problem = problem or wrong
        if tree is not None:
            return Source("\n".join(lines), tree), problem
        if not _blank(lines, number):
            break
    return Source("", ast.parse("")), problem


def _tree(text: str) -> tuple[ast.Module | None, str, int]:
    """Return (tree, problem, line of the problem or 0)."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes such as "\d" in the file
            return ast.parse(text), "", 0
    except SyntaxError as error:
        # "expected an indented block after 'if' statement on line 3" is reported at the line after it.
        blamed = re.search(r" on line (\d+)$", error.msg)
        return None, f"line {error.lineno}: {error.msg}", int(blamed[1]) if blamed else error.lineno or 0
    except ValueError as error:
        return None, str(error), 0
    except (RecursionError, MemoryError):
        return None, "nested too deeply to parse", 0


def _blank(lines: list[str], number: int) -> bool:
    """Empty the top-level statement around a line, and tell whether there was one."""
    if not 0 < number <= len(lines):
        return False
    first = number - 1
    while first > 0 and not _starts(lines[first]):
        first -= 1
    while first > 0 and lines[first - 1].startswith("@"):
        first -= 1
    last = number
    while last < len(lines) and not _starts(lines[last]):
        last += 1
    filled = any(line.strip() for line in lines[first:last])
    lines[first:last] = [""] * (last - first)
    return filled


def _starts(line: str) -> bool:
    """Tell whether a line may be the first of a top-level statement."""
    return bool(line) and not re.match(r"[\s#)\]}]|(else|elif|except|finally)\b", line)
