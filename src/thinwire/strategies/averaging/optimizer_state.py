"""An optimizer's state as plain tensors, which another replica can load: of sharded parameters, shards."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from thinwire.checkpoint.trees import copied
from thinwire.engine.pack import local_part


def local_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return a copy of an optimizer's state, with this rank's shard in place of each DTensor."""
    state: dict[str, Any] = copied(optimizer.state_dict(), lambda one: local_part(one).clone())
    return state


def load_local_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load what `local_state` has returned on the same rank of another replica."""
    held = [one for group in optimizer.param_groups for one in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = dict(zip(numbers, held, strict=True))
    entries = {
        number: {key: _like(value, parameters[number]) for key, value in entry.items()}
        for number, entry in state["state"].items()
    }
    optimizer.load_state_dict({**copied(state), "state": entries})


def _like(value: Any, parameter: torch.Tensor) -> Any:
    """Return a copy of a value, as a DTensor if it is elementwise and its parameter is a DTensor."""
    if not isinstance(value, torch.Tensor) or not hasattr(parameter, "device_mesh"):
        return copied(value)
    # Its import takes a second or more, which a replica without shards would be late by.
    from torch.distributed.tensor import DTensor

    assert isinstance(parameter, DTensor)
    if value.dim() == 0 or value.shape != local_part(parameter).shape:
        return value.clone()
    return DTensor.from_local(
        value.clone(),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
