"""Loads gathered states in frameworks that restore model and optimizer before a wire is attached."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from torch.optim import Optimizer

from thinwire.checkpoint.gather import GatheredState
from thinwire.checkpoint.optimizer_state import forget_owned
from thinwire.errors import StateError
from thinwire.wire import Wire

logger = logging.getLogger("thinwire")


def expect_own_states(optimizers: Iterable[Optimizer]) -> None:
    """Accept rank 0's shard in these optimizers, because each rank's own shard is loaded after `attach`."""
    for optimizer in optimizers:
        forget_owned(optimizer.param_groups)


def load_or_warn(wire: Wire, state: GatheredState, saved: Mapping[str, Any] | None, where: str) -> None:
    """Load the state if every rank has found one, or warn if none has. Collective.

    Args:
        wire: The attached wire.
        state: Its gathered state.
        saved: This rank's state. None if the checkpoint has no state of thinwire.
        where: The checkpoint's name, for messages.

    Raises:
        StateError: Some ranks have found a state and others have not.
    """
    communicator = wire.attachment("load_state_dict").communicator
    found = communicator.rendezvous.gather("resume", str(saved is not None), communicator.limit)
    without = [str(rank) for rank, answer in enumerate(found) if answer != str(True)]
    if without and len(without) < len(found):
        raise StateError(
            f"ranks {', '.join(without)} find no state of thinwire in {where}, and the others do: put the"
            " checkpoint on a file system that all ranks share, or have the framework save on each node"
        )
    if saved is not None:
        state.load_state_dict(saved)
    elif communicator.rank == 0:
        logger.warning(
            "%s has no state of thinwire: residuals and step counts start anew. It was saved before thinwire"
            " was attached",
            where,
        )
