"""The saved state of an averager: copies, and the checks before any of it is used."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from thinwire.codecs.codec import is_whole
from thinwire.errors import StateError
from thinwire.programs.sound import check_count, check_tensor

_KEYS = {"step", "apart", "used", "whole", "parameters", "buffers", "outer", "in_flight"}


def cloned(state: Any) -> Any:
    """A copy of nested dicts and lists with their tensors."""
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {key: cloned(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(map(cloned, state))
    return state


def checked(
    state: object,
    parameters: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    fragments: Sequence[Sequence[str]],
    warmup_steps: int,
) -> dict[str, Any]:
    """The state, if it fits the model."""
    if not isinstance(state, dict) or set(state) != _KEYS:
        raise StateError(
            "the state has nothing, or something else, under 'averaging': it was not saved from a wire that"
            " averages models"
        )
    for key in ("step", "used", "whole"):
        check_count(f"averaging {key}", state[key])
    if not isinstance(state["apart"], bool):
        raise StateError(f"averaging apart={state['apart']!r} must be True or False")
    if state["step"] >= warmup_steps or state["parameters"] or state["buffers"]:
        check_tensors("parameter", state["parameters"], parameters)
        check_tensors("buffer", state["buffers"], buffers, finite=False)  # masks hold -inf
    if not isinstance(state["in_flight"], list):
        raise StateError("averaging in_flight must be a list of averages under way")
    for flight in state["in_flight"]:
        _check_flight(flight, parameters, fragments)
    return state


def check_tensors(
    what: str, saved: object, tensors: Mapping[str, torch.Tensor], *, finite: bool = True
) -> None:
    """Refuse tensors that are not named and shaped as those that they shall go to."""
    if not isinstance(saved, dict) or set(saved) != set(tensors):
        raise StateError(f"the state's {what}s are not this model's: it was saved from another one")
    for name, tensor in saved.items():
        shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        if shape != tuple(tensors[name].shape):
            raise StateError(
                f"the saved {what} {name} has shape {shape}, the model's {tuple(tensors[name].shape)}: the"
                " state was saved from another model"
            )
        check_tensor(f"{what} {name}", tensor, finite=finite)
        if _kind(tensor) != _kind(tensors[name]):
            raise StateError(f"the saved {what} {name} is {tensor.dtype}, the model's {tensors[name].dtype}")


def means_like(
    parameters: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Copies of saved means, where and as precise as an exchange of these parameters leaves them."""
    made = {}
    for name, mean in saved.items():
        precise = torch.promote_types(parameters[name].dtype, torch.float32)
        made[name] = mean.detach().to(parameters[name].device, precise, copy=True)
    return made


def _kind(tensor: torch.Tensor) -> tuple[bool, bool]:
    return tensor.is_floating_point(), tensor.is_complex()


def _check_flight(
    flight: object, parameters: Mapping[str, torch.Tensor], fragments: Sequence[Sequence[str]]
) -> None:
    if not isinstance(flight, dict) or set(flight) != {"fragment", "due", "means"}:
        raise StateError("an average under way must have fragment, due and means")
    whole = is_whole(flight["due"]) and is_whole(flight["fragment"])
    if not whole or flight["fragment"] not in range(len(fragments)):
        raise StateError(
            f"an average under way is of fragment {flight['fragment']!r}, due {flight['due']!r}: the state"
            " was saved with other fragments"
        )
    names = fragments[flight["fragment"]]
    check_tensors("mean", flight["means"], {name: parameters[name] for name in names})
