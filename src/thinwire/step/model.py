"""The interface between strategies and the model that they work on, with the reducer of its gradients.

DDP models (`ddp/`), modules that each rank trains on its own (`replicas/`) and FSDP2 models (`fsdp/`)
implement it.
"""

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, Protocol

import torch
import torch.distributed as dist

from thinwire.engine.comm.group_communicator import GroupCommunicator
from thinwire.engine.engine import Engine
from thinwire.errors import AttachError, OptionError
from thinwire.models.ddp.model import Model
from thinwire.step.layout import BucketLayout
from thinwire.step.transaction import SteppedModel, StepTransaction

_trains = attrgetter("requires_grad")


class AttachedModel(SteppedModel, Protocol):
    """A weak handle to a model: named tensors, hooks and the process group of its replicas."""

    group: dist.ProcessGroup
    """The ranks that hold replicas of the same tensors, this one among them."""
    device: torch.device
    broadcasts_buffers: bool
    """Whether every forward copies the first rank's buffers to all others."""

    @property
    def shard_key(self) -> str | None:
        """The key of this rank's shard in saved states, or None if every rank has the whole model."""

    @property
    def reduces_gradients(self) -> bool:
        """True if programs can average gradients in backward."""

    @property
    def bucket_bytes(self) -> int | None:
        """The size of DDP's buckets, or None without DDP."""

    @property
    def joins(self) -> bool:
        """True inside torch's Join context, where ranks may run out of inputs."""

    def module(self, what: str = "this call") -> torch.nn.Module:
        """Return the user's module; raise AttachError, naming the call `what`, if it is gone."""

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters by name, as optimizers hold them; an empty dict if the model is gone."""

    def unreduced(self) -> dict[str, torch.nn.Parameter]:
        """Return the frozen parameters whose gradients would not be exchanged if they trained, by name."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's part of each parameter by name, sharing its memory."""

    def shapes(self) -> dict[str, torch.Size]:
        """Return the parameters' whole shapes by name."""

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers by name."""

    def local_state(self, with_buffers: bool = False) -> set[str]:
        """Return the names of state_dict entries that differ from rank to rank."""

    def on_forward(self, hook: Callable[[], None]) -> Any:
        """Call `hook` at the start of every forward with gradients enabled; return a handle to remove it."""

    def on_gone(self, action: Callable[..., Any], *args: Any) -> Any:
        """Call `action` when the model is collected. It must not refer to the model."""

    def ddp_bytes(self) -> int:
        """Return the bytes that this rank would send in one step to sum all gradients uncompressed."""


class AttachedReducer(Protocol):
    """The strategies' access to an engine on a process group, to steps and to the attached model."""

    communicator: GroupCommunicator
    engine: Engine
    steps: StepTransaction
    layout: BucketLayout

    @property
    def model(self) -> AttachedModel:
        """The attached model."""

    def agree_finite(self, finite: torch.Tensor) -> torch.Tensor:
        """Return whether means are finite on all ranks, given the flag of the ranks of `communicator`."""

    def settled(self, committed: bool) -> None:
        """React to a settled backward pass."""


def refuse_unfrozen(frozen: Mapping[str, torch.Tensor], so: str, fix: str) -> None:
    """Raise AttachError if one of these parameters trains now, without a read of the device.

    Args:
        frozen: The parameters that must stay frozen, by name.
        so: What follows from a frozen parameter, for the error.
        fix: The way to train it, for the error.
    """
    if any(map(_trains, frozen.values())):  # in every forward, so without a loop in Python
        name = next(name for name, one in frozen.items() if one.requires_grad)
        raise AttachError(
            f"parameter {name!r} was frozen when the wire was attached, so {so}, and now it trains: {fix}"
        )


def require_ddp(model: object, what: object) -> Model:
    """Return the handle of a DDP model; raise OptionError, naming the option `what`, for other models."""
    if isinstance(model, Model):
        return model
    raise OptionError(
        f"{what} needs a DistributedDataParallel model: wrap the module in one, and attach to that"
    )
