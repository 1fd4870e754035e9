"""The DDP model inside the wrappers of frameworks and `torch.compile`."""

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.errors import AttachError
from thinwire.models.ddp.internals import replicated

_INSIDE = ("_orig_mod", "_forward_module")
"""The submodules that hold the wrapped model: of torch.compile, and of Lightning Fabric."""

_FSDP1 = "FullyShardedDataParallel"
_WRAP = "wrap it with torch.nn.parallel.DistributedDataParallel(model) first"
_OTHERS = {
    _FSDP1: "FSDP1 shards flat parameters, which thinwire does not exchange: shard with"
    " FSDP2 instead, torch.distributed.fsdp.fully_shard(module, mesh=mesh['shard']), and compress between its"
    " replicas with thinwire.attach(model, program, replicas=mesh['replicate']); or use DDP, with"
    " thinwire.ZeRO() to shard the optimizer's state",
    "FSDPModule": "FSDP shards parameters, and this needs whole ones: use DDP, or thinwire.ZeRO() on DDP to"
    " shard the optimizer's state; between replicas of an FSDP2 model, use thinwire.attach(model, program,"
    " replicas=mesh['replicate'])",
    "DeepSpeedEngine": "DeepSpeed exchanges gradients itself and calls no hook: use DDP, with thinwire.ZeRO()"
    " for its stage 1",
    "DataParallel": "DataParallel runs in one process and sends nothing: use DistributedDataParallel with one"
    " process for each device",
}
"""Wrappers that are not DDP, by class name, with the reason and the fix."""


def find_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """Return the DDP model inside a model as the training loop holds it, or None if there is none.

    Wrappers of `torch.compile` and of Lightning Fabric are unwrapped. A module on which
    `torch.distributed._composable.replicate` was called has a separate DDP model. Unless a forward has run,
    this call makes it, and every rank must then call it at the same point.

    Args:
        model: A DDP model, or a wrapper around one.
    """
    inner: object = model
    while isinstance(inner, nn.Module) and not isinstance(inner, DistributedDataParallel):
        made = replicated(inner)
        if made is not None:
            return made
        held = dict(inner.named_children())
        inner = next((held[name] for name in _INSIDE if held.get(name) is not None), None)
    return inner if isinstance(inner, DistributedDataParallel) else None


def ddp_of(model: nn.Module) -> DistributedDataParallel:
    """Return the DDP model inside a model as the training loop holds it, as `find_ddp` does.

    Raises:
        AttachError: There is no DDP model inside.
    """
    ddp = find_ddp(model)
    if ddp is not None:
        return ddp
    raise AttachError(
        f"attach needs a DistributedDataParallel model, not a {type(model).__name__}: {_why(model)}"
    )


def is_wrapper(model: object) -> bool:
    """Return whether a model is a wrapper or shard, and not a module that a rank could train on its own."""
    return not isinstance(model, nn.Module) or _why(model) != _WRAP


def _why(model: object) -> str:
    for kind in type(model).__mro__:
        if kind.__name__ in _OTHERS:
            return _OTHERS[kind.__name__]
    if isinstance(model, nn.Module) and any(type(inner).__name__ == _FSDP1 for inner in model.modules()):
        return f"a module in it is sharded: {_OTHERS[_FSDP1]}"
    if isinstance(model, nn.Module) and any(hasattr(each, "device_mesh") for each in model.parameters()):
        return "its parameters are DTensors of a device mesh, which thinwire does not exchange: use plain DDP"
    return _WRAP
