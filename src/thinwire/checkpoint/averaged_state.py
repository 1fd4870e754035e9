"""Validation of an averager's saved state before any of it is used, and merging of all ranks' states."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from thinwire.checkpoint.trees import copied, means
from thinwire.checkpoint.validate import check_count, check_tensors
from thinwire.codecs.checks import is_whole
from thinwire.errors import StateError

_KEYS = {"step", "window", "used", "whole", "parameters", "buffers", "outer", "in_flight"}


def checked(
    state: object,
    parameters: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    fragments: Sequence[Sequence[str]],
    warmup_steps: int,
) -> dict[str, Any]:
    """Return the state if it fits the model.

    Args:
        state: The saved state of an averager.
        parameters: The model's trainable parameters by name.
        buffers: The model's buffers by name.
        fragments: The names in each fragment.
        warmup_steps: Steps of the warm-up, in which no parameters are saved.

    Raises:
        StateError: The state is not that of an averager, or does not fit the model.
    """
    if not isinstance(state, dict) or set(state) != _KEYS:
        raise StateError(
            "the state has no valid entry 'averaging': it was not saved from a wire that averages models"
        )
    for key in ("step", "window", "used", "whole"):
        check_count(f"averaging {key}", state[key])
    if state["step"] >= warmup_steps or state["parameters"] or state["buffers"]:
        check_tensors("parameter", state["parameters"], parameters)
        check_tensors("buffer", state["buffers"], buffers, finite=False)  # masks hold -inf
    if not isinstance(state["in_flight"], list):
        raise StateError("averaging in_flight must be a list of averages in flight")
    for flight in state["in_flight"]:
        _check_flight(flight, parameters, fragments)
    return state


def means_like(
    parameters: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return copies of saved means with the devices and dtypes of an exchange of these parameters."""
    made = {}
    for name, mean in saved.items():
        precise = torch.promote_types(parameters[name].dtype, torch.float32)
        made[name] = mean.detach().to(parameters[name].device, precise, copy=True)
    return made


def _check_flight(
    flight: object, parameters: Mapping[str, torch.Tensor], fragments: Sequence[Sequence[str]]
) -> None:
    if not isinstance(flight, dict) or set(flight) != {"fragment", "due", "means"}:
        raise StateError("an average in flight must have fragment, due and means")
    whole = is_whole(flight["due"]) and is_whole(flight["fragment"])
    if not whole or flight["fragment"] not in range(len(fragments)):
        raise StateError(
            f"an average in flight is of fragment {flight['fragment']!r}, due {flight['due']!r}: the state"
            " was saved with other fragments"
        )
    names = fragments[flight["fragment"]]
    check_tensors("mean", flight["means"], {name: parameters[name] for name in names})


def merge_averager_states(states: Sequence[Any]) -> dict[str, Any]:
    """Merge the states of all ranks' averagers for another number of ranks. Models become their mean.

    Args:
        states: The saved state of each rank's averager, by rank.

    Raises:
        StateError: The states were not saved together.
    """
    if any(not isinstance(state, dict) for state in states):
        raise StateError("some states are of a wire that averages models, and some are not")
    if len({position(state) for state in states}) > 1:
        raise StateError("the states are of different training steps: pass states that were saved together")
    # Anchors, outer optimizer and averages in flight are equal on all ranks. Models are not: between two
    # exchanges their mean is what the next exchange would see.
    return {
        **copied(states[0]),
        "parameters": means([state["parameters"] for state in states]),
        "buffers": means([state["buffers"] for state in states]),
    }


def position(state: Mapping[str, Any] | None) -> str:
    """Describe the point of averaging at which a state was saved, which is the same on all ranks."""
    if state is None:
        return "no averages"
    flights = [(flight["fragment"], flight["due"]) for flight in state["in_flight"]]
    return f"after step {state['step']}, {state['used']} averages, in flight {flights}"
