"""The interface of a DistributedDataParallel model: named tensors, hooks, a process group."""

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from thinwire.engine.ops import AllReduce
from thinwire.errors import AttachError, UnavailableError
from thinwire.models.ddp import internals
from thinwire.programs.parameter_names import original_name


class Model:
    """A weak handle to a DDP model. It does not keep the model alive."""

    reduces_gradients = True
    shard_key: str | None = None

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = weakref.ref(ddp)
        self.group: dist.ProcessGroup = ddp.process_group
        self.device = next(iter(parameters_of(ddp).values())).device
        self.static_graph: bool = ddp.static_graph
        self.find_unused_parameters: bool = ddp.find_unused_parameters
        self._reduced: list[str] | None = None
        """The names of DDP's own list of parameters, computed when first needed."""

    def ddp(self, what: str = "this call") -> DistributedDataParallel:
        """Return the DDP model; raise AttachError, naming the call `what`, if it is gone."""
        ddp = self._ddp()
        if ddp is None:
            raise AttachError(f"{what} was called on a wire whose DDP model is gone: attach to a new one")
        return ddp

    @property
    def alive(self) -> bool:
        """True while the DDP model exists."""
        return self._ddp() is not None

    def module(self, what: str = "this call") -> torch.nn.Module:
        """Return the user's module inside the DDP model; raise AttachError if it is gone."""
        return internals.wrapped_module(self.ddp(what))

    @property
    def joins(self) -> bool:
        """True inside torch's Join context, where ranks may run out of inputs."""
        return internals.joins(self.ddp())

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters by name; an empty dict if the model is gone."""
        ddp = self._ddp()
        return {} if ddp is None else parameters_of(ddp)

    def unreduced(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that DDP does not average, because they were frozen when it was made."""
        ddp, parameters = self.ddp(), self.parameters()
        trained = sum(one.requires_grad for one in parameters.values())
        if trained == len(parameters) == internals.reduced_count(ddp):
            return {}
        members = internals.reduced_parameters(ddp)
        return {name: one for name, one in parameters.items() if id(one) not in members}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the parameters by name. Every rank holds all of each parameter."""
        return dict(self.parameters())

    def shapes(self) -> dict[str, torch.Size]:
        """Return the parameters' shapes by name."""
        return {name: parameter.shape for name, parameter in self.parameters().items()}

    @property
    def bucket_bytes(self) -> int:
        """The size of DDP's buckets, except for the first."""
        return internals.bucket_bytes(self.ddp("bucket_bytes"))

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers by name, without those that DDP ignores."""
        ddp = self.ddp("an average")
        ignored = internals.ignored_names(ddp)
        return {
            original_name(name): buffer
            for name, buffer in internals.wrapped_module(ddp).named_buffers()
            if name not in ignored
        }

    def local_state(self, with_buffers: bool = False) -> set[str]:
        """Return the names of state_dict entries that DDP does not keep equal on all ranks.

        These are buffers that DDP does not broadcast, parameters and buffers that it ignores, and extra
        state of modules. Names are original ones.

        Args:
            with_buffers: Whether buffers are kept equal, or saved elsewhere, although DDP does not broadcast.
        """
        shared: dict[str, torch.Tensor] = dict(self.parameters())
        if with_buffers or self.broadcasts_buffers:
            shared |= self.buffers()
        tensors = {id(one) for one in shared.values()}  # one tensor may have several names
        module = internals.wrapped_module(self.ddp("save_checkpoint"))
        state = module.state_dict(keep_vars=True)
        names = {original_name(name): one for name, one in state.items()}
        return {name for name, one in names.items() if name not in shared and id(one) not in tensors}

    @property
    def broadcasts_buffers(self) -> bool:
        """True if DDP broadcasts rank 0's buffers with every forward."""
        return bool(self.ddp().broadcast_buffers)

    @broadcasts_buffers.setter
    def broadcasts_buffers(self, on: bool) -> None:
        ddp = self._ddp()
        if ddp is not None:
            ddp.broadcast_buffers = on

    def on_forward(self, hook: Callable[[], None]) -> Any:
        """Call `hook` at the start of every forward with gradients enabled; return a handle to remove it."""

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def forward(module: object, inputs: object) -> None:
            if torch.is_grad_enabled():
                hook()

        return internals.called_module(self.ddp()).register_forward_pre_hook(forward)

    def on_gone(self, action: Callable[..., Any], *args: Any) -> Any:
        """Call `action` when the model is collected. It must not refer to the model."""
        return weakref.finalize(self.ddp(), action, *args)

    def unused(self) -> set[str]:
        """Return the names of parameters that no rank used in the last backward. DDP drops their means."""
        ddp = self._ddp()
        if ddp is None or not (self.find_unused_parameters or self.static_graph):
            return set()
        if self._reduced is None:
            members = internals.reduced_parameters(ddp)
            self._reduced = [name for name, one in parameters_of(ddp).items() if id(one) in members]
        counts = internals.use_counts(ddp)
        return {name for name, count in zip(self._reduced, counts, strict=True) if not count}

    def check_finalization(self) -> None:
        """Raise UnavailableError if the user's code ends the backward instead of DDP (torch 2.15 and newer).

        A step is settled in backward, after DDP's final callback has written the gradients. With manual
        finalization they are written later. An overflowed step could then not be skipped as a whole, because
        its gradients would replace the NaNs.
        """
        ddp = self._ddp()
        if ddp is not None and internals.finalizes_manually(ddp):
            raise UnavailableError(
                "require_manual_backward_finalization=True: thinwire settles each step inside backward, and"
                " ddp.finalize_backward() would write gradients after that; set"
                " ddp.require_manual_backward_finalization = False"
            )

    def ddp_bytes(self) -> int:
        """Return the bytes that this rank would send in one step with plain DDP, which sums all gradients."""
        total = sum(one.nbytes for one in self.parameters().values() if one.requires_grad)
        gradients = torch.empty(total, dtype=torch.uint8, device="meta")
        return AllReduce(gradients).bytes_sent(0, self.group.size())

    def spoil_gradients(self) -> None:
        """Set all gradients to NaN, so that a GradScaler detects the overflow on every rank."""
        for parameter in self.parameters().values():
            if parameter.grad is not None:
                parameter.grad.mul_(math.nan) if parameter.grad.is_sparse else parameter.grad.fill_(math.nan)


def parameters_of(ddp: DistributedDataParallel) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that DDP keeps equal, by their names in the wrapped module.

    Frozen ones are included. They may have been frozen after DDP was made, and DDP still averages their
    gradients.
    """
    ignored = internals.ignored_names(ddp)
    own = {id(one) for one in ddp.module.parameters()}  # `replicate` may leave out some of the module's
    return {
        original_name(name): one
        for name, one in internals.wrapped_module(ddp).named_parameters()
        if internals.lookup_name(name) not in ignored and id(one) in own
    }


def remove_handles(handles: list[Any]) -> None:
    """Remove hooks by their handles, once."""
    for handle in handles:
        handle.remove()
    handles.clear()
