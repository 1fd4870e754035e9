"""Facts from a module's syntax tree: the errors that it raises, and its effects outside itself."""

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from repopages.reading.source import Function, Module

_TOUCHES = {
    "starts processes": {"subprocess", "multiprocessing", "os.fork", "os.exec", "os.spawn", "os.system"},
    "starts threads": {"threading.Thread", "concurrent.futures"},
    "loads native code": {"ctypes", "cffi"},
    "reads pickles": {"pickle.load", "pickle.loads", "torch.load", "marshal.load", "shelve", "dill"},
    "runs text as code": {"eval", "exec", "compile", "importlib.import_module", "__import__"},
    "opens network connections": {"socket", "urllib.request", "http.client", "requests", "ssl"},
    "communicates with other ranks": {"torch.distributed"},
    "writes files": {
        "open",
        "write_text",
        "write_bytes",
        "torch.save",
        "mkdir",
        "unlink",
        "os.replace",
        "os.rename",
    },
    "reads the environment": {"os.environ", "os.getenv"},
}
"""Effects that matter for safety, and the names in the source that show them."""


@dataclass(frozen=True)
class RaisedError:
    """A raise statement.

    Args:
        error: Name of the exception.
        message: Its text, with `…` for values.
        where: The function that raises it.
        line: Its line.
    """

    error: str
    message: str
    where: str
    line: int


def raised_errors(module: Module) -> list[RaisedError]:
    """Return the errors that a module raises with a message, in the order of its lines."""
    return list(_raised_errors(module.tree.body, ""))


def _raised_errors(body: Iterable[ast.AST], where: str) -> Iterator[RaisedError]:
    for node in body:
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            message = " ".join(_text(node.exc.args[0]).split()) if node.exc.args else ""
            if message:
                yield RaisedError(ast.unparse(node.exc.func), message, where, node.lineno)
        inner = where
        if isinstance(node, Function | ast.ClassDef):
            inner = f"{where}.{node.name}" if where else node.name
        yield from _raised_errors(ast.iter_child_nodes(node), inner)


def _text(node: ast.expr) -> str:
    """Return a message as in its source, with constants unchanged and values as `…`."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.BinOp):
        return _text(node.left) + (_text(node.right) if isinstance(node.op, ast.Add) else "")
    return "…"


def touches(module: Module) -> dict[str, list[str]]:
    """Return a module's effects beyond computing, each with the calls that show it."""
    used = _used_names(module)
    found: dict[str, list[str]] = {}
    for what, names in _TOUCHES.items():
        hits = sorted(dotted for dotted in used if any(_is_in(dotted, name) for name in names))
        if hits:
            found[what] = hits
    return found


def _is_in(used: str, name: str) -> bool:
    return used == name or used.startswith(f"{name}.") or ("." not in name and used.endswith(f".{name}"))


def _used_names(module: Module) -> set[str]:
    """Return the dotted names that a module calls or reads, with imported names spelt out."""
    used = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call):
            used.add(_spelt(ast.unparse(node.func), module))
        elif isinstance(node, ast.Attribute):
            used.add(_spelt(ast.unparse(node), module))
    return {dotted for dotted in used if dotted.replace(".", "").replace("_", "").isalnum()}


def _spelt(dotted: str, module: Module) -> str:
    first, _, rest = dotted.partition(".")
    known = module.imported.get(first, first)
    return f"{known}.{rest}" if rest else known


def dependencies(module: Module, package: str) -> tuple[list[str], list[str]]:
    """Return the standard-library and the third-party modules that a module imports."""
    found: set[str] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(str(node.module))
    others = sorted(module for module in found if module.partition(".")[0] != package)
    standard = [module for module in others if module.partition(".")[0] in sys.stdlib_module_names]
    return standard, [module for module in others if module not in standard]
