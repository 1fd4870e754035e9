"""docs/design/architecture.md describes the tree as it is."""

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "thinwire"
PAGE = (ROOT / "docs" / "design" / "architecture.md").read_text()
TREE = PAGE.split("```\nsrc/thinwire/\n")[1].split("```")[0]


def test_every_room_and_loose_module_is_on_the_page_and_nothing_else() -> None:
    top = re.findall(r"^  (\S.*?)(?:  |$)", TREE, flags=re.M)
    named = {name.strip().rstrip("/") for line in top for name in line.split(",")}
    rooms = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file()}
    loose = {path.name for path in SOURCE.glob("*.py")} - {"__init__.py", "__main__.py", "version.py"}
    assert named == rooms | loose


def test_every_file_that_the_page_names_exists() -> None:
    room = ""
    for line in TREE.splitlines():
        opened = re.match(r"  (\w+)/", line)
        room = opened[1] if opened else room if line.startswith("    ") else ""
        for name in re.findall(r"\b(\w+\.py)\b", line):
            assert list((SOURCE / room).rglob(name)), f"{name} is not in {room or 'the package'}"


def test_the_way_of_a_gradient_names_functions_that_exist() -> None:
    rows = re.findall(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", PAGE, flags=re.M)
    assert len(rows) >= 8
    for file, function in rows:
        tree = ast.parse((SOURCE / file).read_text())
        names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        assert set(function.split(".")) <= names, f"{file} has no {function}"


DOORS = {
    SOURCE / name
    for name in (
        "amp/internals.py",
        "engine/comm/process_group.py",
        "engine/foreach.py",
        "models/ddp/internals.py",
        "models/fsdp/internals.py",
        "step/autograd.py",
    )
}
"""The modules that may name private members of torch."""

_NOT_TORCHS = {
    "_getframe",  # of sys
    "_exit",  # of os
    "_fields",  # of named tuples
    "_from_",  # parts of the names of thinwire's own groups
    "_among_",
    "_written",  # attributes that thinwire sets on programs
    "_unsaid",
    "_ddp_comm_hook",  # of Lightning's strategy
    "_forward_module",  # of Fabric's wrappers
    "_orig_mod",  # part of the names that torch.compile gives to parameters
}


def _is_private(name: str) -> bool:
    return name.startswith("_") and name.isidentifier() and name != "_" and not name.startswith("__")


def _defined(tree: ast.Module) -> set[str]:
    """Private names that a module defines: functions, classes, variables, parameters and own attributes."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "view"):
                found.add(node.attr)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
    return {name for name in found if _is_private(name)}


def _mentioned(tree: ast.Module) -> Iterator[str]:
    """Private names that a module reads or writes, as attributes, strings or imports from torch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            yield from (node.module or "").split(".")
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names if alias.name.startswith("torch.")]
            yield from (part for name in imported for part in name.split("."))


TREES = {path: ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")}
OURS = {name for path, tree in TREES.items() if path not in DOORS for name in _defined(tree)} | _NOT_TORCHS
"""Private names that thinwire defines."""
BEHIND = {name for path in DOORS for name in _mentioned(TREES[path]) if _is_private(name)} - OURS
"""Private names that the doors give access to."""
TORCHS = {
    name
    for one in (GradScaler, DistributedDataParallel, torch.optim.Optimizer, torch.futures.Future)
    for name in _defined(ast.parse(inspect.getsource(sys.modules[one.__module__])))
}
"""Private names of the classes that thinwire works with, some of which it uses for attributes of its own."""


def _reaches_into_torch(tree: ast.Module) -> set[str]:
    """Private names of torch that a module mentions."""
    named, own = set(filter(_is_private, _mentioned(tree))), _defined(tree) | _NOT_TORCHS
    return {name for name in named if name not in OURS or name in BEHIND or name in TORCHS - own}


def test_private_torch_apis_stand_behind_doors() -> None:
    assert len(BEHIND) > 20, "the doors are empty"
    for path in TREES.keys() - DOORS:
        if path.parent.name == "integrations":  # private members there are the frameworks' own
            continue
        found = _reaches_into_torch(TREES[path])
        assert not found, f"{path.relative_to(SOURCE)} mentions {sorted(found)}: put it behind a door"


@pytest.mark.parametrize("door", sorted(DOORS), ids=lambda door: str(door.relative_to(SOURCE)))
def test_every_door_has_a_table_of_its_names_and_says_if_torch_lacks_one(door: Path) -> None:
    tree = ast.parse(door.read_text())
    table = ast.get_docstring(tree) or ""
    rows = re.findall(r"^\| (`.*`.*) \| .+ \| 2\.\d+ \|$", table, flags=re.M)
    assert rows, "no table"
    used = {name for name in _mentioned(tree) if _is_private(name)} - _defined(tree) - {"_C"}
    missing = {name for name in used if name not in table and not name.startswith("_optimizer_")}
    assert not missing, "names without a row"
    for node in ast.walk(tree):  # what is read goes through `private`, or getattr with a default
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and _is_private(node.attr):
            assert node.attr in {"_C"} | _defined(tree), f"{node.attr} is read without `private`"


@pytest.mark.parametrize(
    "line",
    [
        "scaler._growth_tracker.fill_(0)",
        "scaler._scale",
        "getattr(optimizer, '_optimizer_step_pre_hooks')",
        "from torch.distributed.utils import _free_storage",
        "from torch.distributed._functional_collectives import all_reduce",
        "import torch._dynamo",
        "tensor._version",
        "torch._C._current_graph_task_id()",
    ],
)
def test_the_scan_sees(line: str) -> None:
    assert _reaches_into_torch(ast.parse(line))
