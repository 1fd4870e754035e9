"""The private members of FSDP2 (`fully_shard`), in one place.

| name | purpose | since |
|---|---|---|
| `FSDPModule._get_fsdp_state`, `FSDPState._fsdp_param_groups` | the groups that FSDP reduces at once | 2.13 |
| `FSDPState._fsdp_param_group` | the same, in earlier versions, which have one group a module | 2.6 |
| `FSDPParamGroup.fsdp_params`, `FSDPParam.sharded_param` | the parameters of a group | 2.6 |
| `FSDPParamGroup._all_reduce_hook` | whether a hook is set already | 2.6 |
| `FSDPState._state_ctx` | whether the caller ends backward: `manual_backward_finalization` | 2.6, 2.15 |
| `Tensor._post_accumulate_grad_hooks` | optimizers that step in backward | 2.6 |

Since: the oldest version that was looked at and has it. Hooks are set by public methods.
"""

import sys
from typing import Any

import torch
from torch import nn

from thinwire.version import private

_FSDP = "torch.distributed.fsdp"


def is_sharded(module: object) -> bool:
    """Return whether `fully_shard` was called on a module, without importing FSDP."""
    imported = sys.modules.get(_FSDP)
    kind = None if imported is None else getattr(imported, "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


def sharded_modules(model: nn.Module) -> list[Any]:
    """Return the modules inside a model on which `fully_shard` was called, one for each of FSDP's states."""
    found = {id(private(each, "_get_fsdp_state")()): each for each in model.modules() if is_sharded(each)}
    return list(found.values())


def parameter_groups(module: Any) -> list[Any]:
    """Return the groups of a module, each of which FSDP reduces at once. Usually there is one."""
    state = private(module, "_get_fsdp_state")()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        only = private(state, "_fsdp_param_group")
        groups = [] if only is None else [only]
    return [group for group in groups if private(group, "fsdp_params")]


def parameters_of(group: Any) -> list[nn.Parameter]:
    """Return the sharded parameters of a group, in the order in which FSDP reduces them."""
    return [private(held, "sharded_param") for held in private(group, "fsdp_params")]


def has_hook(group: Any) -> bool:
    """Return whether a group has an all-reduce hook. FSDP accepts one."""
    return private(group, "_all_reduce_hook") is not None


def finalizes_manually(model: nn.Module) -> bool:
    """Return whether the caller ends backward with `finalize_backward()`; False before torch 2.15.

    Then some gradients are reduced after backward has returned.
    """
    states = (private(module, "_get_fsdp_state")() for module in sharded_modules(model))
    contexts = (private(state, "_state_ctx") for state in states)
    return any(getattr(context, "manual_backward_finalization", False) for context in contexts)


def accumulation_hooks(parameter: torch.Tensor) -> int:
    """Return how many hooks run as soon as a parameter has its gradient, as optimizers in backward do."""
    return len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ())
