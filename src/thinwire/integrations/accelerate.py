"""Hugging Face Accelerate: `attach` after `prepare`, state in `save_state`, clipping under `ZeRO`."""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from torch import nn
from torch.optim import Optimizer

from thinwire.attach import attach as attach_ddp
from thinwire.checkpoint.gather import GatheredState
from thinwire.errors import AttachError, OptionError
from thinwire.models.ddp.unwrap import ddp_of
from thinwire.step.strategy import Attachable
from thinwire.strategies.schedule import Schedule
from thinwire.strategies.zero.zero import ZeRO
from thinwire.wire import Wire

__all__ = ["attach"]

logger = logging.getLogger("thinwire")

_Tensors = torch.Tensor | Iterable[torch.Tensor]

_WITHOUT_DDP = {
    DistributedType.NO: "it has one process, and prepare() makes no DDP model: start the script with"
    " `torchrun --nproc-per-node 2` or more, or leave thinwire out with one process. (`accelerate launch"
    " --cpu` starts one, whatever --num_processes is)",
    DistributedType.FSDP: "FSDP shards parameters, and thinwire exchanges whole gradients: leave out"
    " fsdp_plugin, and use thinwire.ZeRO() to shard the optimizer's state. Replicas that you shard yourself"
    " with fully_shard, without Accelerate, work with thinwire.attach(..., replicas=mesh['replicate'])",
    DistributedType.DEEPSPEED: "DeepSpeed exchanges gradients itself and calls no hook: leave out"
    " deepspeed_plugin, and use thinwire.ZeRO() for its stage 1",
    DistributedType.MEGATRON_LM: "Megatron-LM exchanges gradients itself: leave out megatron_lm_plugin",
    DistributedType.XLA: "XLA devices have no DDP model: thinwire needs one",
}


def attach(
    accelerator: Accelerator,
    model: nn.Module,
    program: Attachable | Schedule,
    *,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    **options: Any,
) -> Wire:
    """Exchange the gradients, or models, of a prepared model with `program`. Call it on every process.

    `accelerator.save_state` then saves every rank's state of the wire, and of the optimizer where it differs
    from rank to rank. `accelerator.load_state` loads it on any number of processes. Under `ZeRO`,
    `accelerator.clip_grad_norm_` clips by the norm over all ranks, and `clip_grad_value_` works too.

    Args:
        accelerator: The accelerator that has prepared the model.
        model: The model that `accelerator.prepare` returned.
        program: A program, configuration or schedule, as for `thinwire.attach`.
        optimizer: The optimizer that `prepare` returned. None for all optimizers of the accelerator with
            parameters of this model.
        **options: Further options of `thinwire.attach`.

    Returns:
        The wire.

    Raises:
        AttachError: The accelerator uses no DDP, or a device mesh, or has not prepared the model.

    Example::

        model, optimizer, data = accelerator.prepare(model, optimizer, data)
        wire = thinwire.integrations.accelerate.attach(accelerator, model, Int8(), optimizer=optimizer)
    """
    check_ddp(accelerator)
    try:
        ddp_of(model)
    except AttachError as error:
        raise AttachError(f"{error}. With Accelerate, attach to the model of prepare()") from error
    if optimizer is None:
        optimizer = _optimizers_of(accelerator, model)
    options.setdefault("scaler", accelerator.scaler)
    wire = attach_ddp(model, program, optimizer=optimizer, **options)
    extra = {} if accelerator.scaler is None else {"scaler": accelerator.scaler}
    everywhere = accelerator.project_configuration.save_on_each_node
    _register(accelerator, GatheredState(wire, everywhere=everywhere, **extra))
    if isinstance(wire.program, ZeRO):
        clip_by_wire(accelerator, model, wire)
    return wire


def check_ddp(accelerator: Accelerator) -> None:
    """Raise AttachError with a workaround if the accelerator makes no DDP models, or trains on a mesh."""
    reason = _WITHOUT_DDP.get(accelerator.distributed_type)
    if reason is not None:
        raise AttachError(
            f"attach needs DDP, and this accelerator is of {accelerator.distributed_type}: {reason}"
        )
    mesh = accelerator.parallelism_config
    names = () if mesh is None else ("dp_shard_size", "tp_size", "cp_size", "sp_size")
    sizes = [f"{name}={getattr(mesh, name)}" for name in names if getattr(mesh, name) > 1]
    if sizes:
        raise AttachError(
            f"attach needs DDP, and ParallelismConfig({', '.join(sizes)}) trains on a device mesh: leave out"
            " parallelism_config, and use thinwire.ZeRO() to shard the optimizer's state"
        )


def clip_by_wire(accelerator: Accelerator, model: nn.Module, wire: Wire) -> None:
    """Make the accelerator clip the gradients of a model under `ZeRO`, which are spread over all ranks.

    Args:
        accelerator: The accelerator, whose methods `clip_grad_norm_` and `clip_grad_value_` are replaced.
        model: The prepared model.
        wire: The wire attached to it.
    """
    own = {id(parameter): parameter for parameter in ddp_of(model).parameters()}
    by_norm, by_value = accelerator.clip_grad_norm_, accelerator.clip_grad_value_

    def clip_grad_norm_(parameters: _Tensors, max_norm: float, norm_type: float = 2) -> Any:
        clipped = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if not any(id(parameter) in own for parameter in clipped):
            return by_norm(clipped, max_norm, norm_type)
        _check_whole(clipped, own)
        accelerator.unscale_gradients()
        return wire.clip_grad_norm_(max_norm, norm_type)

    def clip_grad_value_(parameters: _Tensors, clip_value: float) -> None:
        clipped = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        by_value(clipped, clip_value)
        if any(id(parameter) in own for parameter in clipped):
            wire.clip_grad_norm_(math.inf)  # ZeRO then accepts the change

    accelerator.clip_grad_norm_, accelerator.clip_grad_value_ = clip_grad_norm_, clip_grad_value_


def _check_whole(clipped: Sequence[torch.Tensor], own: Mapping[int, torch.Tensor]) -> None:
    """Raise OptionError unless these are all of the model's parameters, whose norm alone ranks know."""
    trained = {key for key, parameter in own.items() if parameter.requires_grad}
    names = {id(parameter) for parameter in clipped}
    if not trained <= names <= own.keys():
        raise OptionError(
            f"clip_grad_norm_ received {len(names & trained)} of {len(trained)} trained parameters of a"
            f" model under ZeRO, and {len(names - own.keys())} others: ZeRO knows the norm of the whole model"
            " alone, so pass model.parameters(), and clip other models separately"
        )


def _optimizers_of(accelerator: Accelerator, model: nn.Module) -> list[Optimizer]:
    own = {id(parameter) for parameter in model.parameters()}
    return [
        optimizer
        for optimizer in accelerator._optimizers
        if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])
    ]


def _register(accelerator: Accelerator, state: GatheredState) -> None:
    """Save and load the state with the accelerator's own, and load checkpoints without it too.

    Accelerate raises if a checkpoint has fewer objects than are registered. So the state is taken out of its
    list while such a checkpoint is loaded, and put back before the next save or load.
    """
    accelerator.register_for_checkpointing(state)
    registered = accelerator._custom_objects
    place = len(registered) - 1

    def put_back(*_: Any) -> None:
        if all(state is not known for known in registered):
            registered.insert(place, state)

    def take_out_if_missing(models: Any, folder: str) -> None:
        put_back()
        saved = len(list(Path(folder).glob("custom_checkpoint_*.pkl")))
        if saved == len(registered) - 1:
            registered.remove(state)
            logger.warning(
                "%s has no state of thinwire: residuals and step counts start anew. It was saved before"
                " thinwire was attached",
                folder,
            )

    accelerator.register_save_state_pre_hook(put_back)
    accelerator.register_load_state_pre_hook(take_out_if_missing)
