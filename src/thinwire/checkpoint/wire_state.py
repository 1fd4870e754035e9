"""Validation of a wire's saved state, and merging of all ranks' states for another number of ranks."""

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from thinwire.checkpoint.rank_keys import choose, rank_key
from thinwire.checkpoint.trees import copied
from thinwire.checkpoint.validate import check_count, check_tensor
from thinwire.engine.comm.agreement import Described, agreeing, shown
from thinwire.engine.comm.group_communicator import GroupCommunicator
from thinwire.engine.pack import real_numbers
from thinwire.errors import StateError
from thinwire.programs.memory import Memory, is_model_slot, is_residual, is_whole_residual

FORMAT = 1
_KEYS = {"format", "program", "written", "schedule_ended", "step", "rank", "world_size"}
_KEYS |= {"buckets", "scale", "memory"}
"""The keys of the wire itself. All others are entries of its strategy."""
_SIZED = re.compile(r"(?:.*: )?q (\d{1,9})x(\d{1,9})")
"""The slots of PowerSGD's factors, which are named by their shape."""


@contextlib.contextmanager
def readable() -> Iterator[None]:
    """Turn any exception from reading a damaged state into a StateError."""
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
def all_or_none(communicator: GroupCommunicator, topic: str) -> Iterator[dict[str, str | Described]]:
    """Validate a state on all ranks, so that either all of them accept it or all raise. Collective.

    Args:
        communicator: The wire's communicator.
        topic: The operation's name, for error messages.

    Yields:
        A dict to put values in that must be equal on all ranks.

    Raises:
        StateError: This rank's state is not valid.
        MismatchError: Another rank's state is not valid, or the values differ.
    """
    with agreeing(communicator.rendezvous, communicator.limit, topic) as agreed, readable():
        yield agreed


def saved(
    *,
    program: Described,
    schedule_ended: bool,
    step: int,
    place: tuple[int, int],
    buckets: Sequence[Sequence[str]] | None,
    memory: Memory,
    strategy: Mapping[str, Any],
) -> dict[str, Any]:
    """Return a wire's state, with the entries of its strategy.

    Raises:
        StateError: The strategy uses a key of the wire's own.
    """
    own = {
        "format": FORMAT,
        "program": program.full,
        "written": program.written,
        "schedule_ended": schedule_ended,
        "step": step,
        "rank": place[0],
        "world_size": place[1],
        # Blocks that share a scale, and Gloo's order of sums, depend on a bucket's members. A resumed run
        # keeps the saved grouping, so that its results equal those of an uninterrupted one bit by bit.
        "buckets": [list(group) for group in buckets or ()],
        "scale": memory.scale,
        "memory": memory.state_dict(),
    }
    taken = sorted(own.keys() & strategy.keys())
    if taken:
        raise StateError(
            f"the strategy of {program} saves an entry {taken[0]!r}, which the wire's own state has: give it"
            " another key in Strategy.state_dict()"
        )
    return {**own, **strategy}


def ranked(inner: dict[str, Any]) -> dict[str, Any]:
    """Return the state under its rank's key, on the CPU, since other ranks may lack this device."""
    return {rank_key(inner["rank"], inner["world_size"]): (copied(inner, torch.Tensor.cpu),)}


def program_of(state: Mapping[str, Any]) -> Described:
    """Return the program of a saved state."""
    return Described(str(state["program"]), str(state["written"]))


def own_states(
    state: object, programs: Sequence[Described], rank: int, world_size: int
) -> tuple[bool, list[dict[str, Any]]]:
    """Return whether states of another number of ranks must be merged, and the validated states.

    Args:
        state: This rank's own state, or the states of all ranks of a job of another size.
        programs: The programs that may continue from it, the running one last.
        rank: This rank.
        world_size: The number of ranks.

    Raises:
        StateError: The state does not fit.
    """
    saved_size, found = choose(state, rank, world_size)
    states = [_checked(own, programs, (saver, saved_size)) for saver, own in found.items()]
    steps = sorted({own["step"] for own in states})
    if len(steps) > 1:
        raise StateError(f"the states are of the steps {steps}: pass states that were saved together")
    if len({own["program"] for own in states}) > 1:
        raise StateError("the states are of different programs: pass states that were saved together")
    return saved_size != world_size, states


def _checked(state: object, programs: Sequence[Described], place: tuple[int, int]) -> dict[str, Any]:
    if not isinstance(state, Mapping) or not set(state) >= _KEYS:
        raise StateError("this is not a state of a thinwire wire: pass the result of wire.state_dict()")
    if state["format"] != FORMAT:
        raise StateError(
            f"format {state['format']!r} is not {FORMAT}: the state was written by another version"
        )
    if state["program"] not in [program.full for program in programs]:
        saved_program, running = shown([program_of(state), programs[-1]])
        raise StateError(
            f"the state belongs to {saved_program}, but {running} is running: attach the saved program, load,"
            " and swap afterwards"
        )
    for key in ("step", "rank", "world_size"):
        check_count(key, state[key])
    groups = state["buckets"]
    if not isinstance(groups, list) or not all(isinstance(group, list) for group in groups):
        raise StateError(f"buckets must be lists of names, not {groups!r}")
    scale = state["scale"]
    if scale is not None and not (isinstance(scale, float) and 0 < scale < math.inf):
        raise StateError(f"scale={scale!r} must be a GradScaler's scale, a positive number, or None")
    if not isinstance(state["schedule_ended"], bool):
        raise StateError(f"schedule_ended={state['schedule_ended']!r} must be True or False")
    if (state["rank"], state["world_size"]) != place:
        raise StateError(
            f"the state under {rank_key(*place)!r} was saved by rank {state['rank']} of"
            f" {state['world_size']}: states were mixed up, load each rank's own state"
        )
    return dict(state)


def memory_for(parameters: Mapping[str, torch.Tensor], own: Mapping[str, Any]) -> Memory:
    """Return the programs' saved memory, validated and moved to the parameters' devices.

    Args:
        parameters: The model's parameters by name.
        own: This rank's state, its own or the merged one.

    Raises:
        StateError: A slot does not fit its parameter.
    """
    memory, state = Memory(), own["memory"]
    memory.scale = own["scale"]
    memory.load_state_dict(state, {name: parameter.shape for name, parameter in parameters.items()})
    for name, slots in state.items():
        for key, tensor in slots.items():
            _check_slot(f"{key!r} of {name}", str(key), tensor, parameters[name])
            memory.put(name, str(key), tensor.detach().to(parameters[name].device, copy=True))
    return memory


def _check_slot(what: str, key: str, tensor: torch.Tensor, parameter: torch.Tensor) -> None:
    """Raise StateError if a residual or a factor of PowerSGD does not fit. Other slots need only be dense."""
    residual, sized = is_residual(key), _SIZED.fullmatch(key)
    check_tensor(what, tensor, finite=residual or sized is not None)
    real = real_numbers(parameter)
    if residual and not tensor.is_floating_point():
        raise StateError(f"the saved {what} is {tensor.dtype}: a residual must be floating-point")
    if is_whole_residual(key) and tensor.shape != real.shape:
        raise StateError(f"the saved {what} has shape {tuple(tensor.shape)}, not {tuple(real.shape)}")
    if sized is not None:
        dtype = torch.promote_types(real.dtype, torch.float32)
        if tensor.shape != (int(sized[1]), int(sized[2])) or tensor.dtype != dtype:
            raise StateError(
                f"the saved {what} has shape {tuple(tensor.shape)} and {tensor.dtype}, not what its name"
                f" says and {dtype}: the state is damaged, or of a model of another dtype"
            )


def merge_wire_states(
    states: Sequence[dict[str, Any]], merge: Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any]]
) -> dict[str, Any]:
    """Merge the states of all ranks into one, for every rank of a job of another size.

    Shared values are kept. Residuals are averaged, so that their contribution to the next mean stays the
    same.

    Args:
        states: States from `own_states`.
        merge: `Strategy.merge` of the strategy that continues from them.

    Raises:
        StateError: States differ that cannot be merged.
    """
    # Residuals are multiplied by the loss scale of their rank. No rank's gradients overflow at the smallest.
    scale = min((state["scale"] for state in states if state["scale"] is not None), default=None)
    ordered = sorted(states, key=lambda state: int(state["rank"]))
    memories = [_in_units_of(scale, state)["memory"] for state in ordered]
    entries = [{key: value for key, value in state.items() if key not in _KEYS} for state in ordered]
    return {
        **{key: value for key, value in ordered[0].items() if key in _KEYS},
        "scale": scale,
        "buckets": [],  # DDP's own: with another number of ranks sums are rounded otherwise anyway
        "memory": _merged_memory(memories),
        **merge(entries),
    }


def _in_units_of(scale: float | None, state: dict[str, Any]) -> dict[str, Any]:
    """Rescale a state's residuals to this loss scale, as scalers of ranks that train locally differ."""
    if scale is None or state["scale"] in (None, scale):
        return state
    factor = scale / state["scale"]
    memory = {
        name: {
            key: tensor * factor if is_residual(key) and not is_model_slot(key) else tensor
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
        for key in dict.fromkeys(key for held in slots for key in held):
            tensors = [held[key] for held in slots if key in held]
            if is_whole_residual(key):
                # W old residuals contribute sum(r) / W to the next mean. If each of the new ranks adds that
                # mean to its gradient, their mean contains it once, whatever their number. A rank without
                # the slot has the residual 0, so the sum is divided by all ranks.
                precise = torch.promote_types(tensors[0].dtype, torch.float32)  # half precision would round
                total = torch.stack([tensor.to(precise) for tensor in tensors]).sum(0)
                merged[name][key] = total / len(memories)
            elif _SIZED.fullmatch(key) or (
                len(tensors) == len(memories) and all(torch.equal(tensors[0], tensor) for tensor in tensors)
            ):
                # A factor of PowerSGD is where its next iteration begins. In the warm-up each rank computes
                # it by itself, and unlike hosts do not get the same last bits.
                merged[name][key] = tensors[0].clone()
            else:
                raise StateError(
                    f"{key!r} of {name} is not equal on all ranks: it cannot be loaded on another number of"
                    " ranks"
                )
    return merged
