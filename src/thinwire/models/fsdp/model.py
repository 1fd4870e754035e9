"""An FSDP2 model as the rest of thinwire sees it: this rank's shards by name, and other replicas' ranks."""

import math
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from thinwire.checkpoint.rank_keys import shard_key
from thinwire.engine.pack import local_part
from thinwire.errors import AttachError, OptionError, UnavailableError
from thinwire.models.ddp.internals import steps_in_backward
from thinwire.models.fsdp import internals
from thinwire.models.local import LocalModel
from thinwire.programs.parameter_names import original_name

_ONE_MESH = "call fully_shard(module, mesh=mesh['shard']) with one mesh of one dimension for all modules"


class ShardedModel(LocalModel):
    """A weak handle to an FSDP2 model: it does not keep the model alive.

    Args:
        module: The root module.
        group: The ranks that hold the same shard in the other replicas, this one among them.

    Raises:
        AttachError: Some trained parameters are not sharded, or have no values yet.
        UnavailableError: FSDP reduces across replicas itself, or shards along several meshes.
    """

    reduces_gradients = True

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        for sharded in internals.sharded_modules(module):
            sharded.reshard()  # whole parameters may be left from a forward
        self._sharded = _sharded_parameters(module)
        self.mesh = _mesh_of(self._sharded)
        super().__init__(module, group)
        weakref.finalize(module, self._sharded.clear)
        self.shard_key = shard_key(self.mesh.get_local_rank(), self.mesh.size())

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The ranks that hold this replica together."""
        found: dist.ProcessGroup = self.mesh.get_group()
        return found

    def check_replicas(self) -> None:
        """Raise OptionError if the group of replicas holds other shards of this one."""
        ranks = set(dist.get_process_group_ranks(self.group))
        shards = set(dist.get_process_group_ranks(self.shard_group))
        if ranks & shards != {dist.get_rank()}:
            raise OptionError(
                f"replicas are the ranks {sorted(ranks)}, and the shards of one replica are on"
                f" {sorted(shards)}: they may share this rank alone; make the mesh with init_device_mesh("
                "device, (replicas, shards), mesh_dim_names=('replicate', 'shard')), and give"
                " replicas=mesh['replicate']"
            )

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the sharded parameters by name. In a forward, the module itself may hold whole ones."""
        return dict(self._sharded)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's shard of each parameter by name, without padding."""
        return {name: local_part(parameter) for name, parameter in self._sharded.items()}

    def on_forward(self, hook: Any) -> Any:
        """Call `hook` at the start of every forward, before FSDP gathers parameters that it may change."""
        return self._on_forward(hook, prepend=True)

    def spoil_gradients(self) -> None:
        """Set all gradients to NaN, so that a GradScaler detects the overflow on every rank."""
        for parameter in self._sharded.values():
            if parameter.grad is not None:
                local_part(parameter.grad).fill_(math.nan)

    def check_finalization(self) -> None:
        """Raise UnavailableError if the user's code ends the backward instead of FSDP (torch 2.15 and newer).

        Gradients of some groups would then be reduced after backward, in which the step is settled.
        """
        if internals.finalizes_manually(self.module("attach")):
            raise UnavailableError(
                "set_manual_backward_finalization(True): thinwire settles each step inside backward, and"
                " model.finalize_backward() would reduce gradients after that; call"
                " model.set_manual_backward_finalization(False) on the root module"
            )

    def check_hooks(self) -> None:
        """Raise if another hook is in place of thinwire's, or would see gradients before the exchange."""
        module = self.module("attach")
        for sharded in internals.sharded_modules(module):
            groups = internals.parameter_groups(sharded)
            if len(groups) > 1:
                raise UnavailableError(
                    f"{type(sharded).__name__} has {len(groups)} groups of parameters, sharded along"
                    f" different meshes, and FSDP accepts no hook for them: {_ONE_MESH}"
                )
            if any(map(internals.has_hook, groups)):
                raise AttachError(
                    f"{type(sharded).__name__} has an all-reduce hook already, of a wire or of your own, and"
                    " FSDP accepts one: use wire.swap(program) to change a wire, or shard a new model"
                )
        for name, parameter in self._sharded.items():
            refuse_hooks(name, parameter)


def refuse_hooks(name: str, parameter: torch.Tensor, own: int = 0) -> None:
    """Raise UnavailableError if hooks other than thinwire's `own` would see gradients before the exchange."""
    if internals.accumulation_hooks(parameter) > own or steps_in_backward(parameter):
        raise UnavailableError(
            f"{name} has a hook that runs as soon as its gradient is there, as optimizers in backward do: it"
            " would see the gradient before the exchange; step the optimizer after backward"
        )


def _sharded_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    sharded, plain = {}, []
    for name, parameter in module.named_parameters():
        if hasattr(parameter, "device_mesh"):
            sharded[original_name(name)] = parameter
        elif parameter.requires_grad:
            plain.append(original_name(name))
        if parameter.is_meta:
            raise AttachError(
                f"{original_name(name)} is on the meta device: give parameters their values before attach, as"
                " by model.to_empty(device=...) and their initialisation"
            )
    if plain:
        raise AttachError(
            f"{len(plain)} trained parameters ({', '.join(plain[:3])}) are not sharded, and would not be"
            " averaged: call fully_shard on the root module too, or freeze them"
        )
    return sharded


def _mesh_of(parameters: dict[str, nn.Parameter]) -> Any:
    """Return the one mesh along which all parameters are sharded."""
    if not parameters:
        raise AttachError("the model has no parameters: there is nothing to exchange")
    held: dict[str, Any] = dict(parameters)
    first = next(iter(held.values())).device_mesh
    for name, parameter in held.items():
        mesh = parameter.device_mesh
        if any(placement.is_replicate() for placement in parameter.placements):
            raise UnavailableError(
                f"{name} is replicated by FSDP itself (HSDP, mesh {mesh.mesh_dim_names}), which averages"
                " gradients uncompressed before any hook: shard with fully_shard(module, mesh=mesh['shard']),"
                " and attach with replicas=mesh['replicate']"
            )
        if mesh.ndim != 1 or mesh != first:
            raise UnavailableError(
                f"{name} is sharded along {mesh}, beside other meshes or with several dimensions, which"
                f" thinwire does not exchange: {_ONE_MESH}"
            )
    return first
