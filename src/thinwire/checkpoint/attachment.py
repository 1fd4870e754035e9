"""The objects that a wire is attached to, as far as saving and resuming need them.

`thinwire.wire` is above this room, so the wire and its model are protocols here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from thinwire.amp.loss_scale import ScalerOption
from thinwire.engine.comm.group_communicator import GroupCommunicator
from thinwire.errors import OptionError


class SavedModel(Protocol):
    """A handle to the attached model."""

    group: dist.ProcessGroup
    device: torch.device

    @property
    def shard_key(self) -> str | None:
        """The key of this rank's shard in saved states, or None if every rank has the whole model."""

    def module(self, what: str = "this call") -> torch.nn.Module:
        """Return the user's module; raise AttachError, naming the call `what`, if it is gone."""

    def local_state(self, with_buffers: bool = False) -> set[str]:
        """Return the names of state_dict entries that differ from rank to rank."""


@dataclass(frozen=True)
class Attachment:
    """The objects that a wire works with, and which of their state ranks share at this moment.

    Attributes:
        model: The handle of the attached model.
        communicator: The connection of the ranks.
        optimizers: The optimizers given to `attach` that still exist.
        scaler: The GradScaler given to `attach`.
        optimizer_state_differs: Whether the state of these optimizers differs from rank to rank.
        replicas_equal: Whether all ranks hold the same model now.
        saves_model: Whether the wire's state contains this rank's model.
        trains_locally: Whether ranks train models of their own in some stage.
    """

    model: SavedModel
    communicator: GroupCommunicator
    optimizers: Sequence[Optimizer]
    scaler: ScalerOption
    optimizer_state_differs: bool
    replicas_equal: bool
    saves_model: bool
    trains_locally: bool

    @property
    def place(self) -> tuple[int, int]:
        """This rank, and the number of ranks."""
        return self.communicator.rank, self.communicator.size

    def module_in(self, model: torch.nn.Module, what: str) -> torch.nn.Module:
        """Return the attached module; raise OptionError if `model` does not contain it.

        Args:
            model: The model that the user passed: the module itself, or wrapped by DDP or torch.compile.
            what: The caller's name, for the error message.
        """
        module = self.model.module(what)
        if all(part is not module for part in model.modules()):
            raise OptionError(
                f"{what} was called with another {type(model).__name__} than the one that the wire is"
                " attached to: pass the model that was passed to attach"
            )
        return module


class SavableWire(Protocol):
    """The members of `thinwire.Wire` that this room uses."""

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's own state under its rank key."""

    def load_state_dict(self, state: "Mapping[str, Any] | Sequence[Any]", /) -> None:
        """Load this rank's own state, or those of all ranks. Collective."""

    def attachment(self, what: str) -> Attachment:
        """Settle the latest step, and return the objects that the wire is attached to."""

    def await_optimizer_states(self) -> None:
        """Accept another rank's optimizer state for now, because this rank's own is loaded after it."""
