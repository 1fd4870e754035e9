"""A user changes the import prefix and nothing else: names, signatures and defaults are torch's."""

import importlib
import inspect
import pydoc
import re
import subprocess
import sys
import warnings
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

import pytest
import torch

import thinwire
from thinwire.ddp_comm_hooks import DDPCommHookType

HOOKS = "algorithms.ddp_comm_hooks"
AVERAGING = "algorithms.model_averaging"
ARRIVED = [
    HOOKS,
    f"{HOOKS}.default_hooks",
    f"{HOOKS}.ddp_zero_hook",
    f"{HOOKS}.debugging_hooks",
    f"{HOOKS}.mixed_precision_hooks",
    f"{HOOKS}.optimizer_overlap_hooks",
    f"{HOOKS}.post_localSGD_hook",
    f"{HOOKS}.powerSGD_hook",
    f"{HOOKS}.quantization_hooks",
    AVERAGING,
    f"{AVERAGING}.averagers",
    f"{AVERAGING}.hierarchical_model_averager",
    f"{AVERAGING}.utils",
    "optim.post_localSGD_optimizer",
    "optim.zero_redundancy_optimizer",
]
"""The modules of torch.distributed that thinwire has so far."""

TORCHS_OWN = {
    "_quantize_per_tensor_backend",
    "_dequantize_per_tensor_backend",
    "_quantize_per_channel_backend",
    "_dequantize_per_channel_backend",
    "_get_allgather_out_list",
    "_OptimInBackwardHookState",
}
"""Helpers of torch's that thinwire does without: of an all-gather, and the state of a stream."""

TORCHS_METHODS = {
    "_clear_cache",
    "_verify_params_per_rank",
    "_partition_param_group",
    "_broadcast_params_from_rank",
    "_get_min_index",
    "_assign_bucket_subset_to_rank",
    "_build_ddp_param_buckets",
    "_verify_and_init_params",
    "_verify_same_dense_param_type",
    "_get_is_trainable_mask",
    "_init_local_optimizer",
    "_init_zero_for_overlap",
    "_get_assigned_rank",
    "_check_overlap_initialized",
    "_get_optimizer_constructor",
}
"""Helpers of torch's ZeroRedundancyOptimizer; what its users touch is checked."""


def pair(name: str) -> tuple[ModuleType, ModuleType]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's optim compiles with what torch itself has deprecated
        theirs = importlib.import_module(f"torch.distributed.{name}")
    return theirs, importlib.import_module(f"thinwire.{name.removeprefix('algorithms.')}")


def own_names(module: ModuleType) -> list[str]:
    """What the module offers: `__all__`, or for those without one, what is defined in it."""
    return getattr(module, "__all__", None) or [
        name
        for name, thing in vars(module).items()
        if getattr(thing, "__module__", "") == module.__name__ and name not in TORCHS_OWN
    ]


@pytest.mark.parametrize("module", ARRIVED)
def test_names(module: str) -> None:
    theirs, ours = pair(module)
    missing = [name for name in own_names(theirs) if not hasattr(ours, name)]
    assert not missing
    assert sorted(getattr(ours, "__all__", [])) == sorted(getattr(theirs, "__all__", []))


@pytest.mark.parametrize("module", ARRIVED)
def test_signatures(module: str) -> None:
    theirs, ours = pair(module)
    for name in own_names(theirs):
        their_thing, our_thing = getattr(theirs, name), getattr(ours, name)
        if inspect.isfunction(their_thing):
            check_signature(their_thing, our_thing, name)
        elif inspect.isclass(their_thing) and not issubclass(their_thing, Enum):
            check_class(their_thing, our_thing)


def check_signature(theirs: Any, ours: Any, name: str) -> None:
    """Ours takes what torch's takes; what it takes beyond has defaults."""
    expected, got = taken(theirs), taken(ours)
    assert got[: len(expected)] == expected, name
    assert all(default is not inspect.Parameter.empty for _, _, default in got[len(expected) :]), name


def taken(function: Any) -> list[tuple[str, Any, Any]]:
    """Names, kinds and defaults. Callers cannot use the name of `**kwargs`, which torch 2.13 has changed."""
    variadic = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return [
        ("" if one.kind in variadic else one.name, one.kind, one.default)
        for one in inspect.signature(function).parameters.values()
    ]


def check_class(theirs: type, ours: type) -> None:
    """Constructors, methods and slots are torch's, and what is abstract there is abstract here."""
    check_signature(theirs, ours, theirs.__name__)
    assert inspect.isabstract(ours) == inspect.isabstract(theirs)
    assert getattr(ours, "__slots__", None) == getattr(theirs, "__slots__", None)
    for name, method in vars(theirs).items():
        if inspect.isfunction(method) and not name.startswith("__") and name not in TORCHS_METHODS:
            check_signature(method, getattr(ours, name), f"{theirs.__name__}.{name}")


def test_classes_from_packages() -> None:
    """Where torch's package offers a class itself, ours does."""
    theirs, ours = pair("optim")
    assert set(ours.__all__) <= set(theirs.__all__)
    assert ours.PostLocalSGDOptimizer is pair("optim.post_localSGD_optimizer")[1].PostLocalSGDOptimizer
    assert issubclass(ours.PostLocalSGDOptimizer, torch.optim.Optimizer)
    zero = ours.ZeroRedundancyOptimizer
    assert zero is pair("optim.zero_redundancy_optimizer")[1].ZeroRedundancyOptimizer
    assert zero.__bases__ == theirs.ZeroRedundancyOptimizer.__bases__


def test_parts_of_the_zero_hooks() -> None:
    theirs, ours = pair(f"{HOOKS}.ddp_zero_hook")
    for name in (
        "_perform_local_step",
        "_broadcast_bucket",
        "_save_ddp_bucket_info",
        "_hook_with_zero_step_setup",
    ):
        expected, got = (
            list(inspect.signature(getattr(module, name)).parameters) for module in (theirs, ours)
        )
        assert got == expected, name
    theirs, ours = pair("optim.zero_redundancy_optimizer")
    assert [(one.name, one.value) for one in ours._OverlapStatus] == [
        (one.name, one.value) for one in theirs._OverlapStatus
    ]


def test_enum_members() -> None:
    theirs, _ = pair(HOOKS)
    assert [kind.name for kind in DDPCommHookType] == [kind.name for kind in theirs.DDPCommHookType]
    assert all(callable(kind.value) for kind in DDPCommHookType)


def test_hook_state_fields() -> None:
    theirs, ours = pair(f"{HOOKS}.mixed_precision_hooks")
    expected = [(f.name, f.default) for f in fields(theirs._AllreduceUpcastHookState)]
    assert [(f.name, f.default) for f in fields(ours._AllreduceUpcastHookState)] == expected


def test_package_aliases() -> None:
    theirs, ours = pair(HOOKS)
    aliases = {
        alias: module.__name__.rpartition(".")[2]
        for alias, module in vars(theirs).items()
        if inspect.ismodule(module) and module.__name__.startswith(f"{theirs.__name__}.")
    }
    assert aliases["optimizer_overlap"] == "optimizer_overlap_hooks"
    for alias, name in aliases.items():
        assert getattr(ours, alias) is importlib.import_module(f"{ours.__name__}.{name}")


def test_public_subpackages_come_with_the_first_use_and_not_before() -> None:
    script = """
import sys, thinwire
lazy = ["ddp_comm_hooks", "model_averaging", "optim", "telemetry", "testing"]
assert not [name for name in lazy if f"thinwire.{name}" in sys.modules]
assert set(lazy) <= set(dir(thinwire))
thinwire.telemetry.JsonLines, thinwire.testing.check_codec, thinwire.optim.ZeroRedundancyOptimizer
thinwire.ddp_comm_hooks.default_hooks.fp16_compress_hook, thinwire.model_averaging
try:
    thinwire.telemetri
except AttributeError as error:
    print(error)
"""
    command = [sys.executable, "-W", "ignore", "-c", script]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    assert process.stdout == "module 'thinwire' has no attribute 'telemetri'\n"


@pytest.mark.parametrize("way", [thinwire.LocalSGD, thinwire.Hierarchical, thinwire.DiLoCo])
def test_help_on_a_way_of_averaging_shows_inherited_options_too(way: Any) -> None:
    shown = inspect.getdoc(way) or ""
    assert [one.name for one in fields(way) if f"\n    {one.name}: " not in shown] == []


FREE_TEXT = {"checkpoint_id", "folder", "key", "path"}
RESULTS = {"AuditRecord", "Bucket", "StepRecord"}
"""Made by thinwire, and not by its users."""


def test_options_of_a_few_words_have_literal_types() -> None:
    """So that editors complete them, and type checkers refuse others."""
    public: dict[str, Any] = {
        name: getattr(module, name) for module in (thinwire, thinwire.telemetry) for name in module.__all__
    }
    options = [
        (name, option.name, option.annotation)
        for name, thing in public.items()
        if _has_options(thing) and name not in RESULTS
        for option in inspect.signature(thing).parameters.values()
        if option.name not in FREE_TEXT
    ]
    assert ("PowerSGD", "residual", Literal["mean", "sent"]) in options
    assert [(name, option) for name, option, kind in options if kind is str or str in get_args(kind)] == []


def _has_options(thing: Any) -> bool:
    return inspect.isfunction(thing) or is_dataclass(thing)


def test_public_names_exist_and_are_documented() -> None:
    assert sorted(thinwire.__all__) == sorted(set(thinwire.__all__))
    for name in thinwire.__all__:
        thing = getattr(thinwire, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert inspect.getdoc(thing), f"{name} has no docstring"


def test_public_names_are_in_the_order_of_the_api_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, flags=re.M) == thinwire.__all__


def test_help_begins_with_the_names_that_most_scripts_use() -> None:
    shown = pydoc.plain(pydoc.render_doc(thinwire)).partition("PACKAGE CONTENTS")[0]
    assert "thinwire.attach(ddp, thinwire.Int8()" in shown
    table = re.findall(r"^ {8}(\w+(?:, \w+)*)  ", shown, flags=re.M)
    names = [name for row in table for name in row.split(", ")]
    assert names[:2] == ["attach", "Wire"]
    assert sorted(names, key=thinwire.__all__.index) == names, "not in the order of `__all__`"


def test_dir_shows_public_names_only() -> None:
    shown = set(dir(thinwire))
    assert set(thinwire.__all__) <= shown
    assert not {name for name in shown if name.startswith("_") and name != "__version__"}
    assert not shown & {"engine", "ddp", "amp", "strategies", "programs", "codecs", "importlib", "wire"}


@pytest.mark.parametrize("name", ["ddp_comm_hooks", "optim", "telemetry", "testing"])
def test_dir_of_a_public_subpackage_shows_its_public_names_only(name: str) -> None:
    package = importlib.import_module(f"thinwire.{name}")
    assert dir(package) == sorted(package.__all__)
    assert all(hasattr(package, public) for public in dir(package))


def test_dir_of_model_averaging_shows_its_modules_only() -> None:
    shown = dir(importlib.import_module("thinwire.model_averaging"))
    assert shown == [module.rpartition(".")[2] for module in ARRIVED if module.startswith(f"{AVERAGING}.")]
