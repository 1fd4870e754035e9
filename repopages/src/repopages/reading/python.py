"""The reader of Python: definitions, imports, errors, options and names, from the syntax tree."""

import ast
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

from repopages.reading.model import Error, Facts, Finding, Import, Mention
from repopages.reading.python_findings import findings
from repopages.reading.python_items import items
from repopages.reading.python_source import BUILTINS, Function, Source, constant_text, parse, terms

_Fact = TypeVar("_Fact", Import, Error, Mention, Finding)
_OPTION_CALLS = ("add_argument", "add_option", "option", "Option", "version_option", "help_option")
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
        tests=sum(_is_test(source, node, is_test) for node in source.functions()),
    )


def _in_order(found: Iterable[_Fact]) -> tuple[_Fact, ...]:
    return tuple(sorted(found, key=lambda fact: fact.line))


def _exports(source: Source) -> tuple[str, ...] | None:
    """Return the constant names of `__all__`, wherever it is set or extended, or None."""
    found = [
        (node.lineno, value)
        for node, targets, value in source.assignments()
        if any(source.dotted(target) == "__all__" for target in targets)
    ]
    added = (node for node in source.of(ast.AugAssign) if source.dotted(node.target) == "__all__")
    found += [(node.lineno, node.value) for node in added]
    for call in source.of(ast.Call):
        if source.dotted(call.func) in ("__all__.extend", "__all__.append"):
            found += [(call.lineno, argument) for argument in call.args]
    found.sort(key=lambda pair: pair[0])
    names = dict.fromkeys(name for _, value in found for name in _texts(value))
    # An empty list exports nothing; one that is computed is not known.
    is_listed = any(isinstance(value, ast.List | ast.Tuple) for _, value in found)
    return tuple(names) if names or is_listed else None


def _texts(node: ast.expr | None) -> list[str]:
    """Return the constant texts in a text, list or tuple, or in a sum of them."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return [text for element in node.elts for text in _texts(element)]
    if isinstance(node, ast.Starred):
        return _texts(node.value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [text for term in terms(node) for text in _texts(term)]
    return []


def _imports(source: Source) -> Iterator[Import]:
    for node in source.of(ast.Import):
        inside, types_only = _situation(source, node)
        for name in node.names:
            alias = name.asname or ""
            yield Import(
                module=name.name, alias=alias, line=node.lineno, inside=inside, types_only=types_only
            )
    for chosen in source.of(ast.ImportFrom):
        inside, types_only = _situation(source, chosen)
        for name in chosen.names:
            yield Import(
                module=chosen.module or "",
                name=name.name,
                alias=name.asname or "",
                line=chosen.lineno,
                level=chosen.level,
                inside=inside,
                types_only=types_only,
            )
    for call in source.of(ast.Call):
        if source.known(call.func) in ("importlib.import_module", "__import__") and len(call.args) == 1:
            inside, types_only = _situation(source, call)
            for module in _texts(call.args[0]):
                yield Import(module=module, line=call.lineno, inside=inside, types_only=types_only)


def _situation(source: Source, node: ast.AST) -> tuple[bool, bool]:
    """Return whether a node is in a function, and whether it is below `if TYPE_CHECKING`."""
    around = [node, *source.around(node)]
    types_only = any(
        isinstance(outer, ast.If)
        and source.dotted(outer.test).rpartition(".")[2] == "TYPE_CHECKING"
        and inner in outer.body
        for inner, outer in itertools.pairwise(around)
    )
    return any(isinstance(outer, Function | ast.Lambda) for outer in around), types_only


def _raised(source: Source) -> Iterator[Error]:
    for node in source.of(ast.Raise):
        where = source.where(node)
        for error in _branches(node.exc):
            for name, message in _errors(source, node, error):
                yield Error(name=name, line=node.lineno, message=message, where=where)


def _errors(source: Source, node: ast.Raise, error: ast.expr) -> Iterator[tuple[str, str]]:
    """Yield (name, message) of a raised expression."""
    if not isinstance(error, ast.Call):
        yield from ((name, "") for name in _behind(source, node, source.dotted(error)))
    elif isinstance(error.func, ast.Attribute) and error.func.attr == "with_traceback":
        yield from _errors(source, node, error.func.value)
    elif name := source.dotted(error.func):
        yield name, _message(error.args[0]) if error.args else ""


def _branches(node: ast.expr | None) -> list[ast.expr]:
    """Return the expressions that may be raised: both of `a if ... else b`, or the only one."""
    if isinstance(node, ast.IfExp):
        return [*_branches(node.body), *_branches(node.orelse)]
    return [node] if node is not None else []


def _behind(source: Source, node: ast.AST, name: str) -> list[str]:
    """Return the exceptions behind a raised variable: those of its handler, or those assigned to it."""
    if not name.isidentifier() or not name.islower():
        return [name] if name else []
    for outer in source.around(node):
        if isinstance(outer, ast.ExceptHandler) and outer.name == name:
            return _handled(source, outer.type)
    values = [getattr(outer, "value", None) for outer in source.bound.get((source.function(node), name), [])]
    called = [source.dotted(value.func) for value in values if isinstance(value, ast.Call)]
    return [error for error in dict.fromkeys(called) if error.rpartition(".")[2][:1].isupper()]


def _message(node: ast.expr) -> str:
    return " ".join(constant_text(node).split())


def _caught(source: Source) -> Iterator[Error]:
    for node in source.of(ast.ExceptHandler):
        where = source.where(node)
        if node.type is None:
            yield Error(name="BaseException", line=node.lineno, message="bare except", where=where)
        for name in _handled(source, node.type):
            yield Error(name=name, line=node.lineno, where=where)
    for call in source.of(ast.Call):
        if source.known(call.func) == "contextlib.suppress":
            for argument in call.args:
                for name in _handled(source, argument):
                    yield Error(name=name, line=call.lineno, where=source.where(call))


def _handled(source: Source, node: ast.expr | None) -> list[str]:
    elements = node.elts if isinstance(node, ast.Tuple) else [node] if node is not None else []
    inner = [element.value if isinstance(element, ast.Starred) else element for element in elements]
    return [name for element in inner if (name := source.dotted(element))]


def _environment(source: Source) -> Iterator[Mention]:
    """Yield environment variables with a constant name, with their default if there is one."""
    constants = _constant_texts(source)

    def mention(name: ast.expr, default: ast.expr | None = None) -> Iterator[Mention]:
        words = _texts(name) or [constants.get(source.dotted(name), "")]
        text = f"default {source.evidence(default)}" if default is not None else ""
        for word in filter(None, words):
            yield Mention(word=word, line=name.lineno, kind="environment", text=text)

    for node in source.of(ast.Subscript):
        if source.known(node.value) == "os.environ":
            yield from mention(node.slice)
    for compare in source.of(ast.Compare):
        tests = isinstance(compare.ops[0], ast.In | ast.NotIn)
        if tests and source.known(compare.comparators[0]) == "os.environ":
            yield from mention(compare.left)
    for call in source.of(ast.Call):
        if call.args and source.known(call.func) in _ENVIRONMENT:
            yield from mention(call.args[0], call.args[1] if len(call.args) > 1 else None)
        elif call.args and source.dotted(call.func) in ("monkeypatch.setenv", "monkeypatch.delenv"):
            yield from mention(call.args[0])
        for word in call.keywords:
            if word.arg == "envvar":  # click and typer
                yield from mention(word.value)


def _constant_texts(source: Source) -> dict[str, str]:
    """Return the texts that the module assigns to names."""
    found: dict[str, str] = {}
    for _, targets, value in source.assignments():
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            found |= {
                source.dotted(target): value.value for target in targets if isinstance(target, ast.Name)
            }
    return found


def _options(source: Source) -> Iterator[Mention]:
    """Yield command-line options of argparse, optparse, click, typer and absl, each with its help."""
    for call in source.of(ast.Call):
        name = source.spelt(call.func)
        short = call.func.attr if isinstance(call.func, ast.Attribute) else name.rpartition(".")[2]
        texts = [text for argument in call.args for text in _texts(argument)]
        words: list[str] = []
        if short in _OPTION_CALLS:
            words = [
                part.strip() for text in texts for part in text.split("/") if _OPTION.match(part.strip())
            ]
        if name == "typer.Option" and not words:
            words = [f"--{parameter.replace('_', '-')}" for parameter in _parameter_of(source, call)]
        if name.startswith("absl.flags.DEFINE_") and texts:
            words = [f"--{texts[0]}"]
        shown = next((_message(word.value) for word in call.keywords if word.arg == "help"), "")
        for word in words:
            yield Mention(word=word, line=call.lineno, kind="option", text=shown)


def _parameter_of(source: Source, call: ast.Call) -> list[str]:
    """Return the parameter that a call is the default of, or in the annotation of."""
    around = {call, *source.around(call)}
    annotated = [node.arg for node in around if isinstance(node, ast.arg)]
    arguments = next((node for node in around if isinstance(node, ast.arguments)), None)
    if annotated or arguments is None:
        return annotated
    placed = [*arguments.posonlyargs, *arguments.args]
    last = placed[len(placed) - len(arguments.defaults) :]
    pairs = [*zip(last, arguments.defaults, strict=True)]
    pairs += [*zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]  # type: ignore[list-item]
    return [argument.arg for argument, default in pairs if default is call]


def _names(source: Source) -> Iterator[str]:
    """Yield the dotted names that the file uses, with imported ones spelt out."""
    for name in source.of(ast.Name):
        outer = next(source.around(name))
        if (
            isinstance(name.ctx, ast.Load)
            and not isinstance(outer, ast.Attribute)
            and name.id not in BUILTINS
        ):
            yield source.spelt(name)
    for attribute in source.of(ast.Attribute):
        dotted = source.spelt(attribute)
        if not dotted:
            yield attribute.attr  # of a call's result: its method is used, too
        elif not isinstance(next(source.around(attribute)), ast.Attribute):
            first, _, rest = dotted.partition(".")
            yield rest if first in ("self", "cls") else dotted


def _is_test(source: Source, node: Function, in_test_file: bool) -> bool:
    if not node.name.startswith("test"):
        return False
    outer = next(source.around(node), None)
    if isinstance(outer, ast.ClassDef):
        return in_test_file or any(source.dotted(base).endswith("TestCase") for base in outer.bases)
    return in_test_file and source.function(node) is None
