"""The definitions of a Python file: functions, classes, attributes, constants, and those inside them."""

import ast
import inspect
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from repopages.reading.model import Item
from repopages.reading.python_source import Function, Source, constant_text

_CONSTANT = re.compile(r"_*[A-Z][A-Z0-9_]*$")
_ENUM = re.compile(r"(Enum|Flag|EnumType)$")
_ERROR = re.compile(r"(Error|Exception|Warning|ExceptionGroup|Interrupt|SystemExit|Stop(Async)?Iteration)$")
_RECORD = re.compile(r"(^|\.)(dataclass|define|frozen|mutable|attr\.s|attrs)(\(|$)")
_PROPERTY = re.compile(r"(^|\.|_)(\w*property|setter|getter|deleter)(\(|$)")
_TYPES = ("TypeVar", "ParamSpec", "TypeVarTuple", "NewType")
_ASSIGNED = (ast.Assign, ast.AnnAssign, *([ast.TypeAlias] if hasattr(ast, "TypeAlias") else []))


def items(source: Source) -> tuple[Item, ...]:
    """Return the definitions of a file, each with those inside it, in the order of the file."""
    return _Reader(source).inside(source.tree.body, "module")


class _Reader:
    """Makes items of statements.

    Args:
        source: The file.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._classes = {node.name: node for node in source.of(ast.ClassDef)}
        # Docstrings that are set later, as in `Adam.__doc__ = "..." + _params_doc`.
        self._docs = {
            target.value.id: _clean(constant_text(value))
            for _, targets, value in source.assignments()
            for target in targets
            if isinstance(target, ast.Attribute)
            and target.attr == "__doc__"
            and isinstance(target.value, ast.Name)
            and not isinstance(value, ast.Attribute | ast.Name)
        }

    def inside(self, body: list[ast.stmt], place: str) -> tuple[Item, ...]:
        """Return the definitions in the body of a module, class, enum or function, one for each name."""
        found: list[Item] = []
        for node, below in _flat(body):
            if isinstance(node, Function):
                found.append(self._function(node, place))
            elif isinstance(node, ast.ClassDef):
                found.append(self._class(node))
            elif isinstance(node, _ASSIGNED):
                found += self._assigned(node, below, place)
        if place == "function":  # users cannot reach what is inside one
            found = [replace(item, public=False) for item in found]
        return _united(found)

    def _function(self, node: Function, place: str) -> Item:
        source, is_method = self._source, place in ("class", "enum")
        decorators = tuple(source.written(decorator) for decorator in node.decorator_list)
        is_static = any(decorator.endswith("staticmethod") for decorator in decorators)
        signature, names = self._signature(node.args, drop_first=is_method and not is_static)
        returns = source.written(node.returns)
        is_property = is_method and any(_PROPERTY.search(decorator) for decorator in decorators)
        above = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        return Item(
            name=node.name,
            kind="property" if is_property else "method" if is_method else "function",
            signature=returns if is_property else f"{signature} -> {returns}" if returns else signature,
            doc=_docstring(node) or self._docs.get(node.name) or source.comment(above),
            line=node.lineno,
            end=node.end_lineno or node.lineno,
            parameters=names,
            members=self.inside(node.body, "function"),
            decorators=decorators,
            public=_is_public(node.name),
        )

    def _signature(self, args: ast.arguments, *, drop_first: bool) -> tuple[str, tuple[str, ...]]:
        """Return the parameters as written and their names, for methods without the first."""
        placed = [*args.posonlyargs, *args.args]
        defaults = [None] * (len(placed) - len(args.defaults)) + list(args.defaults)
        parts = [
            self._parameter(argument, default) for argument, default in zip(placed, defaults, strict=True)
        ]
        if args.posonlyargs:
            parts.insert(len(args.posonlyargs), "/")
        if drop_first and placed:
            placed, parts = placed[1:], parts[2:] if parts[1:2] == ["/"] else parts[1:]
        if args.vararg or args.kwonlyargs:
            parts.append(f"*{self._parameter(args.vararg, None) if args.vararg else ''}")
        parts += [self._parameter(*pair) for pair in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
        if args.kwarg:
            parts.append(f"**{self._parameter(args.kwarg, None)}")
        more = [argument for argument in (args.vararg, *args.kwonlyargs, args.kwarg) if argument]
        return f"({', '.join(parts)})", tuple(argument.arg for argument in [*placed, *more])

    def _parameter(self, argument: ast.arg, default: ast.expr | None) -> str:
        return _declared(
            argument.arg, self._source.written(argument.annotation), self._source.written(default)
        )

    def _class(self, node: ast.ClassDef) -> Item:
        source, kind = self._source, self._kind(node)
        members = self.inside(node.body, "enum" if kind == "enum" else "class")
        decorators = tuple(source.written(decorator) for decorator in node.decorator_list)
        made = next((member for member in members if member.name in ("__init__", "__new__")), None)
        fields = [] if made else self._fields(node)
        above = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        return Item(
            name=node.name,
            kind=kind,
            signature=made.signature.rpartition(" -> ")[0] or made.signature
            if made
            else _constructor(fields),
            doc=_docstring(node) or self._docs.get(node.name) or source.comment(above),
            line=node.lineno,
            end=node.end_lineno or node.lineno,
            parameters=made.parameters if made else tuple(name for name, _, _ in fields),
            members=_united([*members, *self._own_attributes(node)]),
            decorators=decorators,
            bases=tuple(
                source.written(base) for base in [*node.bases, *(word.value for word in node.keywords)]
            ),
            public=_is_public(node.name),
        )

    def _kind(self, node: ast.ClassDef, depth: int = 0) -> str:
        """Return "enum", "exception" or "class", by the bases as far as the file defines them."""
        for base in node.bases:
            name = self._source.dotted(base)
            known = self._classes.get(name)
            if known is not None and known is not node and depth < 20:
                if (kind := self._kind(known, depth + 1)) != "class":
                    return kind
            elif _ENUM.search(name):
                return "enum"
            elif _ERROR.search(name):
                return "exception"
        return "class"

    def _fields(self, node: ast.ClassDef, depth: int = 0) -> list[tuple[str, str, bool]]:
        """Return (name, parameter, keyword only) of what the constructor of a data class takes.

        Fields of its bases are included as far as the file defines them.
        """
        source = self._source
        how = next(
            (text for decorator in node.decorator_list if _RECORD.search(text := source.written(decorator))),
            None,
        )
        if how is None and not any(source.dotted(base).endswith("NamedTuple") for base in node.bases):
            return []
        bases = [self._classes.get(source.dotted(base)) for base in reversed(node.bases)]
        known = [base for base in bases if base is not None and base is not node and depth < 20]
        fields = {field[0]: field for base in known for field in self._fields(base, depth + 1)}
        by_name = "kw_only=True" in (how or "").replace(" ", "")
        for child in node.body:
            kind = source.written(child.annotation) if isinstance(child, ast.AnnAssign) else ""
            if kind.rpartition(".")[2] == "KW_ONLY":
                by_name = True
            elif isinstance(child, ast.AnnAssign) and "ClassVar" not in kind:
                name, options = source.written(child.target), _options(source, child.value)
                if options.get("init") != "False":
                    only = by_name or options.get("kw_only") == "True"
                    fields[name] = (name, _declared(name, kind, options.get("default", "")), only)
        return list(fields.values())

    def _own_attributes(self, node: ast.ClassDef) -> Iterator[Item]:
        """Yield attributes that methods set on `self`."""
        for method, _ in _flat(node.body):
            arguments = [*method.args.posonlyargs, *method.args.args] if isinstance(method, Function) else []
            if not isinstance(method, Function) or not arguments:
                continue
            own = arguments[0].arg
            for child, below in _flat(method.body):
                if isinstance(child, ast.Assign | ast.AnnAssign):
                    for target in _targets(child):
                        if isinstance(target, ast.Attribute) and self._source.dotted(target.value) == own:
                            yield self._value(target.attr, child, below, "attribute")

    def _assigned(self, node: ast.stmt, below: str, place: str) -> Iterator[Item]:
        value = getattr(node, "value", None)
        for target in _targets(node):
            name = target.id if isinstance(target, ast.Name) else ""
            if name in ("", "__all__", "__slots__", "__doc__"):
                continue
            if isinstance(value, ast.Lambda):
                yield self._lambda(
                    name, value, node, below, "function" if place in ("module", "function") else "method"
                )
            elif place == "enum" and not re.fullmatch(r"_\w*_", name):
                yield self._value(name, node, below, "member" if value is not None else "attribute")
            elif place == "class":
                yield self._value(name, node, below, "attribute")
            elif place == "module":
                item = self._value(name, node, below, self._value_kind(name, node))
                yield self._called(item, value) if isinstance(value, ast.Call) else item

    def _value(self, name: str, node: ast.stmt, below: str, kind: str) -> Item:
        source, value = self._source, getattr(node, "value", None)
        return Item(
            name=name,
            kind=kind,
            signature=source.written(getattr(node, "annotation", None)),
            doc=below or _given_doc(value) or source.comment(node.lineno, node),
            line=node.lineno,
            end=node.end_lineno or node.lineno,
            value=source.evidence(value) if value is not None else "",
            public=_is_public(name),
        )

    def _value_kind(self, name: str, node: ast.stmt) -> str:
        kind = self._source.written(getattr(node, "annotation", None))
        value = getattr(node, "value", None)
        called = self._source.dotted(value.func) if isinstance(value, ast.Call) else ""
        if not isinstance(node, ast.Assign | ast.AnnAssign) or kind.endswith("TypeAlias"):
            return "type"
        if called.rpartition(".")[2] in _TYPES:
            return "type"
        return "constant" if _CONSTANT.match(name) or re.match(r"(\w+\.)?Final\b", kind) else "variable"

    def _lambda(self, name: str, value: ast.Lambda, node: ast.stmt, below: str, kind: str) -> Item:
        signature, names = self._signature(value.args, drop_first=kind == "method")
        item = self._value(name, node, below, kind)
        return replace(item, signature=signature, parameters=names)

    def _called(self, item: Item, value: ast.Call) -> Item:
        """Return the class that `namedtuple("Point", "x y")` or `Enum("Color", "RED")` makes, or the item."""
        call = self._source.dotted(value.func)
        is_enum, is_tuple = bool(_ENUM.search(call)), call.rpartition(".")[2] in ("namedtuple", "NamedTuple")
        if len(value.args) < 2 or not (is_enum or is_tuple):
            return item
        names, kind = _listed(value.args[1]), "member" if is_enum else "attribute"
        members = tuple(Item(name=name, kind=kind, line=value.lineno, end=value.lineno) for name in names)
        if is_enum:
            return replace(item, kind="enum", members=members, bases=(call,))
        signature = f"({', '.join(names)})"
        return replace(
            item, kind="class", members=members, bases=(call,), signature=signature, parameters=tuple(names)
        )


def _listed(node: ast.expr) -> list[str]:
    """Return the names in `"x y"`, `["x", "y"]`, `[("x", int)]` or `{"x": 1}`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.replace(",", " ").split()
    elements = node.elts if isinstance(node, ast.List | ast.Tuple) else getattr(node, "keys", [])
    firsts = [
        element.elts[0] if isinstance(element, ast.Tuple) and element.elts else element
        for element in elements
    ]
    return [str(first.value) for first in firsts if isinstance(first, ast.Constant)]


def _flat(body: list[ast.stmt]) -> Iterator[tuple[ast.stmt, str]]:
    """Yield statements, also inside `if`, `try`, `with`, `match` and loops, with the text below each."""
    for node, below in itertools.zip_longest(body, body[1:]):
        blocks = [getattr(node, part, []) for part in ("body", "orelse", "finalbody")]
        inner = [*getattr(node, "handlers", []), *getattr(node, "cases", [])]
        if isinstance(node, Function | ast.ClassDef) or not (any(blocks) or inner):
            text = below.value if isinstance(below, ast.Expr) else None
            doc = text.value if isinstance(text, ast.Constant) else None
            yield node, _clean(doc) if isinstance(doc, str) else ""
        else:
            first, *rest = blocks
            for block in [first, *(part.body for part in inner), *rest]:
                yield from _flat(block)


def _targets(node: ast.stmt) -> Iterator[ast.expr]:
    """Yield what is assigned to, each part of a tuple by itself."""
    single = getattr(node, "target", getattr(node, "name", None))  # the name of `type X = ...`
    for target in node.targets if isinstance(node, ast.Assign) else [single]:
        if isinstance(target, ast.Tuple | ast.List):
            yield from target.elts
        elif isinstance(target, ast.expr):
            yield target


def _united(found: Iterable[Item]) -> tuple[Item, ...]:
    """Return one item for each name: overloads, setters and the branches of an `if` belong together."""
    by_name: dict[str, Item] = {}
    for item in found:
        known = by_name.get(item.name)
        by_name[item.name] = item if known is None else _one_of(known, item)
    return tuple(by_name.values())


def _one_of(first: Item, second: Item) -> Item:
    ranks = [_rank(item) for item in (first, second)]
    kept, other = (first, second) if ranks[0] >= ranks[1] else (second, first)
    return replace(
        kept,
        doc=kept.doc or other.doc,
        signature=kept.signature or other.signature,
        members=_united([*kept.members, *other.members]),
    )


def _rank(item: Item) -> tuple[bool, bool, bool]:
    """Return how much an item says: what is called before a value, an implementation before its overloads."""
    is_overload = any(decorator.rpartition(".")[2] == "overload" for decorator in item.decorators)
    is_value = item.kind in ("variable", "constant", "attribute")
    return not is_value, not is_overload, bool(item.doc)


def _docstring(node: Function | ast.ClassDef) -> str:
    """Return the docstring of a definition, also one that a class builds as `__doc__ = ...`."""
    doc = ast.get_docstring(node)
    if doc is None and isinstance(node, ast.ClassDef):
        for child in node.body:
            named = isinstance(child, ast.Assign) and isinstance(child.targets[0], ast.Name)
            if isinstance(child, ast.Assign) and named and ast.unparse(child.targets[0]) == "__doc__":
                return _clean(constant_text(child.value))
    return doc or ""


def _clean(text: str) -> str:
    return inspect.cleandoc(text).strip()


def _given_doc(value: ast.expr | None) -> str:
    """Return the text of `f = add_docstr(g, "...")`, by which C functions get theirs."""
    name = value.func if isinstance(value, ast.Call) else None
    called = getattr(name, "id", getattr(name, "attr", ""))
    if isinstance(value, ast.Call) and called.endswith("add_docstr") and len(value.args) > 1:
        return _clean(constant_text(value.args[1]))
    return ""


def _is_public(name: str) -> bool:
    return not name.startswith("_") or (name.startswith("__") and name.endswith("__"))


def _declared(name: str, kind: str, default: str) -> str:
    """Return a parameter as PEP 8 writes it: spaces around `=` only if it has a type."""
    if kind:
        return f"{name}: {kind} = {default}" if default else f"{name}: {kind}"
    return f"{name}={default}" if default else name


def _options(source: Source, value: ast.expr | None) -> dict[str, str]:
    """Return a field's options, with its default as a caller sees it instead of `field(...)`."""
    called = source.dotted(value.func).rpartition(".")[2] if isinstance(value, ast.Call) else ""
    if not isinstance(value, ast.Call) or called not in ("field", "ib", "attrib", "Factory"):
        return {"default": source.written(value)}
    options = {word.arg or "": source.written(word.value) for word in value.keywords}
    factory = options.get("default_factory") or options.get("factory")
    return {**options, "default": f"{factory}()" if factory else options.get("default", "")}


def _constructor(fields: list[tuple[str, str, bool]]) -> str:
    """Return the signature of the constructor that takes these fields, or an empty text without fields."""
    by_place = [text for _, text, only in fields if not only]
    by_name = [text for _, text, only in fields if only]
    star = ["*"] if by_name else []
    return f"({', '.join([*by_place, *star, *by_name])})" if fields else ""
