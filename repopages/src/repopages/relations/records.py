"""Signatures of data classes whose bases are in other files, which take the fields of the bases too."""

import ast
import re
from collections.abc import Mapping
from dataclasses import replace

from repopages.reading.model import Facts, Item
from repopages.relations.python import Modules

_RECORD = re.compile(r"(^|\.)(dataclass|define|frozen|mutable|attr\.s|attrs)(\(|$)")
_DEEPEST = 8

_Fields = dict[str, tuple[str, bool]]
"""The text of each field as a parameter, and whether it is taken by keyword only."""


def with_inherited_fields(files: Mapping[str, Facts], prefix: str) -> dict[str, Facts]:
    """Return the facts of all files, in which data classes have the whole signatures of their constructors.

    Args:
        files: Facts of all files, by path.
        prefix: Dotted name of the package that the root is, empty if it is none.
    """
    modules = Modules(files, prefix)
    found = dict(files)
    for path in modules.names:
        items = [_completed(modules, path, item) for item in files[path].items]
        if any(new is not old for new, old in zip(items, files[path].items, strict=True)):
            found[path] = replace(files[path], items=tuple(items))
    return found


def _completed(modules: Modules, path: str, item: Item) -> Item:
    if not item.bases or not _is_record(item):
        return item
    own, whole = _fields(item), _all_fields(modules, path, item, _DEEPEST)
    if list(whole) == list(own):
        return item
    ordered = sorted(whole, key=lambda name: whole[name][1])
    by_place = [whole[name][0] for name in ordered if not whole[name][1]]
    by_name = [whole[name][0] for name in ordered if whole[name][1]]
    texts = [*by_place, *(["*"] if by_name else []), *by_name]
    return replace(item, signature=f"({', '.join(texts)})", parameters=tuple(ordered))


def _all_fields(modules: Modules, path: str, item: Item, depth: int) -> _Fields:
    """Return the fields of a data class and of its bases, in the order of the constructor."""
    found: _Fields = {}
    # As in the MRO, fields of the first base replace those of later ones.
    for base in reversed(item.bases) if depth else ():
        behind = modules.resolve(path, base.partition("[")[0])
        if (
            behind is not None
            and behind.item is not None
            and behind.item is not item
            and _is_record(behind.item)
        ):
            found |= _all_fields(modules, behind.path, behind.item, depth - 1)
    return found | _fields(item)


def _is_record(item: Item) -> bool:
    written = any(member.name == "__init__" for member in item.members)
    return not written and any(_RECORD.search(decorator) for decorator in item.decorators)


def _fields(item: Item) -> _Fields:
    """Return the fields in the signature that the reader made from the class alone."""
    try:
        tree = ast.parse(f"def f{item.signature or '()'}: ...").body[0]
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # a default that was cut
        return {}
    if not isinstance(tree, ast.FunctionDef):
        return {}
    args, found = tree.args, dict[str, tuple[str, bool]]()
    defaults = [None] * (len(args.args) - len(args.defaults)) + list(args.defaults)
    for arg, default in zip(args.args, defaults, strict=True):
        found[arg.arg] = (_text(arg, default), False)
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        found[arg.arg] = (_text(arg, default), True)
    return found


def _text(arg: ast.arg, default: ast.expr | None) -> str:
    kind = f": {ast.unparse(arg.annotation)}" if arg.annotation else ""
    equals = " = " if kind else "="
    return f"{arg.arg}{kind}{f'{equals}{ast.unparse(default)}' if default else ''}"
