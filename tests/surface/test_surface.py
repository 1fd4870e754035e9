"""A user changes the import prefix and nothing else: names, signatures and defaults are torch's."""

import importlib
import inspect
from dataclasses import fields
from types import ModuleType

import pytest

import thinwire
from thinwire.ddp_comm_hooks import DDPCommHookType

ARRIVED = [
    "",
    ".default_hooks",
    ".debugging_hooks",
    ".mixed_precision_hooks",
    ".powerSGD_hook",
    ".quantization_hooks",
]
"""The modules of torch.distributed.algorithms.ddp_comm_hooks that thinwire has so far."""

TORCHS_OWN = {
    "_quantize_per_tensor_backend",
    "_dequantize_per_tensor_backend",
    "_quantize_per_channel_backend",
    "_dequantize_per_channel_backend",
    "_get_allgather_out_list",
}
"""Helpers of the all-gather in torch's quantization hooks, which thinwire does without."""


def pair(name: str) -> tuple[ModuleType, ModuleType]:
    return (
        importlib.import_module(f"torch.distributed.algorithms.ddp_comm_hooks{name}"),
        importlib.import_module(f"thinwire.ddp_comm_hooks{name}"),
    )


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
        if not inspect.isfunction(their_thing):
            continue
        expected = [(p.name, p.kind, p.default) for p in inspect.signature(their_thing).parameters.values()]
        got = [(p.name, p.kind, p.default) for p in inspect.signature(our_thing).parameters.values()]
        assert got[: len(expected)] == expected, name
        assert all(default is not inspect.Parameter.empty for _, _, default in got[len(expected) :]), name


def test_enum_members() -> None:
    theirs, _ = pair("")
    assert [kind.name for kind in DDPCommHookType] == [kind.name for kind in theirs.DDPCommHookType]
    assert all(callable(kind.value) for kind in DDPCommHookType)


def test_hook_state_fields() -> None:
    theirs, ours = pair(".mixed_precision_hooks")
    expected = [(f.name, f.default) for f in fields(theirs._AllreduceUpcastHookState)]
    assert [(f.name, f.default) for f in fields(ours._AllreduceUpcastHookState)] == expected


def test_package_aliases() -> None:
    _, ours = pair("")
    assert ours.default is ours.default_hooks
    assert ours.debugging is ours.debugging_hooks


def test_public_names_exist_and_are_documented() -> None:
    assert sorted(thinwire.__all__) == sorted(set(thinwire.__all__))
    for name in thinwire.__all__:
        thing = getattr(thinwire, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert inspect.getdoc(thing), f"{name} has no docstring"
