"""Optimizer states: whole as in `torch.optim`, in parts of sharded optimizers, and local ones of replicas.

In the whole, parameters are numbered over all groups. In a part, which is the state_dict of one rank's
optimizer, they are numbered among the parameters that the rank owns.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from thinwire.checkpoint.dcp import PerRank
from thinwire.checkpoint.trees import copied
from thinwire.engine.pack import local_part
from thinwire.errors import StateError

FORMAT = 1
_WHOLE = {"state", "param_groups"}
_SHARD = _WHOLE | {"format", "owned"}
_OWNED = "thinwire_owned"
"""The key in a part's group for the indices of the parameters whose state belongs to the part."""
_OF_PARAMETERS = ("params", "param_names")
"""The keys of a group with one value per parameter. All others are options."""


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's options, without its parameters."""
    return {key: value for key, value in group.items() if key not in _OF_PARAMETERS}


def packed_groups(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return groups as in a state_dict, with numbers instead of parameters."""
    made, start = [], 0
    for group in groups:
        end = start + len(group["params"])
        others = {key: value for key, value in group.items() if key != "params"}
        made.append({**others, "params": list(range(start, end))})
        start = end
    return made


def whole_of(
    parts: Mapping[int, Mapping[str, Any]], owned: Sequence[Sequence[Sequence[int]]]
) -> dict[int, Any]:
    """Return the state by parameter number in the whole, from the parts of some ranks.

    Args:
        parts: Parts by rank.
        owned: The numbers of the parameters that each rank owns, as `owned[rank][group]`.
    """
    whole = {}
    for rank, part in parts.items():
        numbers = [number for group in owned[rank] for number in group]
        locals_ = [local for group in part["param_groups"] for local in group["params"]]
        for local, number in zip(locals_, numbers, strict=True):
            if local in part["state"]:
                whole[number] = part["state"][local]
    return dict(sorted(whole.items()))


def part_of(whole: Mapping[str, Any], owned: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return an owner's part of a whole, copied so that training does not change the whole."""
    numbers = [number for group in owned for number in group]
    state = {
        local: copied(whole["state"][number])
        for local, number in enumerate(numbers)
        if number in whole["state"]
    }
    groups, start = [], 0
    for group, own in zip(whole["param_groups"], owned, strict=True):
        groups.append({**copied(options_of(group)), "params": list(range(start, start + len(own)))})
        start += len(own)
    return {"state": state, "param_groups": groups}


def checked(whole: object, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a saved whole, renumbered as this optimizer numbers its parameters.

    Args:
        whole: A saved optimizer state.
        groups: The parameter groups of the optimizer that loads it.

    Raises:
        StateError: The state is not a whole optimizer state, or does not fit the groups.
    """
    if not isinstance(whole, Mapping) or not set(whole) >= _WHOLE:
        raise StateError(
            f"{type(whole).__name__} is not an optimizer's state: pass one with 'state' and 'param_groups',"
            " as state_dict() returns"
        )
    whole = merge_optimizer_states([whole])  # raises if it is one rank's part
    saved = whole["param_groups"]
    sizes, own_sizes = ([len(group["params"]) for group in side] for side in (saved, groups))
    if sizes != own_sizes:
        raise StateError(
            f"the saved state has groups of {sizes} parameters, this optimizer of {own_sizes}: it was saved"
            " from another model, or with other parameter groups"
        )
    numbers = {each: place for place, each in enumerate(each for group in saved for each in group["params"])}
    strangers = sorted(set(whole["state"]) - set(numbers), key=str)
    if strangers:
        raise StateError(f"the saved state has values for {strangers}, which are in none of its groups")
    # torch's own loading leaves None for parameters that other ranks own.
    state = {numbers[each]: value for each, value in whole["state"].items() if value is not None}
    return {"state": state, "param_groups": list(saved)}


def shard_of(
    part: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    owned: Sequence[Sequence[Sequence[int]]],
    rank: int,
) -> dict[str, Any]:
    """Return the shard that a rank saves.

    `torch.distributed.checkpoint` assumes that equal keys of different ranks have equal values. That holds
    here, because a parameter's state is on one rank only, under its number in the whole, and the list of
    owned parameters is under a key that names the rank.

    Args:
        part: The state_dict of this rank's optimizer.
        groups: The parameter groups of the whole.
        owned: The numbers of the parameters that each rank owns, as `owned[rank][group]`.
        rank: This rank.
    """
    numbers = sorted(number for group in owned[rank] for number in group)
    return {
        "format": FORMAT,
        "owned": {f"{rank} of {len(owned)}": numbers},
        "param_groups": packed_groups(groups),
        "state": {str(number): value for number, value in whole_of({rank: part}, owned).items()},
    }


def joined(shards: object, needed: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Join shards into a whole, or into a part of it that has all `needed` parameters.

    Args:
        shards: One shard, or the list of the shards of all ranks that saved. Their number may differ from
            now.
        needed: The numbers of the parameters in each group that must be present.

    Raises:
        StateError: The shards are not valid, overlap, or lack parameters that are needed.
    """
    each = [shards] if isinstance(shards, Mapping) else shards
    if not isinstance(each, Sequence) or isinstance(each, str) or not each:
        raise StateError(f"{type(shards).__name__} is neither a sharded_state_dict nor a list of them")
    state: dict[int, Any] = {}
    owners: dict[int, str] = {}
    for shard in each:
        if not isinstance(shard, Mapping) or not set(shard) >= _SHARD:
            raise StateError(
                "this is not a shard of an optimizer's state: pass the result of sharded_state_dict()"
            )
        if shard["format"] != FORMAT:
            raise StateError(f"format {shard['format']!r} is not {FORMAT}: another version wrote this shard")
        # Shards of two jobs, or of two saves, own some parameters twice, and their states would mix.
        for owner, numbers in shard["owned"].items():
            for number in numbers:
                if owners.setdefault(number, owner) != owner:
                    raise StateError(
                        f"parameter {number} is owned by rank {owners[number]} and by rank {owner}: pass"
                        " shards that one job saved together"
                    )
        state.update({int(number): value for number, value in shard["state"].items()})
    missing = sorted({number for group in needed for number in group} - set(owners))
    if missing:
        raise StateError(
            f"the shards of ranks {', '.join(sorted(set(owners.values())))} do not have parameters {missing},"
            " which this rank owns now: if the number of ranks has changed, pass the list of all saved shards"
            " on every rank"
        )
    return {"state": state, "param_groups": each[0]["param_groups"]}


def mark_owned(
    state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], others: Collection[int]
) -> dict[str, Any]:
    """Return a rank's optimizer state, marked in its groups with the parameters whose state it holds.

    Without the mark, a part would be indistinguishable from a whole in which some parameters have no state.

    Args:
        state: The result of `optimizer.state_dict()`.
        groups: The optimizer's own groups.
        others: The ids of the parameters that other ranks own.
    """
    marked = [
        {**saved, _OWNED: [place for place, held in enumerate(group["params"]) if id(held) not in others]}
        for saved, group in zip(state["param_groups"], groups, strict=True)
    ]
    return {**state, "param_groups": marked}


def forget_owned(groups: Iterable[dict[str, Any]]) -> None:
    """Remove the mark of `mark_owned` from groups, in place."""
    for group in groups:
        group.pop(_OWNED, None)


def check_owned(
    state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], owned: Mapping[str, torch.Tensor]
) -> None:
    """Raise StateError if a state is a part that lacks parameters that this rank steps.

    Args:
        state: A saved optimizer state, or an optimizer's own with parameters instead of numbers.
        groups: The groups of the optimizer that loads it.
        owned: The parameters that this rank steps, by name.
    """
    names = {id(parameter): name for name, parameter in owned.items()}
    # strict=False: this runs before torch's own validation, which reports groups of another size better.
    lost = [
        names[id(parameter)]
        for saved, group in zip(state["param_groups"], groups, strict=False)
        for place, (key, parameter) in enumerate(zip(saved["params"], group["params"], strict=False))
        if id(parameter) in names and place not in saved.get(_OWNED, [place]) and key not in state["state"]
    ]
    if lost:
        raise StateError(
            f"this optimizer state is one rank's part under ZeRO, without that of {lost[0]!r}"
            + (f" and {len(lost) - 1} more parameters" if len(lost) > 1 else "")
            + ", which this rank steps: its moments would be lost. Use thinwire.save_checkpoint, or save the"
            " result of wire.consolidate_optimizer_state(). Or save every rank's state, and load the result"
            " of thinwire.merge_optimizer_states"
        )


def merge_optimizer_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the optimizer states of all ranks under `ZeRO` into one.

    Load the result on any number of ranks. Each rank keeps the state of the parameters that it owns then. If
    every rank has a state of all parameters, as with averaged models, the last rank's is used.

    Args:
        states: The result of `optimizer.state_dict()` on each rank.

    Returns:
        A whole optimizer state.

    Raises:
        StateError: The states are not of one job, or some ranks' are missing.

    Example::

        states = [torch.load(f"optimizer-{rank}.pt") for rank in range(old_world_size)]
        optimizer.load_state_dict(thinwire.merge_optimizer_states(states))
    """
    whole: dict[Any, Any] = {}
    groups: list[dict[str, Any]] = []
    for state in states:
        if not isinstance(state, Mapping) or not {"state", "param_groups"} <= set(state):
            raise StateError("these are not optimizer states: pass each rank's optimizer.state_dict()")
        groups = groups or list(map(_unmarked, state["param_groups"]))
        if list(map(_unmarked, state["param_groups"])) != groups:
            raise StateError("the states' parameter groups differ: pass states that were saved together")
        whole.update(state["state"])
    for number, group in enumerate(groups):
        every = range(len(group["params"]))
        marks = [state["param_groups"][number].get(_OWNED, every) for state in states]
        owned = {place for mark in marks for place in mark}
        if any(place not in owned and key not in whole for place, key in enumerate(group["params"])):
            raise StateError(
                f"the states, of {len(states)} ranks under ZeRO, lack the state of some parameters, which"
                " other ranks owned: pass the states of all ranks that saved"
            )
    # Parameters are numbered in torch's own states, and named in those of torch.distributed.checkpoint.
    ordered = sorted(whole.items(), key=lambda item: (isinstance(item[0], str), item[0]))
    return {**states[0], "param_groups": groups, "state": dict(ordered)}


def _unmarked(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != _OWNED}


def per_rank(optimizers: Optimizer | Sequence[Optimizer], group: dist.ProcessGroup) -> PerRank:
    """Return one object that saves each rank's state of all optimizers, and loads it on any number of ranks.

    Args:
        optimizers: The optimizer, or all of them, in the same order at save and at load.
        group: The process group that ranks are numbered in.
    """
    listed = list(optimizers) if isinstance(optimizers, Sequence) else [optimizers]

    def merge(states: list[Any]) -> Any:
        return [merge_optimizer_states(each) for each in zip(*states, strict=True)]

    return PerRank(_Together(listed), merge=merge, group=group)


class _Together:
    """Several optimizers as one object."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers

    def state_dict(self) -> list[dict[str, Any]]:
        return [optimizer.state_dict() for optimizer in self._optimizers]

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        if len(states) != len(self._optimizers):
            raise StateError(
                f"the checkpoint has {len(states)} optimizers, and {len(self._optimizers)} were given: pass"
                " those that were saved, in the same order"
            )
        for optimizer, state in zip(self._optimizers, states, strict=True):
            optimizer.load_state_dict(state)


def local_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return a copy of an optimizer's state, with this rank's shard in place of each DTensor."""
    state: dict[str, Any] = copied(optimizer.state_dict(), lambda tensor: local_part(tensor).clone())
    return state


def load_local_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load the result of `local_state` on the same rank of another replica."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
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
    # Not at the top: the import takes a second, and replicas without shards do not need it.
    from torch.distributed.tensor import DTensor

    assert isinstance(parameter, DTensor)
    if value.dim() == 0 or value.shape != local_part(parameter).shape:
        return value.clone()  # such as a step count, which every shard has
    return DTensor.from_local(
        value.clone(),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
