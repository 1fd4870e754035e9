"""The reader of Python: all that Python's own `ast` finds is in the facts, and bad input is no error."""

import ast
import importlib.util
import pickle
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from repopages.reading.model import Facts, Item
from repopages.reading.python import read


def facts_of(text: str, role: str = "source", path: str = "shop/till.py") -> Facts:
    return read(Facts(path=path, size=len(text), language="Python", role=role, text=textwrap.dedent(text)))


def items_of(text: str) -> dict[str, Item]:
    return dict(facts_of(text).walk())


def torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        pytest.skip("torch is not installed")
    return Path(spec.origin).parent


def read_file(path: Path) -> Facts:
    text = path.read_text(encoding="utf-8", errors="replace")
    return read(Facts(path=path.name, size=len(text), language="Python", role="source", text=text))


def algorithms() -> list[Path]:
    return sorted((torch_folder() / "distributed" / "algorithms").rglob("*.py"))


def defined(node: ast.AST, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all functions and classes, nested ones too."""
    for child in ast.iter_child_nodes(node):
        is_scope = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        name = f"{prefix}{child.name}" if is_scope else ""  # type: ignore[attr-defined]
        if name:
            yield name
        yield from defined(child, f"{name}." if name else prefix)


def test_the_facts_have_every_definition_that_ast_finds() -> None:
    names = set()
    for path in algorithms():
        expected = set(defined(ast.parse(path.read_text())))
        assert expected <= {name for name, _ in read_file(path).walk()}, path
        names |= expected
    assert len(names) > 100
    assert "hook_with_zero_step.hook_with_zero_fn" in names  # nested functions are among them


def test_the_facts_have_every_import_that_ast_finds() -> None:
    seen = 0
    for path in algorithms():
        facts = read_file(path)
        found = {(part.module, part.name, part.alias, part.level, part.line) for part in facts.imports}
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                expected = {(name.name, "", name.asname or "", 0, node.lineno) for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                module, level = node.module or "", node.level
                expected = {(module, name.name, name.asname or "", level, node.lineno) for name in node.names}
            else:
                continue
            assert expected <= found, path
            seen += len(expected)
    assert seen > 100


def test_the_facts_have_every_error_that_ast_finds() -> None:
    raised_count = caught_count = 0
    for path in algorithms():
        facts = read_file(path)
        raised = {(error.name, error.line) for error in facts.raised}
        caught = {(error.name, error.line) for error in facts.caught}
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and node.exc is not None:
                error = ast.unparse(node.exc.func if isinstance(node.exc, ast.Call) else node.exc)
                if error[:1].isupper():
                    assert (error, node.lineno) in raised, path
                    raised_count += 1
            elif isinstance(node, ast.ExceptHandler) and node.type is not None:
                parts = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
                assert {(ast.unparse(part), node.lineno) for part in parts} <= caught, path
                caught_count += len(parts)
    assert raised_count > 50
    assert caught_count > 3


def test_the_facts_have_every_constant_and_enum_member_that_ast_finds() -> None:
    constants = members = 0
    for path in algorithms():
        facts = read_file(path)
        known = {(name, item.kind) for name, item in facts.walk()}
        tree = ast.parse(path.read_text())
        for name in assigned(tree.body):
            if name.isupper() and name != "__all__":
                assert (name, "constant") in known, path
                constants += 1
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and any("Enum" in ast.unparse(base) for base in node.bases):
                for name in assigned(node.body):
                    assert (f"{node.name}.{name}", "member") in known, path
                    members += 1
    assert constants > 3
    assert members > 8


def assigned(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def read_without_error(paths: list[Path]) -> list[str]:
    """Read files, and return the problems."""
    problems = []
    for path in paths:
        facts = read_file(path)
        assert pickle.loads(pickle.dumps(facts)) == facts
        assert all(0 < item.line <= item.end <= facts.lines for _, item in facts.walk()), path
        assert all(finding.code and "\n" not in finding.code for finding in facts.findings), path
        if facts.problem:
            problems.append(f"{path}: {facts.problem}")
    return problems


def test_a_part_of_torch_is_read() -> None:
    assert read_without_error(sorted((torch_folder() / "nn" / "modules").glob("*.py"))) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_of_torch_and_the_standard_library_is_read() -> None:
    library = Path(ast.__file__).parent
    paths = [path for path in library.rglob("*.py") if "site-packages" not in path.parts and path.is_file()]
    read_without_error([*sorted(torch_folder().rglob("*.py")), *sorted(paths)])


DEFINITIONS = '''
    """Sells things."""
    from dataclasses import KW_ONLY, dataclass, field
    from enum import Enum, auto
    from typing import ClassVar, NamedTuple, overload

    #: Price in euros.
    #: Never 0.
    PRICE: Final = 3
    limit = 10  # things per customer
    WIDTH, HEIGHT = 2, 3
    """Of the shop window."""
    add = lambda x, *, y=2: x + y

    class Colour(Enum):
        RED = auto()  # warm
        BLUE = "b"
        def paint(self): ...

    class Shade(Colour):
        DARK = 1

    class SoldOutError(Exception): ...
    class LateError(SoldOutError): ...

    @dataclass(frozen=True)
    class Thing:
        """A thing."""
        name: str
        parts: list[str] = field(default_factory=list)
        count: ClassVar[int] = 0
        hidden: int = field(default=0, init=False)

    @dataclass
    class Tea(Thing):
        _: KW_ONLY
        grams: float = 1.5

    class Point(NamedTuple):
        x: int
        y: int = 0

    class Till:
        drawer = None
        def __init__(self, owner: str, /, size: int = 3, *coins: int, **options) -> None:
            self.owner: str = owner  # who may open it
            # How many coins fit.
            self.size = size
            self.left, self.right = 1, 2
        @property
        def value(self) -> float:
            """All money in it."""
        @value.setter
        def value(self, amount: float) -> None: ...
        @staticmethod
        def empty(of: str) -> "Till": ...
        async def open(self):
            def turn(key): ...
            class Lock: ...

    @overload
    def sell(what: int) -> int: ...
    @overload
    def sell(what: str) -> str: ...
    def sell(what, price=PRICE):
        """Sell a thing."""

    if True:
        def late():
            with open("x"):
                def deep(): ...
    else:
        def late():
            def other(): ...

    # Counts the things.
    # One by one.
    def count(): ...
    class Cup:
        __doc__ = "A cup" + f" of {1}."
    class Mug: ...
    Mug.__doc__ = """A mug.
        """
    brew = _add_docstr(kettle.brew, "Brew tea.")
    Pair = namedtuple("Pair", "left right")
    Mood = Enum("Mood", ["GOOD", "BAD"])
'''


def test_definitions_have_kind_signature_and_doc() -> None:
    items = items_of(DEFINITIONS)
    said = {name: (item.kind, item.signature, item.doc) for name, item in items.items()}
    assert said["PRICE"] == ("constant", "Final", "Price in euros.\nNever 0.")
    assert said["limit"] == ("variable", "", "things per customer")
    assert said["HEIGHT"] == ("constant", "", "Of the shop window.")
    assert said["add"] == ("function", "(x, *, y=2)", "")
    assert said["Colour.RED"] == ("member", "", "warm")
    assert said["Shade.DARK"][0] == "member"
    assert said["LateError"][0] == "exception"
    assert said["Thing"][1] == "(name: str, parts: list[str] = list())"
    assert said["Tea"][1] == "(name: str, parts: list[str] = list(), *, grams: float = 1.5)"
    assert said["Point"][1] == "(x: int, y: int = 0)"
    assert said["Till"][1] == "(owner: str, /, size: int = 3, *coins: int, **options)"
    assert said["Till.owner"] == ("attribute", "str", "who may open it")
    assert said["Till.size"] == ("attribute", "", "How many coins fit.")
    assert said["Till.value"] == ("property", "float", "All money in it.")
    assert said["Till.empty"][:2] == ("method", '(of: str) -> "Till"')
    assert said["sell"] == ("function", "(what, price=PRICE)", "Sell a thing.")
    assert said["count"][2] == "Counts the things.\nOne by one."
    assert [said[name][2] for name in ("Cup", "Mug", "brew")] == ["A cup of ….", "A mug.", "Brew tea."]
    assert said["Pair"][:2] == ("class", "(left, right)")
    assert {"Till.open.turn", "Till.open.Lock", "late.deep", "late.other", "Till.left", "Mood.BAD"} <= set(
        items
    )
    assert items["Till"].parameters == ("owner", "size", "coins", "options")
    assert items["Colour.BLUE"].value == '"b"'
    assert items["Till"].public
    assert not items["Till.open.turn"].public
    assert facts_of(DEFINITIONS).doc == "Sells things."


def test_imports_are_found_everywhere() -> None:
    facts = facts_of(
        """
        import os.path as p, sys
        from .. import a as b
        from .x import *
        if TYPE_CHECKING:
            from y import Z
        else:
            import w
        def f():
            import late
            importlib.import_module("plugin")
        import importlib
        """
    )
    said = {(part.module, part.name): part for part in facts.imports}
    assert said["os.path", ""].local == "p"
    assert (said["", "a"].alias, said["", "a"].level) == ("b", 2)
    assert ("x", "*") in said
    assert said["y", "Z"].types_only
    assert not said["w", ""].types_only
    assert said["late", ""].inside
    assert said["plugin", ""].inside
    assert [part.line for part in facts.imports] == sorted(part.line for part in facts.imports)


def test_errors_have_message_and_place() -> None:
    facts = facts_of(
        """
        class A:
            def f(self, x):
                try:
                    raise ValueError(f"x={x} is " "bad")
                except (KeyError, os.error) as wrong:
                    raise wrong
                except:
                    raise
                error = TypeError("no")
                raise error
                raise MyError if x else OtherError("{} of {}".format(1, 2)).with_traceback(None)
        with contextlib.suppress(OSError): ...
        import contextlib
        """
    )
    assert [(error.name, error.message) for error in facts.raised] == [
        ("ValueError", "x=… is bad"),
        ("KeyError", ""),
        ("os.error", ""),
        ("TypeError", ""),
        ("MyError", ""),
        ("OtherError", "… of …"),
    ]
    assert {error.where for error in facts.raised} == {"A.f"}
    assert [error.name for error in facts.caught] == ["KeyError", "os.error", "BaseException", "OSError"]


def test_environment_variables_and_options_are_found() -> None:
    facts = facts_of(
        """
        import os, argparse, click, typer
        from os import environ as env, getenv
        NAME = "SHOP_NAME"
        os.environ["SHOP_A"]; env.get("SHOP_B", "1"); getenv(NAME); "SHOP_C" in os.environ; os.environ[x]
        other.environ["NO"]
        parser.add_argument("-v", "--verbose", help="say "
            "more")
        parser.add_argument("path")
        @click.option("--fast/--slow", "-f", envvar="SHOP_FAST", help=f"of {x}")
        def main(count: int = typer.Option(1, help="How many."), *, my_name: Annotated[str, typer.Option()]):
            ...
        """
    )
    said = {(mention.kind, mention.word): mention.text for mention in facts.mentions}
    assert said == {
        ("environment", "SHOP_A"): "",
        ("environment", "SHOP_B"): 'default "1"',
        ("environment", "SHOP_NAME"): "",
        ("environment", "SHOP_C"): "",
        ("environment", "SHOP_FAST"): "",
        ("option", "-v"): "say more",
        ("option", "--verbose"): "say more",
        ("option", "--fast"): "of …",
        ("option", "--slow"): "of …",
        ("option", "-f"): "of …",
        ("option", "--count"): "How many.",
        ("option", "--my-name"): "",
    }


def test_names_are_spelt_out_through_imports() -> None:
    facts = facts_of(
        """
        import torch.nn as nn
        from ..a import b
        from . import c
        nn.Linear(b.d, c.e)
        self.f.g()
        h().i
        len(x)
        """
    )
    assert facts.names == {"torch.nn.Linear", "..a.b.d", ".c.e", "f.g", "h", "i", "x"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "__all__ = ['a'] + ['b', *['c']] + other.__all__\n__all__ += ('d',)\n__all__.append('e')",
            tuple("abcde"),
        ),
        ("if x:\n    __all__: list[str] = []", ()),
        ("__all__ = [name for name in dir()]", None),
        ("x = 1", None),
    ],
)
def test_exports_are_the_constant_names(text: str, expected: tuple[str, ...] | None) -> None:
    assert facts_of(text).exports == expected


def test_tests_are_counted() -> None:
    text = """
        def test_a(): ...
        async def test_b():
            def test_no(): ...
        class TestC(TestCase):
            def test_c(self): ...
        """
    assert facts_of(text, role="test").tests == 3
    assert facts_of(text).tests == 1


@pytest.mark.parametrize(
    ("text", "problem", "names"),
    [
        ("A = 1\n\n@x\ndef f(:\n    pass\n\ndef g(): ...\n", "line 4: invalid syntax", {"A", "g"}),
        (
            "A = 1\nif A:\nB = 2\n",
            "line 3: expected an indented block after 'if' statement on line 2",
            {"A", "B"},
        ),
        ("def f():\n    print 'x'\n\ndef g(): ...\n", "line 2: Missing parentheses", {"g"}),
        ("A = 1\nx = '''never closed\nB = 2\n", "line 2: unterminated", {"A"}),
        ("a\0b", "", set()),
        (f"x = {'-' * 20_000}1", "", set()),
        (f"x = {'(' * 300}", "line 1: too many nested parentheses", set()),
        ("", None, set()),
        ("\ufeffA = 1\r\nB = 2\r\n", None, {"A", "B"}),
        ("A = 1\n\x0c\nB = '\u2028'\n", None, {"A", "B"}),
        ("# -*- coding: latin-1 -*-\nÄ = 'ö'  # ü\n", None, {"Ä"}),
    ],
)
def test_broken_files_keep_what_parses(text: str, problem: str | None, names: set[str]) -> None:
    facts = facts_of(text)
    assert {item.name for item in facts.items} >= names
    assert facts.problem == "" if problem is None else facts.problem and facts.problem.startswith(problem)


def test_lines_stay_right_after_a_broken_statement() -> None:
    facts = facts_of("def f(:\n    pass\n\ndef g(): ...\n")
    assert [(item.name, item.line) for item in facts.items] == [("g", 4)]


def test_deep_and_long_expressions_are_read() -> None:
    total = " + ".join(["'x'"] * 1200)
    facts = facts_of(f"A = {total}\nB = [{'1, ' * 20_000}]\nraise C({total})\n__all__ = [{total}]\n")
    assert [item.name for item in facts.items] == ["A", "B"]
    assert facts.raised[0].message == "x" * 1200
    assert all(len(item.value) <= 160 for item in facts.items)


def test_a_licence_is_no_description() -> None:
    head = "#!/usr/bin/python\n# Copyright 2020 A. Hat\n# License: MIT\n\n"
    text = f"{head}# mypy: strict\n# Sells hats.\n\nx = 1\n"
    assert facts_of(text).doc == "Sells hats."
    assert facts_of("# mypy: allow-untyped-defs\nimport x\n").doc == ""
