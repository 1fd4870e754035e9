"""The protocol of models: what a run needs of a DDP model, of an FSDP2 model, or of a module without either.

`models/` implements it. A model hands its gradients to a run:

    register(run)         from now on, call `run.bucket_ready` with each bucket of a backward
    agree_finite(...)     the run asks the ranks that only this model knows
    write_means(...)      the run has settled the step
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from thinwire.engine.comm.agreement import SetUp
from thinwire.engine.streams import require_streams
from thinwire.errors import AttachError, ThinwireError

if TYPE_CHECKING:
    from thinwire.step.runner import AttachedRun

_trains = attrgetter("requires_grad")


class Model(Protocol):
    """A weak handle to a model: named tensors, hooks, and the process group of its replicas."""

    group: dist.ProcessGroup
    """The ranks that hold replicas of the same tensors, this one among them."""
    device: torch.device
    broadcasts_buffers: bool
    """Whether every forward copies the first rank's buffers to all others."""
    find_unused_parameters: bool
    """Whether DDP waits at the end of backward to learn which parameters all ranks left unused."""

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

    def check_hooks(self) -> None:
        """Raise if the model has hooks already that leave no place for a run's."""

    def connect_shards(self, set_up: SetUp, limit: timedelta | None) -> None:
        """Compare a set-up with the ranks that hold other shards of this replica, and connect to them.

        Collective. Models that are not sharded do nothing.

        Args:
            set_up: What must be equal for all shards.
            limit: The time limit of a collective. None takes that of the group.
        """

    def register(self, run: "AttachedRun") -> None:
        """Call `run.bucket_ready` with every bucket of gradients from now on.

        Args:
            run: The run that averages them. Models without gradients to reduce do nothing.

        Raises:
            AttachError: The model does not accept the hooks.
        """

    def check_finalization(self) -> None:
        """Raise UnavailableError if the user's code ends the backward."""

    def agree_finite(self, finite: torch.Tensor, step: int, overflowed: bool) -> torch.Tensor:
        """Return whether means are finite on all ranks of this replica, without a host read.

        Args:
            finite: Whether the means of the group's ranks are finite, as a scalar bool tensor.
            step: The number of the step.
            overflowed: Whether the step before was rolled back.
        """

    def use_counts(self) -> torch.Tensor | None:
        """Return how many ranks used each parameter in the last backward, without a host read.

        Returns:
            Integers on the model's device, for `unused`, or None if the means of all parameters are applied.
        """

    def unused(self, counts: Sequence[int]) -> set[str]:
        """Return the names of parameters that no rank used, given the values of `use_counts`."""

    def spoil_gradients(self) -> None:
        """Set all gradients to NaN."""

    def write_means(self, run: "AttachedRun", committed: bool) -> None:
        """Write the means of a settled step where the model itself does not, and prepare for the next one.

        Args:
            run: The run of the step.
            committed: Whether the step was committed. If not, gradients must stay NaN.
        """

    def report(self, error: ThinwireError) -> None:
        """Report a failure of this rank's wire to ranks that only this model knows."""


def check_device(model: Model) -> None:
    """Raise unless all of a model's tensors are on one device that a run can work with.

    A run has one stream beside backward's. Gradients on a second device would be read before they are
    written, because no event orders that device's work.

    Raises:
        AttachError: The tensors are on several devices.
        UnavailableError: torch has no streams for the device.
    """
    first: dict[torch.device, str] = {}
    for name, tensor in model.tensors().items():
        first.setdefault(tensor.device, name)
    if len(first) > 1:
        places = ", ".join(f"{name!r} on {device}" for device, name in first.items())
        raise AttachError(
            f"the model's parameters are on {len(first)} devices ({places}): thinwire exchanges those of one"
            " device per rank; put the whole module on one, or shard it with fully_shard"
        )
    for device in first:
        require_streams(device)


def refuse_unfrozen(frozen: Mapping[str, torch.Tensor], so: str, fix: str) -> None:
    """Raise AttachError if one of these parameters trains now, without a read of the device.

    Args:
        frozen: The parameters that must stay frozen, by name.
        so: What follows from a frozen parameter, for the error.
        fix: The way to train it, for the error.
    """
    if any(map(_trains, frozen.values())):  # in every forward, so without a loop in Python
        name = next(name for name, parameter in frozen.items() if parameter.requires_grad)
        raise AttachError(
            f"parameter {name!r} was frozen when the wire was attached, so {so}, and now it trains: {fix}"
        )
