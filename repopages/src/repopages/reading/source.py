"""The content of a package's sources: modules, items, parameters, docstrings. Nothing is imported."""

import ast
import importlib.util
import inspect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from repopages.errors import OptionError

Function = ast.FunctionDef | ast.AsyncFunctionDef
_AROUND = ("benchmarks", "docs", "examples", "test", "tests")


@dataclass(frozen=True)
class Field:
    """A field of a dataclass.

    Args:
        name: Its name.
        text: The parameter of the constructor, with type and default.
        kw_only: Whether the constructor takes it by keyword only.
    """

    name: str
    text: str
    kw_only: bool


@dataclass(frozen=True, kw_only=True)
class Item:
    """A function, class, method, property or variable.

    Attributes:
        name: Its name, for members without that of the class.
        kind: "function", "class", "exception", "method", "property", "attribute" or "data".
        signature: Parameters and return type as written, or the type of an attribute.
        doc: Its docstring, or an empty text.
        line: First line in the file.
        end: Last line in the file.
        parameters: Names of its parameters.
        members: Methods, properties and attributes of a class.
        decorators: Decorators as written, without @.
        bases: Base classes of a class, as written.
        fields: Fields of a dataclass without an `__init__`. Its constructor takes those of its bases too.
    """

    name: str
    kind: str
    signature: str = ""
    doc: str = ""
    line: int = 1
    end: int = 1
    parameters: tuple[str, ...] = ()
    members: tuple["Item", ...] = ()
    decorators: tuple[str, ...] = ()
    bases: tuple[str, ...] = ()
    fields: tuple[Field, ...] = ()

    @property
    def public(self) -> bool:
        """True for names without a leading underscore, and for dunders such as `__version__`."""
        return not self.name.startswith("_") or (self.name.startswith("__") and self.name.endswith("__"))


@dataclass(frozen=True, kw_only=True, eq=False)
class Module:
    """One source file.

    Attributes:
        name: Dotted name, such as `json.decoder`.
        path: The file.
        text: Its text.
        tree: Its syntax tree.
        doc: Its docstring.
        items: Its top-level definitions, in the order of the file.
        exports: `__all__`, or None.
        imported: Dotted names that it imports, by local name: {"scanner": "json.scanner"}.
        is_package: Whether it is the `__init__.py` of a folder.
    """

    name: str
    path: Path
    text: str = field(repr=False)
    tree: ast.Module = field(repr=False)
    doc: str = field(repr=False)
    items: tuple[Item, ...] = field(repr=False)
    exports: tuple[str, ...] | None
    imported: dict[str, str] = field(repr=False)
    is_package: bool

    @property
    def lines(self) -> int:
        """Number of lines."""
        return self.text.count("\n") + (not self.text.endswith("\n"))

    @property
    def leaf(self) -> str:
        """Last part of the name."""
        return self.name.rpartition(".")[2]

    def item(self, name: str) -> Item | None:
        """Return the module's definition of `name`, or None."""
        return next((item for item in self.items if item.name == name), None)


def find_package(name: str) -> Path:
    """Return the folder of a package, or the file of a module, without importing it.

    Args:
        name: A checkout with one package, the folder of a package, or the name of a package that Python can
            find.

    Raises:
        OptionError: If there is no such package, it has no Python source, or the checkout has several.
    """
    folder = Path(name)
    packages = _packages_in(folder) if folder.is_dir() else []
    if len(packages) > 1:
        listed = ", ".join(str(package) for package in packages)
        raise OptionError(f"path={name!r} contains several packages: pass one of {listed}")
    if packages:
        return packages[0].resolve()
    try:
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
    except (ImportError, ValueError):
        spec = None
    origin = Path(spec.origin) if spec is not None and spec.origin else None
    if origin is None or origin.suffix != ".py":
        raise OptionError(
            f"path={name!r} has no Python source that can be found: pass a checkout, the folder of a package"
            " or the name of an installed one"
        )
    return origin.parent.resolve() if origin.name == "__init__.py" else origin.resolve()


def _packages_in(folder: Path) -> list[Path]:
    """Return the folder if it is a package, or the packages of a checkout, in `src/` or at its top."""
    if (folder / "__init__.py").exists():
        return [folder]
    for parent in (folder / "src", folder):
        found = [path.parent for path in sorted(parent.glob("*/__init__.py"))]
        found = [package for package in found if package.name not in _AROUND]
        if found:
            return found
    return [folder] if any(folder.glob("*.py")) else []


def read_package(path: Path) -> list[Module]:
    """Return all modules of a package's folder, or the single module of a file, by name.

    Files that this Python cannot parse are left out, as are folders without `__init__.py`.
    """
    if path.is_file():
        module = read_module(path, path.stem)
        return [module] if module else []
    modules = []
    for file in sorted(path.rglob("*.py")):
        parts = file.relative_to(path.parent).with_suffix("").parts
        between = [path.parent.joinpath(*parts[:count]) for count in range(2, len(parts))]
        if any(not (folder / "__init__.py").exists() for folder in between):
            continue
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules.append(read_module(file, name))
    return sorted((module for module in modules if module), key=lambda module: module.name)


def read_module(path: Path, name: str) -> Module | None:
    """Return one file as a module, or None if it does not parse."""
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: too many levels
        return None
    is_package = path.name == "__init__.py"
    return Module(
        name=name,
        path=path,
        text=text,
        tree=tree,
        doc=ast.get_docstring(tree) or "",
        items=tuple(_items(tree.body)),
        exports=_exports(tree),
        imported=imports_of(tree, name if is_package else name.rpartition(".")[0]),
        is_package=is_package,
    )


def imports_of(tree: ast.Module, package: str) -> dict[str, str]:
    """Return the dotted name behind each imported local name, wherever in the file it is imported.

    Args:
        tree: The file.
        package: The package that its relative imports start from.
    """
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.asname or alias.name] = alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - node.level + 1], *([base] if base else [])])
            for alias in node.names:
                found[alias.asname or alias.name] = f"{base}.{alias.name}" if alias.name != "*" else base
    return found


def _exports(tree: ast.Module) -> tuple[str, ...] | None:
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            value = getattr(node, "value", None)
            if isinstance(value, ast.List | ast.Tuple):
                return tuple(
                    str(element.value) for element in value.elts if isinstance(element, ast.Constant)
                )
    return None


def _items(body: list[ast.stmt]) -> Iterator[Item]:
    """Yield a module's definitions, once per name. A definition with a docstring replaces its overloads."""
    seen: dict[str, Item] = {}
    for node, doc in _flat(body):
        for item in _item(node, doc):
            known = seen.get(item.name)
            if known is None or (not known.doc and item.doc):
                seen[item.name] = item
    yield from seen.values()


def _flat(body: list[ast.stmt]) -> Iterator[tuple[ast.stmt, str]]:
    """Yield statements, including those inside `if` and `try`, each with the docstring below it."""
    for node, below in itertools.zip_longest(body, body[1:]):
        if isinstance(node, ast.If | ast.Try):
            yield from _flat(node.body)
            yield from _flat(node.orelse)
        else:
            text = below.value if isinstance(below, ast.Expr) else None
            doc = text.value if isinstance(text, ast.Constant) else None
            yield node, inspect.cleandoc(doc) if isinstance(doc, str) else ""


def _item(node: ast.stmt, doc: str) -> Iterator[Item]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield _function(node, "function")
    elif isinstance(node, ast.ClassDef):
        yield _class(node)
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        kind = ast.unparse(node.annotation) if isinstance(node, ast.AnnAssign) else ""
        end = node.end_lineno or node.lineno
        for target in targets:
            if isinstance(target, ast.Name) and target.id != "__all__":
                yield Item(name=target.id, kind="data", signature=kind, doc=doc, line=node.lineno, end=end)


def _function(node: Function, kind: str) -> Item:
    taken = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    names = [argument.arg for argument in taken if argument.arg not in ("self", "cls")]
    names += [argument.arg for argument in (node.args.vararg, node.args.kwarg) if argument]
    decorators = tuple(ast.unparse(decorator) for decorator in node.decorator_list)
    if any(decorator.rpartition(".")[2] in ("property", "cached_property") for decorator in decorators):
        kind, signature = "property", ast.unparse(node.returns) if node.returns else ""
    else:
        signature = _signature(node, drop_first=kind == "method" and "staticmethod" not in decorators)
    return Item(
        name=node.name,
        kind=kind,
        signature=signature,
        doc=ast.get_docstring(node) or "",
        line=node.lineno,
        end=node.end_lineno or node.lineno,
        parameters=tuple(names),
        decorators=decorators,
    )


def _signature(node: Function, *, drop_first: bool) -> str:
    args = node.args
    if drop_first and (args.posonlyargs or args.args):
        first = "posonlyargs" if args.posonlyargs else "args"
        parts = {name: getattr(args, name) for name in args._fields}
        parts[first] = parts[first][1:]
        args = ast.arguments(**parts)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({ast.unparse(args)}){returns}"


def _class(node: ast.ClassDef) -> Item:
    decorators = tuple(ast.unparse(decorator) for decorator in node.decorator_list)
    members = []
    for child, doc in _flat(node.body):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            members.append(_function(child, "method"))
        elif isinstance(child, ast.Assign | ast.AnnAssign):
            members += [replace(item, kind="attribute") for item in _item(child, doc)]
    unique = {
        member.name: member for member in reversed(members)
    }  # a property's getter comes before its setter
    made = next((member for member in members if member.name == "__init__"), None)
    bases = [ast.unparse(base) for base in node.bases]
    is_error = any(base.endswith(("Error", "Exception", "Warning")) for base in bases)
    fields = () if made else tuple(_fields(node, decorators))
    return Item(
        name=node.name,
        kind="exception" if is_error else "class",
        signature=made.signature if made else constructor(fields),
        doc=ast.get_docstring(node) or "",
        line=node.lineno,
        end=node.end_lineno or node.lineno,
        parameters=made.parameters if made else (),
        members=tuple(reversed(unique.values())),
        decorators=decorators,
        bases=tuple(bases),
        fields=fields,
    )


def _fields(node: ast.ClassDef, decorators: tuple[str, ...]) -> Iterator[Field]:
    """Yield the fields that a dataclass declares itself."""
    how = next((decorator for decorator in decorators if "dataclass" in decorator), None)
    for child in node.body if how is not None else ():
        if isinstance(child, ast.AnnAssign) and "ClassVar" not in ast.unparse(child.annotation):
            name, default = ast.unparse(child.target), _default(child.value)
            text = f"{name}: {ast.unparse(child.annotation)}{f' = {default}' if default else ''}"
            yield Field(name, text, "kw_only=True" in (how or "").replace(" ", ""))


def _default(value: ast.expr | None) -> str:
    """Return a field's default as a caller sees it, without `dataclasses.field` around it."""
    if not isinstance(value, ast.Call) or ast.unparse(value.func).rpartition(".")[2] != "field":
        return ast.unparse(value) if value is not None else ""
    options = {keyword.arg: ast.unparse(keyword.value) for keyword in value.keywords}
    return f"{options['default_factory']}()" if "default_factory" in options else options.get("default", "")


def constructor(fields: Sequence[Field]) -> str:
    """Return the signature of the constructor that takes these fields, or an empty text without fields."""
    by_place = [field.text for field in fields if not field.kw_only]
    by_name = [field.text for field in fields if field.kw_only]
    star = ["*"] if by_name else []
    return f"({', '.join([*by_place, *star, *by_name])})" if fields else ""
