"""The reader of Python: definitions, imports, errors, options and names, from the syntax tree."""

import ast
import builtins
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

from repopages.reading.model import Error, Facts, Finding, Import, Mention
from repopages.reading.python_findings import findings
from repopages.reading.python_items import items
from repopages.reading.python_source import Function, Source, parse

_Fact = TypeVar("_Fact", Import, Error, Mention, Finding)
_BUILTINS = frozenset(dir(builtins))
_OPTION = re.compile(r"--?[A-Za-z0-9?][\w.-]*$")
_ENVIRONMENT = (
    "os.environ.get",
    "os.environ.setdefault",
    "os.environ.pop",
    "os.environ.__getitem__",
    "os.getenv",
)


def read(facts: Facts) -> Facts:
    """Return the facts of a Python file with all that its text says.

    Args:
        facts: The file, with its text.

    Returns:
        The facts. If a part of the text does not parse, they are those of the rest and name the problem.
    """
    source, problem = parse(facts.text)
    is_test = facts.role == "test"
    return replace(
        facts,
        problem=problem,
        doc=ast.get_docstring(source.tree) or source.top_comment(),
        items=items(source),
        exports=_exports(source),
        imports=_in_order(_imports(source)),
        raised=_in_order(_raised(source)),
        caught=_in_order(_caught(source)),
        findings=_in_order(findings(source, is_test=is_test)),
        mentions=_in_order([*_environment(source), *_options(source)]),
        names=frozenset(_names(source)),
        tests=sum(
            _is_test(source, node, is_test) for node in source.of(ast.FunctionDef, ast.AsyncFunctionDef)
        ),
    )


def _in_order(found: Iterable[_Fact]) -> tuple[_Fact, ...]:
    return tuple(sorted(found, key=lambda fact: fact.line))


def _exports(source: Source) -> tuple[str, ...] | None:
    """Return the constant names of `__all__`, wherever it is set or extended, or None."""
    names: list[str] = []
    is_set = False
    for node in source.of(ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Call):
        if isinstance(node, ast.Call):
            changed = source.dotted(node.func) in ("__all__.extend", "__all__.append")
            values: list[ast.expr | None] = list(node.args) if changed else []
        else:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            values = [node.value] if any(source.dotted(target) == "__all__" for target in targets) else []
            # `__all__ = []` is a statement, too; one that is computed says nothing.
            is_set |= any(isinstance(value, ast.List | ast.Tuple) for value in values)
        for value in values:
            names += _texts(value)
    return tuple(dict.fromkeys(names)) if names or is_set else None


def _texts(node: ast.expr | None) -> list[str]:
    """Return the constant texts in a text, list or tuple, or in a sum of them."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return [text for element in node.elts for text in _texts(element)]
    if isinstance(node, ast.Starred):
        return _texts(node.value)
    if isinstance(node, ast.BinOp):
        return [*_texts(node.left), *_texts(node.right)]
    return []


def _imports(source: Source) -> Iterator[Import]:
    for node in source.of(ast.Import):
        inside, types_only = _situation(source, node)
        for name in node.names:
            yield Import(
                module=name.name,
                alias=name.asname or "",
                line=node.lineno,
                inside=inside,
                types_only=types_only,
            )
    for node in source.of(ast.ImportFrom):
        inside, types_only = _situation(source, node)
        for name in node.names:
            yield Import(
                module=node.module or "",
                name=name.name,
                alias=name.asname or "",
                line=node.lineno,
                level=node.level,
                inside=inside,
                types_only=types_only,
            )
    for node in source.of(ast.Call):
        if source.spelt(node.func) in ("importlib.import_module", "__import__") and len(node.args) == 1:
            inside, types_only = _situation(source, node)
            for module in _texts(node.args[0]):
                yield Import(module=module, line=node.lineno, inside=inside, types_only=types_only)


def _situation(source: Source, node: ast.AST) -> tuple[bool, bool]:
    """Return whether a node is in a function, and whether it is below `if TYPE_CHECKING`."""
    around = [node, *source.around(node)]
    types_only = any(
        isinstance(outer, ast.If)
        and source.dotted(outer.test).rpartition(".")[2] == "TYPE_CHECKING"
        and inner in outer.body
        for inner, outer in zip(around, around[1:])
    )
    return any(isinstance(outer, Function | ast.Lambda) for outer in around), types_only


def _raised(source: Source) -> Iterator[Error]:
    for node in source.of(ast.Raise):
        for error in _branches(node.exc):
            called = error.func if isinstance(error, ast.Call) else error
            message = _message(error.args[0]) if isinstance(error, ast.Call) and error.args else ""
            name = source.dotted(called)
            if (
                isinstance(error, ast.Call)
                and isinstance(called, ast.Attribute)
                and called.attr == "with_traceback"
            ):
                called, name, message = called.value, source.dotted(called.value), ""
            names = [name]
            if isinstance(called, ast.Call):  # raise ValueError("...").with_traceback(...)
                names, message = [source.dotted(called.func)], _message(called.args[0]) if called.args else ""
            elif not isinstance(error, ast.Call) or message == "" != name:
                names = _behind(source, node, name)
            for text in filter(None, names):
                yield Error(name=text, line=node.lineno, message=message, where=source.where(node))


def _branches(node: ast.expr | None) -> list[ast.expr]:
    """Return the expressions that may be raised: both of `a if ... else b`, or the only one."""
    if isinstance(node, ast.IfExp):
        return [*_branches(node.body), *_branches(node.orelse)]
    return [node] if node is not None else []


def _behind(source: Source, node: ast.AST, name: str) -> list[str]:
    """Return the exceptions behind a raised variable: those of its handler, or the one assigned to it."""
    if not name.isidentifier() or not name.islower():
        return [name]
    for outer in source.around(node):
        if isinstance(outer, ast.ExceptHandler) and outer.name == name:
            return _handled(source, outer.type)
        if isinstance(outer, Function):
            values = [
                source.dotted(inner.value.func)
                for inner in ast.walk(outer)
                if isinstance(inner, ast.Assign)
                and isinstance(inner.value, ast.Call)
                and any(source.dotted(target) == name for target in inner.targets)
            ]
            return [value for value in dict.fromkeys(values) if value.rpartition(".")[2][:1].isupper()]
    return []


def _message(node: ast.expr) -> str:
    return " ".join(_filled(node).split())


def _filled(node: ast.expr) -> str:
    """Return a message as in its source, with constants unchanged and values as `…`."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_filled(part) if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.BinOp):
        return _filled(node.left) + (_filled(node.right) if isinstance(node.op, ast.Add) else "")
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        return re.sub(r"\{[^{}]*\}", "…", _filled(node.func.value))
    return "…"


def _caught(source: Source) -> Iterator[Error]:
    for node in source.of(ast.ExceptHandler):
        where = source.where(node)
        if node.type is None:
            yield Error(name="BaseException", line=node.lineno, message="bare except", where=where)
        for name in _handled(source, node.type):
            yield Error(name=name, line=node.lineno, where=where)
    for call in source.of(ast.Call):
        if source.spelt(call.func) == "contextlib.suppress":
            for argument in call.args:
                for name in _handled(source, argument):
                    yield Error(name=name, line=call.lineno, where=source.where(call))


def _handled(source: Source, node: ast.expr | None) -> list[str]:
    elements = node.elts if isinstance(node, ast.Tuple) else [node] if node is not None else []
    return [
        name
        for element in elements
        if (
            name := source.dotted(getattr(element, "value", element))
            if isinstance(element, ast.Starred)
            else source.dotted(element)
        )
    ]


def _environment(source: Source) -> Iterator[Mention]:
    """Yield environment variables with a constant name, with their default if there is one."""
    constants = _constant_texts(source)

    def mention(name: ast.expr, default: ast.expr | None = None) -> Iterator[Mention]:
        words = _texts(name) or [constants.get(source.dotted(name), "")]
        text = f"default {source.evidence(default)}" if default is not None else ""
        for word in filter(None, words):
            yield Mention(word=word, line=name.lineno, kind="environment", text=text)

    for node in source.of(ast.Subscript):
        if source.spelt(node.value) == "os.environ":
            yield from mention(node.slice)
    for compare in source.of(ast.Compare):
        if (
            isinstance(compare.ops[0], ast.In | ast.NotIn)
            and source.spelt(compare.comparators[0]) == "os.environ"
        ):
            yield from mention(compare.left)
    for call in source.of(ast.Call):
        name = source.spelt(call.func)
        if call.args and (
            name in _ENVIRONMENT or name.endswith(("monkeypatch.setenv", "monkeypatch.delenv"))
        ):
            default = call.args[1] if len(call.args) > 1 and not name.endswith("env") else None
            default = call.args[1] if len(call.args) > 1 and name == "os.getenv" else default
            yield from mention(call.args[0], default)
        for word in call.keywords:
            if word.arg == "envvar":  # click and typer
                yield from mention(word.value)


def _constant_texts(source: Source) -> dict[str, str]:
    """Return the texts that the module assigns to names."""
    found = {}
    for node in source.tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if isinstance(node.value.value, str):
                found |= {source.dotted(target): node.value.value for target in targets}
    return found


def _options(source: Source) -> Iterator[Mention]:
    """Yield command-line options of argparse, optparse, click, typer and absl, each spelling with its help."""
    for call in source.of(ast.Call):
        short = source.spelt(call.func).rpartition(".")[2] or getattr(call.func, "attr", "")
        words: list[str] = []
        texts = [text for argument in call.args for text in _texts(argument)]
        if short in ("add_argument", "add_option", "option", "Option", "version_option", "help_option"):
            words = [part for text in texts for part in text.split("/") if _OPTION.match(part.strip())]
        if short == "Option" and not words:
            words = [f"--{name.replace('_', '-')}" for name in _parameter_of(source, call)]
        if source.spelt(call.func).startswith("absl.flags.DEFINE_") and texts:
            words = [f"--{texts[0]}"]
        shown = next((_message(word.value) for word in call.keywords if word.arg == "help"), "")
        for word in words:
            yield Mention(word=word.strip(), line=call.lineno, kind="option", text=shown)


def _parameter_of(source: Source, call: ast.Call) -> list[str]:
    """Return the parameter that `typer.Option(...)` is the default or the annotation of."""
    if source.spelt(call.func) != "typer.Option":
        return []
    function = next((outer for outer in source.around(call) if isinstance(outer, Function)), None)
    if function is None:
        return []
    placed = [*function.args.posonlyargs, *function.args.args]
    pairs = [
        *zip(reversed(placed), reversed(function.args.defaults)),
        *zip(function.args.kwonlyargs, function.args.kw_defaults),
    ]
    around = {call, *source.around(call)}
    return [argument.arg for argument, default in pairs if default is call] or [
        argument.arg for argument in [*placed, *function.args.kwonlyargs] if argument in around
    ]


def _names(source: Source) -> Iterator[str]:
    """Yield the dotted names that the file uses, with imported ones spelt out."""
    for node in source.of(ast.Name, ast.Attribute):
        outer = next(source.around(node), None)
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            continue
        if not isinstance(outer, ast.Attribute) and (name := source.spelt(node)):
            first, _, rest = name.partition(".")
            if first in ("self", "cls"):
                name = rest
            if name and name not in _BUILTINS:
                yield name
        elif isinstance(node, ast.Attribute) and not source.dotted(node):
            yield node.attr  # of a call's result: its method is used too


def _is_test(source: Source, node: Function, in_test_file: bool) -> bool:
    if not node.name.startswith("test"):
        return False
    outer = next(source.around(node), None)
    if isinstance(outer, ast.ClassDef):
        return in_test_file or any(source.dotted(base).endswith("TestCase") for base in outer.bases)
    return in_test_file and source.function(node) is None
