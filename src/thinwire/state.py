"""A wire's saved state: whether it fits, and what all ranks' states become for another number of ranks."""

import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from thinwire.averaging.saved import cloned
from thinwire.errors import StateError
from thinwire.programs.memory import MODELS, MODELS_RESIDUAL, RESIDUAL, Memory, is_residual
from thinwire.programs.sound import check_count, check_tensor
from thinwire.ranked import choose, rank_key
from thinwire.set_ups import agree_on, decline
from thinwire.sharding.state import copied
from thinwire.wire.communicator import Communicator
from thinwire.wire.pack import real_numbers

FORMAT = 2
_KEYS = {"format", "program", "step", "rank", "world_size", "buckets", "scale", "memory"}
_SIZED = re.compile(r"(?:.*: )?q (\d{1,9})x(\d{1,9})")
"""PowerSGD's factors, whose slots are named by their shape."""


@contextlib.contextmanager
def readable() -> Iterator[None]:
    """Whatever a damaged state makes the reading of it raise is a StateError."""
    try:
        yield
    except StateError:
        raise
    except Exception as error:
        raise StateError(
            f"the state cannot be read ({type(error).__name__}: {error}): it is damaged, or was not saved by"
            " wire.state_dict()"
        ) from error


@contextlib.contextmanager
def all_or_none(communicator: Communicator, topic: str) -> Iterator[dict[str, str]]:
    """Read a state on all ranks: what one of them refuses, or what differs of what is put in, all refuse."""
    agreed: dict[str, str] = {}
    try:
        with readable():
            yield agreed
    except StateError as error:
        decline(str(error), communicator.meeting, topic)
        raise
    agree_on(agreed, communicator.meeting, communicator.limit, topic)


def ranked(inner: dict[str, Any]) -> dict[str, Any]:
    """The state under its rank's key, with its tensors on the CPU: other ranks may not have this device."""
    return {rank_key(inner["rank"], inner["world_size"]): (copied(inner, torch.Tensor.cpu),)}


def own_state(state: object, programs: Sequence[str], rank: int, world_size: int) -> dict[str, Any]:
    """The state that a rank goes on from, checked: its own, or what becomes of all ranks' states.

    Raises StateError where it does not fit.
    """
    saved_size, found = choose(state, rank, world_size)
    states = [_checked(one, programs, (each, saved_size)) for each, one in found.items()]
    return states[0] if saved_size == world_size else _merged(states)


def _checked(state: object, programs: Sequence[str], place: tuple[int, int]) -> dict[str, Any]:
    if not isinstance(state, Mapping) or not set(state) >= _KEYS:
        raise StateError("this is no state of a thinwire wire: it needs what wire.state_dict() returns")
    if state["format"] != FORMAT:
        raise StateError(
            f"format {state['format']!r} is not {FORMAT}: the state was written by another version"
        )
    if state["program"] not in programs:
        raise StateError(
            f"the state belongs to {state['program']}, but {programs[-1]} is running: attach the saved"
            " program, load, and swap afterwards"
        )
    for key in ("step", "rank", "world_size"):
        check_count(key, state[key])
    groups = state["buckets"]
    if not isinstance(groups, list) or not all(isinstance(group, list) for group in groups):
        raise StateError(f"buckets must be lists of names, not {groups!r}")
    scale = state["scale"]
    if scale is not None and not (isinstance(scale, float) and 0 < scale < math.inf):
        raise StateError(f"scale={scale!r} must be a positive number, or None: a GradScaler's")
    if not isinstance(state.get("schedule_ended", False), bool):
        raise StateError(f"schedule_ended={state['schedule_ended']!r} must be True or False")
    for key in ("averaging", "sharding"):
        if not isinstance(state.get(key), dict | None):
            raise StateError(f"{key} is a {type(state[key]).__name__}: it must be a dict, or None")
    if (state["rank"], state["world_size"]) != place:
        raise StateError(
            f"what stands under {rank_key(*place)!r} was saved by rank {state['rank']} of"
            f" {state['world_size']}: states were mixed up, load what each rank saved itself"
        )
    return dict(state)


def memory_for(parameters: Mapping[str, torch.Tensor], own: Mapping[str, Any]) -> Memory:
    """What programs remembered of these parameters, checked, and where they are; StateError if unfit."""
    memory, state = Memory(), own["memory"]
    memory.scale = own["scale"]
    memory.load_state_dict(state, {name: one.shape for name, one in parameters.items()})
    for name, slots in state.items():
        for key, tensor in slots.items():
            _check_slot(f"{key!r} of {name}", str(key), tensor, parameters[name])
            memory.put(name, str(key), tensor.detach().to(parameters[name].device, copy=True))
    return memory


def _check_slot(what: str, key: str, tensor: torch.Tensor, parameter: torch.Tensor) -> None:
    """What we know of a slot by its key: residuals and PowerSGD's factors; programs may have others."""
    residual, sized = is_residual(key), _SIZED.fullmatch(key)
    check_tensor(what, tensor, finite=residual or sized is not None)
    real = real_numbers(parameter)
    if residual and not tensor.is_floating_point():
        raise StateError(f"the saved {what} is {tensor.dtype}: what was not sent yet is no such number")
    if key in (RESIDUAL, MODELS_RESIDUAL) and tensor.shape != real.shape:
        raise StateError(f"the saved {what} has shape {tuple(tensor.shape)}, not {tuple(real.shape)}")
    if sized is not None:
        models = key.startswith(f"{MODELS}: ")
        dtype = torch.promote_types(real.dtype, torch.float32) if models else real.dtype
        if tensor.shape != (int(sized[1]), int(sized[2])) or tensor.dtype != dtype:
            raise StateError(
                f"the saved {what} has shape {tuple(tensor.shape)} and {tensor.dtype}, not what its name"
                f" says and {dtype}: the state is damaged, or of a model of another dtype"
            )


def _merged(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One state for every rank of another number of ranks.

    What ranks shared is taken over. What each had of its own becomes the mean: of residuals, so that the sum
    that is still owed to the average is kept, and of models that were apart.
    """
    steps = sorted({state["step"] for state in states})
    if len(steps) > 1:
        raise StateError(f"the states are of the steps {steps}: give those that were saved together")
    first = min(states, key=lambda state: int(state["rank"]))
    if len({state["program"] for state in states}) > 1:
        raise StateError("the states are of different programs: give those that were saved together")
    scale = min((one["scale"] for one in states if one["scale"] is not None), default=None)
    states = [_in_units_of(scale, state) for state in states]
    whole = {
        **first,
        "scale": scale,
        "buckets": [],
        "memory": _merged_memory([state["memory"] for state in states]),
    }
    if first.get("averaging") is not None:
        whole["averaging"] = _merged_averaging([state.get("averaging") for state in states])
    if first.get("sharding") is not None:
        masters = {name: one for state in states for name, one in state["sharding"]["masters"].items()}
        whole["sharding"] = {"masters": masters}  # each has one owner
    return whole


def _in_units_of(scale: float | None, state: dict[str, Any]) -> dict[str, Any]:
    """A state whose residuals are in the units of this scale: while ranks train apart, scalers differ."""
    if scale is None or state["scale"] in (None, scale):
        return state
    factor = scale / state["scale"]
    memory = {
        name: {
            key: tensor * factor if is_residual(key) and not key.startswith(f"{MODELS}: ") else tensor
            for key, tensor in slots.items()
        }
        for name, slots in state["memory"].items()
    }
    return {**state, "memory": memory}


def _merged_memory(memories: Sequence[Any]) -> dict[str, dict[str, torch.Tensor]]:
    merged: dict[str, dict[str, torch.Tensor]] = {}
    for name in dict.fromkeys(name for memory in memories for name in memory):
        slots = [memory.get(name, {}) for memory in memories]
        merged[name] = {}
        for key in dict.fromkeys(key for one in slots for key in one):
            tensors = [one[key] for one in slots if key in one]
            if key in (RESIDUAL, MODELS_RESIDUAL):
                precise = torch.promote_types(tensors[0].dtype, torch.float32)  # half rounds
                merged[name][key] = torch.stack([one.to(precise) for one in tensors]).sum(0) / len(memories)
            elif len(tensors) == len(memories) and all(torch.equal(tensors[0], one) for one in tensors):
                merged[name][key] = tensors[0].clone()
            else:
                raise StateError(
                    f"{key!r} of {name} belongs to single ranks: it cannot be carried over to another number"
                    " of ranks"
                )
    return merged


def _merged_averaging(states: Sequence[Any]) -> dict[str, Any]:
    if any(not isinstance(state, dict) for state in states):
        raise StateError("some states are of a wire that averages models, and some are not")
    if len({where_it_is(state) for state in states}) > 1:
        raise StateError("the states are of different training steps: give those that were saved together")
    return {
        **cloned(states[0]),
        "parameters": _means([state["parameters"] for state in states]),
        "buffers": _means([state["buffers"] for state in states]),
    }


def where_it_is(averaging: Mapping[str, Any] | None) -> str:
    """At which point of averaging a state was saved; the same on all ranks."""
    if averaging is None:
        return "nowhere"
    flights = [(one["fragment"], one["due"]) for one in averaging["in_flight"]]
    return f"after step {averaging['step']}, {averaging['used']} averages, under way {flights}"


def _means(states: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    means = {}
    for name, first in states[0].items():
        if first.is_floating_point() or first.is_complex():
            precise = torch.promote_types(first.dtype, torch.float64)
            means[name] = torch.stack([state[name].to(precise) for state in states]).mean(0).to(first.dtype)
        else:
            means[name] = first.clone()
    return means
