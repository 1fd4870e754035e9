"""All optimizers of a job as one object, whose state differs from rank to rank."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from thinwire.checkpoint.dcp import PerRank
from thinwire.checkpoint.optimizer_state import merged
from thinwire.errors import StateError


def per_rank(optimizers: Optimizer | Sequence[Optimizer], group: dist.ProcessGroup) -> PerRank:
    """Return one object that saves each rank's state of all optimizers, and loads it on any number of ranks.

    Args:
        optimizers: The optimizer, or all of them, in the same order at save and at load.
        group: The process group that ranks are numbered in.
    """
    listed = list(optimizers) if isinstance(optimizers, Sequence) else [optimizers]

    def merge(states: list[Any]) -> Any:
        return [merged(each) for each in zip(*states, strict=True)]

    return PerRank(_Together(listed), merge=merge, group=group)


class _Together:
    """Several optimizers as one object."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers

    def state_dict(self) -> list[dict[str, Any]]:
        return [one.state_dict() for one in self._optimizers]

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        if len(states) != len(self._optimizers):
            raise StateError(
                f"the checkpoint has {len(states)} optimizers, and {len(self._optimizers)} were given: pass"
                " those that were saved, in the same order"
            )
        for one, state in zip(self._optimizers, states, strict=True):
            one.load_state_dict(state)
