"""Errors of DDP's hooks on a model of FSDP1, which accepts hooks too and calls them with tensors."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from thinwire.errors import UnavailableError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def for_ddp(hook: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Make a hook raise UnavailableError if FSDP1 calls it.

    FSDP1 accepts any callable as a hook. It calls it with a flat gradient instead of a bucket and, where it
    shards, with a third argument for the reduced shard.

    Args:
        hook: A hook for `DistributedDataParallel.register_comm_hook`.

    Returns:
        The hook, with the same name and signature.
    """

    @functools.wraps(hook)
    def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if len(args) > 1 and isinstance(args[1], torch.Tensor):
            raise UnavailableError(
                f"{hook.__name__} takes DDP's buckets, and FSDP1 (FullyShardedDataParallel) called it with a"
                " flat gradient: register a hook that torch has for FSDP1, of"
                " torch.distributed.algorithms._comm_hooks.default_hooks; or shard with FSDP2,"
                " fully_shard(module, mesh=mesh['shard']), and compress between replicas with"
                " thinwire.attach(model, program, replicas=mesh['replicate'])"
            )
        return hook(*args, **kwargs)

    return checked
