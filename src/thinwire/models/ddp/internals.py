"""The private calls into DistributedDataParallel, its reducer and dynamo, in one place.

| name | purpose | since |
|---|---|---|
| `DDP._comm_hooks`, `_use_python_reducer`, `_join_config` | how a model is set up | 2.6 |
| `DDP._active_ddp_module` | the model whose forward runs | 2.6 |
| `DDP.parameters_to_ignore` | the tensors that DDP leaves out | 2.6 |
| `DDP._setup_in_backward_optimizers` | replaced where thinwire runs the optimizers | 2.6 |
| `DDP._has_rebuilt_buckets`, `Reducer._rebuild_buckets` | the final layout of buckets | 2.6 |
| `Reducer._get_zeros_like_grad_buckets` | the present layout of buckets | 2.6 |
| `DDP._get_ddp_logging_data` | the number of parameters in the buckets | 2.6 |
| `Reducer._get_local_used_map` | the unused parameters | 2.6 |
| `DDP.require_manual_backward_finalization` | public, see `finalizes_manually` | 2.15 |
| `Parameter._fp_param`, `_mp_param`, `_ddp_mp_hook_state`, `_ddp_ignored` | DDP's mixed precision | 2.6 |
| `distributed.utils._free_storage` | frees a low-precision copy | 2.6 |
| `Parameter._in_backward_optimizers` | the optimizers that step a parameter in backward | 2.6 |
| `distributed._functional_collectives.all_reduce` | a collective that dynamo can trace | 2.6 |
| `_dynamo_marked_constant`, `torch._dynamo` | hooks that dynamo traces | 2.6 |

Since: the oldest inspected version that has it. All but one are in 2.6, 2.9, 2.13 and 2.15. `private` reads
    them. It raises UnavailableError with the version instead of an AttributeError later.
"""

import importlib
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from thinwire.step.autograd import queue_callback
from thinwire.version import private

_IN_BACKWARD = "_in_backward_optimizers"
_MIXED_PRECISION_HOOK = "_ddp_mp_hook_state"


def after_ddp_finishes(callback: Callable[[], None]) -> None:
    """Run `callback` after DDP's own final callback, which writes the gradients.

    DDP queues its final callback after the hook of its last bucket. A callback that is queued by a queued one
    runs after it.
    """
    queue_callback(lambda: queue_callback(callback))


def comm_hooks(ddp: DistributedDataParallel) -> list[Callable[..., Any]]:
    """Return the communication hooks registered on a model. DDP accepts one, and never removes it."""
    return [hook for hook, _ in private(ddp, "_comm_hooks")]


def has_comm_hook(ddp: DistributedDataParallel) -> bool:
    """Return whether a model, which may still be under construction, has a communication hook."""
    return bool(getattr(ddp, "_comm_hooks", None))


def bucket_bytes(ddp: DistributedDataParallel) -> int:
    """Return the size of a model's buckets, which its argument `bucket_cap_mb` sets."""
    return int(private(ddp, "bucket_bytes_cap"))


def ignored_names(ddp: DistributedDataParallel) -> set[str]:
    """Return the names of parameters and buffers that DDP is configured to ignore."""
    return set(private(ddp, "parameters_to_ignore"))


def skip_in_backward_set_up(ddp: DistributedDataParallel) -> None:
    """Keep DDP from registering its own hook for optimizers in backward, in its first forward."""
    private(ddp, "_setup_in_backward_optimizers")
    ddp._setup_in_backward_optimizers = lambda: None  # type: ignore[method-assign]


def lookup_name(name: str) -> str:
    """Return the name under which DDP looks up whether to ignore a parameter.

    Parameters of the root module are named ".scale" there, not "scale".
    """
    return name if "." in name else f".{name}"


def uses_python_reducer(ddp: DistributedDataParallel) -> bool:
    """Return whether compiled autograd's Python reducer, which has no buckets, replaces DDP's own."""
    return bool(private(ddp, "_use_python_reducer"))


def joins(ddp: DistributedDataParallel) -> bool:
    """Return whether the model runs inside torch's Join context, where ranks may run out of inputs."""
    return bool(private(ddp, "_join_config").enable)


def finalizes_manually(ddp: DistributedDataParallel) -> bool:
    """Return whether the caller writes the gradients with `ddp.finalize_backward()`; False before torch 2.15.

    Then DDP queues no final callback, and gradients are written some time after backward has returned. The
    NaNs of an overflow, which keep optimizers from stepping, would be overwritten, so it raises. The option
    may be set at any time, so each step checks it.
    """
    return bool(getattr(ddp, "require_manual_backward_finalization", False))


def has_rebuilt_buckets(ddp: DistributedDataParallel) -> bool:
    """Return whether DDP has its final buckets; it rebuilds them once, in the second forward."""
    return bool(private(ddp, "_has_rebuilt_buckets"))


def rebuild_buckets(ddp: DistributedDataParallel) -> list[dist.GradBucket] | None:
    """Lay out DDP's final buckets now instead of in its next forward.

    Every rank must call it at the same point.

    Returns:
        The buckets, or None if they are final already.
    """
    if not private(ddp.reducer, "_rebuild_buckets")():
        return None
    ddp._has_rebuilt_buckets = True
    buckets: list[dist.GradBucket] = private(ddp.reducer, "_get_zeros_like_grad_buckets")()
    return buckets


def reduced_parameters(ddp: DistributedDataParallel) -> set[int]:
    """Return the `id` of each parameter in DDP's own list, which has those that trained when DDP was made.

    The present `requires_grad` may differ, because a layer that was frozen since is still in DDP's buckets.
    Calling this function inside a hook deadlocks, because DDP holds the lock that listing its buckets takes.
    """
    buckets = private(ddp.reducer, "_get_zeros_like_grad_buckets")()
    return {id(parameter) for bucket in buckets for parameter in bucket.parameters()}


def reduced_count(ddp: DistributedDataParallel) -> int:
    """Return the number of parameters in DDP's own list, without making buffers of the buckets' sizes."""
    return int(private(ddp, "_get_ddp_logging_data")()["num_parameter_tensors"])


def use_counts(ddp: DistributedDataParallel) -> torch.Tensor:
    """Return how many ranks used each trained parameter in the last backward, in DDP's own order.

    Valid after backward, under find_unused_parameters or static_graph. DDP has then summed the counts over
    all ranks. They are on the model's device.
    """
    counts: torch.Tensor = private(ddp.reducer, "_get_local_used_map")()
    return counts


# Optimizers in backward


def in_backward_optimizers(parameter: torch.Tensor) -> list[Optimizer]:
    """Return the optimizers that step a parameter as soon as its gradient is reduced."""
    return list(getattr(parameter, _IN_BACKWARD, ()))


def steps_in_backward(parameter: torch.Tensor) -> bool:
    """Return whether a parameter has optimizers that step in backward."""
    return hasattr(parameter, _IN_BACKWARD)


# DDP's mixed precision: each parameter holds its full and its low precision


def to_full_precision(parameter: Any) -> None:
    """Restore a parameter to its full precision."""
    parameter.data = private(parameter, "_fp_param")


def free_low_precision(parameter: Any) -> None:
    """Free the storage of a parameter's low-precision copy."""
    from torch.distributed import utils

    private(utils, "_free_storage")(private(parameter, "_mp_param"))


def remove_mixed_precision_hook(parameter: Any) -> None:
    """Remove the hook of this backward that DDP's mixed precision has set on a parameter, if any."""
    state = getattr(parameter, _MIXED_PRECISION_HOOK, None)
    if state is not None:
        state[1].remove()
        delattr(parameter, _MIXED_PRECISION_HOOK)


def is_ignored(parameter: torch.Tensor) -> bool:
    """Return whether DDP's mixed precision leaves a parameter as it is."""
    return hasattr(parameter, "_ddp_ignored")


# Dynamo


def traced_sum(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the sum of a tensor over a group, by a collective that dynamo can trace."""
    from torch.distributed._functional_collectives import all_reduce  # slow to import (70 ms), rarely needed

    total: torch.Tensor = all_reduce(tensor, "sum", group)
    return total


def mark_constant(function: Any) -> None:
    """Make dynamo treat a function's result as a constant.

    It is the same as torch.compiler.assume_constant_result, which would import dynamo and take seconds.
    """
    function._dynamo_marked_constant = True


def import_dynamo() -> None:
    """Import dynamo now, which DDP imports on first use."""
    importlib.import_module("torch._dynamo")


# replicate

_REPLICATE = "torch.distributed._composable.replicate"
_replicated: "weakref.WeakKeyDictionary[DistributedDataParallel, weakref.ref[torch.nn.Module]]" = (
    weakref.WeakKeyDictionary()
)
"""The modules of the DDP models that `replicate` has made."""


def replicated(module: torch.nn.Module) -> DistributedDataParallel | None:
    """Return the DDP model that `replicate` keeps for a module, or None if it was not replicated.

    `replicate` makes it in the first forward. This makes it now, which is collective.
    """
    imported = sys.modules.get(_REPLICATE)
    if imported is None or not isinstance(module, imported.DDP):
        return None
    state = private(imported.replicate, "state")(module)
    if not private(state, "has_initialized"):
        private(state, "lazy_init")()
    ddp: DistributedDataParallel = private(state, "_ddp")
    _replicated[ddp] = weakref.ref(module)
    return ddp


def surrounding_ddp(module: torch.nn.Module) -> DistributedDataParallel | None:
    """Return the DDP model in whose forward a module's forward begins, or None if there is none."""
    active: DistributedDataParallel | None = private(DistributedDataParallel, "_active_ddp_module")
    if active is not None and any(module is inner for inner in active.module.modules()):
        return active
    return replicated(module)


def wrapped_module(ddp: DistributedDataParallel) -> torch.nn.Module:
    """Return the user's module inside a DDP model.

    A DDP model of `replicate` holds a bare list of parameters, without names, buffers or a forward.
    """
    reference = _replicated.get(ddp)
    module = None if reference is None else reference()
    return ddp.module if module is None else module


def called_module(ddp: DistributedDataParallel) -> torch.nn.Module:
    """Return the module that the training loop calls, whose forward hooks run."""
    return wrapped_module(ddp) if ddp in _replicated else ddp
