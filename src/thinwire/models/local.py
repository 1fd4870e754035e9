"""A module without DDP, of which each rank trains a replica on its own."""

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from thinwire.engine.comm.agreement import SetUp
from thinwire.engine.comm.process_group import global_ranks
from thinwire.engine.ops import AllReduce
from thinwire.errors import AttachError, OptionError, ThinwireError
from thinwire.models.ddp.internals import surrounding_ddp
from thinwire.programs.parameter_names import original_name
from thinwire.step.runner import AttachedRun


class LocalModel:
    """A weak handle to a module that each rank trains on its own: it does not keep the module alive.

    Args:
        module: The module.
        group: The ranks that hold replicas of it.
    """

    reduces_gradients = False
    find_unused_parameters = False
    bucket_bytes: int | None = None
    joins = False
    shard_key: str | None = None

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        self._module = weakref.ref(module)
        self.group = group
        self.device = _first(self.tensors()).device
        self.broadcasts_buffers = False

    def module(self, what: str = "this call") -> nn.Module:
        """Return the module; raise AttachError, naming the call `what`, if it is gone."""
        module = self._module()
        if module is None:
            raise AttachError(f"{what} was called on a wire whose model is gone: attach to a new one")
        return module

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by name; an empty dict if the module is gone."""
        module = self._module()
        if module is None:
            return {}
        return {original_name(name): parameter for name, parameter in module.named_parameters()}

    def unreduced(self) -> dict[str, nn.Parameter]:
        """Return an empty dict: no gradients are exchanged, or (FSDP2) those of all that train."""
        return {}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the parameters by name."""
        return dict(self.parameters())

    def shapes(self) -> dict[str, torch.Size]:
        """Return the parameters' shapes by name."""
        return {name: parameter.shape for name, parameter in self.parameters().items()}

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers by name."""
        return {original_name(name): tensor for name, tensor in self.module("an average").named_buffers()}

    def local_state(self, with_buffers: bool = False) -> set[str]:
        """Return the names in the module's state_dict of what is neither exchanged nor saved by the wire.

        Args:
            with_buffers: Whether the wire saves parameters and buffers, so that only extra state is left.
        """
        state = self.module("save_checkpoint").state_dict(keep_vars=True)
        shared = {id(tensor) for tensor in (*self.tensors().values(), *self.buffers().values())}
        return {
            original_name(name)
            for name, value in state.items()
            if not with_buffers or id(value) not in shared
        }

    def on_forward(self, hook: Callable[[], None]) -> Any:
        """Call `hook` at the start of every forward with gradients enabled; return a handle to remove it."""
        return self._on_forward(hook, prepend=False)

    def _on_forward(self, hook: Callable[[], None], *, prepend: bool) -> Any:
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def forward(module: nn.Module, inputs: object) -> None:
            if torch.is_grad_enabled():
                self._check_no_ddp(module)
                hook()

        return self.module().register_forward_pre_hook(forward, prepend=prepend)

    def _check_no_ddp(self, module: nn.Module) -> None:
        """Raise AttachError if DDP averages the gradients of these replicas in every step.

        Replicas would not train on their own, and the wire would not count DDP's bytes. A DDP model over
        other ranks, such as those of one node, makes them one replica together, which is right.
        """
        # In forward, because a module can be wrapped after attach.
        ddp = surrounding_ddp(module)
        if ddp is None:
            return
        shared = {*global_ranks(ddp.process_group)} & {*global_ranks(self.group)}
        if len(shared) > 1:
            raise AttachError(
                "this module was attached without DDP, so that each rank trains its own replica, and now runs"
                f" inside DistributedDataParallel, which averages gradients over ranks {sorted(shared)} in"
                " every step: use the module without DDP, or wrap it first, and then call attach(ddp, ...)"
            )

    def on_gone(self, action: Callable[..., Any], *args: Any) -> Any:
        """Call `action` when the module is collected. It must not refer to the module."""
        return weakref.finalize(self.module(), action, *args)

    def use_counts(self) -> torch.Tensor | None:
        """Return None: no means of gradients are dropped."""
        return None

    def unused(self, counts: Sequence[int]) -> set[str]:
        """Return an empty set: there are no counts."""
        return set()

    def check_finalization(self) -> None:
        """Do nothing: only DDP may leave the end of backward to the caller."""

    def ddp_bytes(self) -> int:
        """Return the bytes that this rank would send in one step with plain DDP, which sums all gradients."""
        trained = {name for name, parameter in self.parameters().items() if parameter.requires_grad}
        total = sum(tensor.nbytes for name, tensor in self.tensors().items() if name in trained)
        gradients = torch.empty(total, dtype=torch.uint8, device="meta")
        return AllReduce(gradients).bytes_sent(0, self.group.size())

    def spoil_gradients(self) -> None:
        """Do nothing: no mean of gradients can overflow."""

    def check_hooks(self) -> None:
        """Do nothing: the run needs no hook of its own."""

    def connect_shards(self, set_up: SetUp, limit: timedelta | None) -> None:
        """Do nothing: every rank has the whole model."""

    def register(self, run: AttachedRun) -> None:
        """Do nothing: strategies exchange parameters after optimizer steps, and no gradients."""

    def agree_finite(self, finite: torch.Tensor, step: int, overflowed: bool) -> torch.Tensor:
        """Return `finite`: no means of gradients are exchanged."""
        return finite

    def write_means(self, run: AttachedRun, committed: bool) -> None:
        """Do nothing: no backward is settled."""

    def report(self, error: ThinwireError) -> None:
        """Do nothing: all ranks of the model are on the wire, which reports its failures."""


def _first(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    if not tensors:
        raise AttachError("the model has no parameters: there is nothing to exchange")
    return next(iter(tensors.values()))


def replica_group(replicas: object) -> dist.ProcessGroup:
    """Return the process group of a model's replicas.

    Args:
        replicas: A process group that this rank is in, a mesh of one dimension, or None for all ranks.

    Raises:
        OptionError: It is none of these, or there are no ranks yet.
    """
    if isinstance(replicas, DeviceMesh):
        if replicas.ndim != 1:
            names = replicas.mesh_dim_names
            shown = names[0] if names else "replicate"
            raise OptionError(
                f"replicas={replicas!r} has {replicas.ndim} dimensions: pass the one of the replicas, as"
                f" mesh[{shown!r}]"
            )
        return replicas.get_group()
    group = dist.group.WORLD if replicas is None and dist.is_initialized() else replicas
    if isinstance(group, dist.ProcessGroup):
        return group
    if group is None:
        raise OptionError(
            "there is no process group: call torch.distributed.init_process_group first, or pass"
            " attach(..., replicas=group)"
        )
    raise OptionError(
        f"replicas={replicas!r} must be a torch.distributed.ProcessGroup that this rank is in, or a"
        " DeviceMesh of one dimension"
    )
