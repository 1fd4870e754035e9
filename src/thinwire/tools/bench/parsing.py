"""Programs and strategies as text: parsed into objects, and written as Python.

Texts also come from results files, so a text can only make programs, strategies and codecs. Code named by
`package.module:Name` is imported by `parse_program`, whose text the user wrote, and not by `parse_saved`.
"""

import ast
import dataclasses
import functools
from collections.abc import Collection
from typing import Any, TypeAlias

import torch

import thinwire
from thinwire import Codec, Configuration, Program, Schedule, Size
from thinwire.errors import OptionError
from thinwire.programs.description import ReprAsWritten, describe
from thinwire.tools.bench.workloads import call_users, find_object

PROGRAMS = ("Exact", "FP16", "BF16", "Int8", "Int4", "Int2", "FP8", "Sign", "TopK", "RandomK", "PowerSGD")
"""thinwire's gradient programs that need no options."""

Attachable: TypeAlias = Program | Configuration | Schedule
"""The types that `thinwire.attach` accepts."""

_LONGEST, _DEEPEST = 10_000, 50
"""Limits of a text: Python's parser and the functions below are recursive."""


def parse_program(text: str) -> Attachable:
    """Make a program or a strategy from text.

    Examples are `bf16`, `Reduced(Cast(...))`, `DiLoCo(period=16, program=Int4())`,
    `Schedule({0: Exact(), 20: Int8()})`, `ZeRO(parameters=torch.bfloat16)` and
    `package.module:Name(option=1)`.

    Raises:
        OptionError: The text does not parse, or is not a valid argument of `attach`.

    >>> parse_program("exact")
    Exact()
    """
    prefix, tree = _parse(text)
    program = call_users(lambda: _build(tree, prefix), f"program={text!r}")
    accepted = isinstance(program, Configuration | Schedule)
    if not accepted and (not callable(program) or isinstance(program, type)):
        raise OptionError(
            f"program={text!r} is not a program: it must yield collectives, see docs/programs.md"
        )
    describe(program)
    return program  # type: ignore[no-any-return] # attach checks its type again


def parse_saved(text: str, named: Collection[str] = ()) -> Attachable:
    """Make a program or a strategy from the text of a file, without running code that the file names.

    Args:
        text: As for `parse_program`.
        named: Texts that the user wrote. Only these may name code by `package.module:Name`.

    Raises:
        OptionError: As for `parse_program`, or the text names code that is not in `named`.
    """
    if names_code(text) and text not in named:
        raise OptionError(f"program={text!r} is code that a file names: pass it by --programs to run it")
    return parse_program(text)


def names_code(text: str) -> bool:
    """Return whether a text names a user's own code, by `package.module:Name`.

    >>> names_code("mine:Program(1)"), names_code("Schedule({0: Exact()})")
    (True, False)
    """
    return ":" in text.partition("(")[0]


def split_programs(text: str) -> list[str]:
    """Split a list of programs at the commas that are not within brackets.

    >>> split_programs("exact, PowerSGD(rank=4, warm_start=True),bf16")
    ['exact', 'PowerSGD(rank=4, warm_start=True)', 'bf16']
    """
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def public_name(text: str) -> str:
    """Return the name that a program's text begins with, with the capitals of thinwire's public names.

    >>> public_name("int8(block=64)")
    'Int8'
    """
    name = text.strip().partition("(")[0]
    return next((public for public in thinwire.__all__ if public.lower() == name.lower()), name)


def attach_line(text: str) -> str:
    """Return the line of Python that attaches the program of a text.

    >>> attach_line("int4")
    'wire = thinwire.attach(ddp, thinwire.Int4())'
    >>> attach_line("diloco(period=8, program=Int4)")
    'wire = thinwire.attach(ddp, thinwire.DiLoCo(period=8, program=thinwire.Int4()), optimizer=optimizer)'
    >>> attach_line("sparseloco(period=8)")
    'wire = thinwire.attach(ddp, thinwire.SparseLoCo(period=8), optimizer=optimizer)'
    """
    prefix, tree = _parse(text)
    if prefix:
        own = _Spelling().arguments(tree) if isinstance(tree, ast.Call) else tree
        call = ast.unparse(own) if isinstance(own, ast.Call) else f"{ast.unparse(own)}()"
        spelled = f"{prefix.removesuffix(':')}.{call}"
    else:
        spelled = ast.unparse(_Spelling().visit(tree))
    named = getattr(thinwire, public_name(text), None)  # a user's own is not imported to print a line
    is_class = isinstance(named, type) and issubclass(named, Configuration | Schedule)
    needs_optimizer = is_class or named is thinwire.SparseLoCo
    return f"wire = thinwire.attach(ddp, {spelled}{', optimizer=optimizer' * needs_optimizer})"


class _Spelling(ast.NodeTransformer):
    """Rewrites names of thinwire to attributes of the module, and names without options to calls."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        called = self.arguments(node)
        if isinstance(node.func, ast.Name):
            called.func = _qualified(node.func.id)
        return called

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Call(_qualified(node.id), [], [])

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        return node

    def arguments(self, node: ast.Call) -> ast.Call:
        """Return a copy of a call whose arguments are rewritten, but not its function."""
        keywords = [ast.keyword(word.arg, self.visit(word.value)) for word in node.keywords]
        return ast.Call(node.func, [self.visit(arg) for arg in node.args], keywords)


def _qualified(name: str) -> ast.expr:
    module = "functools" if name == "partial" else "thinwire"
    return ast.Attribute(ast.Name(module), public_name(name))


def _parse(text: str) -> tuple[str, ast.expr]:
    """Return the module of a user's own program with its colon, or an empty text, and the parsed call."""
    before, bracket, after = text.partition("(")
    module, colon, name = before.rpartition(":")
    try:
        if len(text) > _LONGEST:
            raise SyntaxError(f"it has more than {_LONGEST} characters")
        tree = ast.parse((name + bracket + after).strip(), mode="eval").body
        if not _is_shallow(tree):
            raise SyntaxError(f"it has more than {_DEEPEST} levels")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # ValueError: a null character
        reason = getattr(error, "msg", None) or str(error) or "it is too deep"
        shown = text if len(text) < 200 else f"{text[:200]}..."
        raise OptionError(
            f"program={shown!r} does not parse ({reason}): write Name or Name(option=value)"
        ) from error
    return module + colon, tree


def _is_shallow(tree: ast.expr) -> bool:
    """Return whether a tree has few enough levels for recursive functions."""
    level: list[ast.AST] = [tree]
    for _ in range(_DEEPEST):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    return not level


def _build(tree: ast.expr, prefix: str) -> Any:
    """Evaluate a call or a bare name, which is called without options."""
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name):
        if any(word.arg is None for word in tree.keywords):
            raise ValueError("** is not possible here: write each option as name=value")
        options = {str(word.arg): _value(word.value) for word in tree.keywords}
        return _find(tree.func.id, prefix)(*(_value(arg) for arg in tree.args), **options)
    if isinstance(tree, ast.Name):
        return _find(tree.id, prefix)()
    raise ValueError("it is neither a name nor a call of one")


def _value(tree: ast.expr) -> Any:
    """Evaluate an option: a literal, a nested program, an attribute of torch, or a collection of these."""
    if isinstance(tree, ast.Call | ast.Name):
        return _build(tree, "")
    if isinstance(tree, ast.Attribute):
        return _torch_attribute(tree)
    if isinstance(tree, ast.Dict) and None not in tree.keys:
        keys = (_value(key) for key in tree.keys if key is not None)
        return dict(zip(keys, map(_value, tree.values), strict=True))
    if isinstance(tree, ast.List | ast.Tuple):
        parts = [_value(part) for part in tree.elts]
        return parts if isinstance(tree, ast.List) else tuple(parts)
    try:
        return ast.literal_eval(tree)
    except ValueError:
        raise ValueError(f"{ast.unparse(tree)} is neither a literal nor a program") from None


def _torch_attribute(tree: ast.Attribute) -> Any:
    """Return a dtype or an optimizer class by its name, such as `torch.bfloat16` or `torch.optim.SGD`."""
    name = ast.unparse(tree)
    root, *path = name.split(".")
    found: Any = torch
    for part in path:
        found = getattr(found, part, None)
    optimizer = isinstance(found, type) and issubclass(found, torch.optim.Optimizer)
    if root != "torch" or not (isinstance(found, torch.dtype) or optimizer):
        raise OptionError(f"{name} is not a dtype or an optimizer of torch, such as torch.bfloat16")
    return found


def _find(name: str, prefix: str) -> Any:
    if prefix:
        return find_object(prefix + name, "program")
    if name == "partial":
        return _partial
    for public in thinwire.__all__:
        if public.lower() == name.lower() and _makes_programs(getattr(thinwire, public)):
            return getattr(thinwire, public)
    raise OptionError(
        f"program={name!r} is unknown: choose from {', '.join(PROGRAMS)}, a strategy such as"
        " DiLoCo(period=16), or your own by package.module:Name"
    )


def _makes_programs(public: object) -> bool:
    """Return whether a public name is a program, a strategy, a codec, a part of one, or a preset of these.

    Other functions must not be called: with arguments of a file, some of them read or write files.
    """
    if isinstance(public, type):
        return dataclasses.is_dataclass(public) and issubclass(public, ReprAsWritten | Codec | Size)
    return getattr(public, "is_preset", False) is True


def _partial(optimizer: object, /, **options: Any) -> "functools.partial[torch.optim.Optimizer]":
    """Return an outer optimizer with its options."""
    if not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
        raise OptionError(
            f"partial({optimizer!r}) must be of an optimizer: write partial(torch.optim.SGD, lr=0.7)"
        )
    return functools.partial(optimizer, **options)
