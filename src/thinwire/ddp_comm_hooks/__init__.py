"""Drop-in replacement for `torch.distributed.algorithms.ddp_comm_hooks`: only the import prefix changes."""

import sys
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from thinwire.ddp_comm_hooks import debugging_hooks as debugging
from thinwire.ddp_comm_hooks import default_hooks as default
from thinwire.ddp_comm_hooks import mixed_precision_hooks  # noqa: F401 - a submodule, as in torch
from thinwire.ddp_comm_hooks import optimizer_overlap_hooks as optimizer_overlap  # noqa: F401 - torch's alias
from thinwire.ddp_comm_hooks import powerSGD_hook as powerSGD
from thinwire.ddp_comm_hooks import quantization_hooks as quantization

__all__ = ["DDPCommHookType", "register_ddp_comm_hook"]


def __dir__() -> list[str]:
    return sorted(__all__)


def _member(value: Any) -> Any:
    """Mark a callable value as an enum member, which Python 3.11 requires and 3.10 does not support."""
    if sys.version_info >= (3, 11):
        from enum import member

        return member(value)
    return value


def _register(comm_hook: Callable[..., Any], model: DistributedDataParallel, state: Any) -> None:
    model.register_comm_hook(state, comm_hook)


def _power(comm_hook: Callable[..., Any], model: DistributedDataParallel, state: Any, rank: int) -> None:
    """Register a PowerSGD hook with a state made from the process group `state`."""
    made = powerSGD.PowerSGDState(process_group=state, matrix_approximation_rank=rank)
    model.register_comm_hook(made, comm_hook)


class DDPCommHookType(Enum):
    """Communication hooks by name. Call a member's value with `model` and `state` to register its hook."""

    ALLREDUCE = _member(partial(_register, comm_hook=default.allreduce_hook))
    FP16_COMPRESS = _member(partial(_register, comm_hook=default.fp16_compress_hook))
    BF16_COMPRESS = _member(partial(_register, comm_hook=default.bf16_compress_hook))
    QUANTIZE_PER_TENSOR = _member(partial(_register, comm_hook=quantization.quantization_pertensor_hook))
    QUANTIZE_PER_CHANNEL = _member(partial(_register, comm_hook=quantization.quantization_perchannel_hook))
    POWER_SGD = _member(partial(_power, comm_hook=powerSGD.powerSGD_hook, rank=1))
    POWER_SGD_RANK2 = _member(partial(_power, comm_hook=powerSGD.powerSGD_hook, rank=2))
    BATCHED_POWER_SGD = _member(partial(_power, comm_hook=powerSGD.batched_powerSGD_hook, rank=1))
    BATCHED_POWER_SGD_RANK2 = _member(partial(_power, comm_hook=powerSGD.batched_powerSGD_hook, rank=2))
    NOOP = _member(partial(_register, comm_hook=debugging.noop_hook))


def register_ddp_comm_hook(
    comm_hook_type: DDPCommHookType, model: DistributedDataParallel, state: Any = None
) -> None:
    """Register a hook on a DDP model by its name.

    Args:
        comm_hook_type: Name of the hook.
        model: DDP model to register it on.
        state: Process group to average over. None is the DDP model's own.

    Example::

        register_ddp_comm_hook(DDPCommHookType.BF16_COMPRESS, ddp)
    """
    comm_hook_type.value(model=model, state=state)
