"""A sharded optimizer's state: whole, as `torch.optim` has it, and in parts, one for each rank.

In the whole, parameters are numbered through all groups. In a part, which is the state_dict of one rank's
optimizer, they are numbered among those that the rank owns.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from thinwire.errors import StateError

FORMAT = 1
_WHOLE = {"state", "param_groups"}
_SHARD = _WHOLE | {"format", "owned"}
_OF_PARAMETERS = ("params", "param_names")
"""What a group has by parameter; the rest are options."""


def copied(tree: Any, copy: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> Any:
    """Nested dicts, lists and tuples anew, with their tensors as `copy` makes them."""
    if isinstance(tree, torch.Tensor):
        return copy(tree.detach())
    if isinstance(tree, Mapping):
        return {key: copied(value, copy) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)([copied(value, copy) for value in tree])
    return tree


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group without its parameters."""
    return {key: value for key, value in group.items() if key not in _OF_PARAMETERS}


def packed_groups(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Groups as a state_dict has them: with numbers instead of parameters."""
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
    """State by number in the whole, from the parts of some ranks; `owned[rank][group]` are their numbers."""
    whole = {}
    for rank, part in parts.items():
        numbers = [number for group in owned[rank] for number in group]
        locals_ = [local for group in part["param_groups"] for local in group["params"]]
        for local, number in zip(locals_, numbers, strict=True):
            if local in part["state"]:
                whole[number] = part["state"][local]
    return dict(sorted(whole.items()))


def part_of(whole: Mapping[str, Any], owned: Sequence[Sequence[int]]) -> dict[str, Any]:
    """What the owner's optimizer loads of a whole; copies, so that training does not change the whole."""
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
    """A saved whole, numbered as this optimizer numbers its parameters; StateError if it does not fit."""
    if not isinstance(whole, Mapping) or not set(whole) >= _WHOLE:
        raise StateError(
            "this is no optimizer's state: it needs 'state' and 'param_groups', as state_dict() returns"
        )
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
        raise StateError(f"the saved state has values for {strangers}, which no group of its lists as params")
    # torch's own loading leaves None for what other ranks own.
    state = {numbers[each]: value for each, value in whole["state"].items() if value is not None}
    return {"state": state, "param_groups": list(saved)}


def shard_of(
    part: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    owned: Sequence[Sequence[Sequence[int]]],
    rank: int,
) -> dict[str, Any]:
    """What a rank saves for itself.

    Checkpoints of many ranks take equal keys for equal values. So they are here: a parameter's state is on
    one rank only and stands under its number in the whole, and what a rank owns under the rank's name.
    """
    numbers = sorted(number for group in owned[rank] for number in group)
    return {
        "format": FORMAT,
        "owned": {f"{rank} of {len(owned)}": numbers},
        "param_groups": packed_groups(groups),
        "state": {str(number): value for number, value in whole_of({rank: part}, owned).items()},
    }


def joined(shards: object, needed: Sequence[Sequence[int]]) -> dict[str, Any]:
    """A whole, or as much of it as is `needed`, from what ranks saved; they may have been more or fewer."""
    each = [shards] if isinstance(shards, Mapping) else shards
    if not isinstance(each, Sequence) or isinstance(each, str) or not each:
        raise StateError(f"{type(shards).__name__} is neither a sharded_state_dict nor a list of some")
    state: dict[int, Any] = {}
    owners: dict[int, str] = {}
    for shard in each:
        if not isinstance(shard, Mapping) or not set(shard) >= _SHARD:
            raise StateError(
                "this is no shard of an optimizer's state: it needs what sharded_state_dict() returned"
            )
        if shard["format"] != FORMAT:
            raise StateError(f"format {shard['format']!r} is not {FORMAT}: another version wrote this shard")
        for owner, numbers in shard["owned"].items():
            for number in numbers:
                if owners.setdefault(number, owner) != owner:
                    raise StateError(
                        f"parameter {number} is owned by rank {owners[number]} and by rank {owner}: give"
                        " shards that one job saved together"
                    )
        state.update({int(number): value for number, value in shard["state"].items()})
    missing = sorted({number for group in needed for number in group} - set(owners))
    if missing:
        raise StateError(
            f"the shards of ranks {', '.join(sorted(set(owners.values())))} do not have parameters {missing},"
            " which this rank owns now: after a change of the number of ranks, give every rank the list of"
            " all that were saved"
        )
    return {"state": state, "param_groups": each[0]["param_groups"]}


def merged(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One optimizer state from those of all ranks under `ZeRO`, each with the parameters that it owns.

    Load it on any number of ranks: each keeps what it owns there. Where every rank has state of its own for
    all parameters, as with averaged models, the last one's is taken.

    Example::

        states = [torch.load(f"optimizer-{rank}.pt") for rank in range(old_world_size)]
        optimizer.load_state_dict(thinwire.merge_optimizer_states(states))
    """
    whole: dict[Any, Any] = {}
    for state in states:
        if not isinstance(state, Mapping) or not {"state", "param_groups"} <= set(state):
            raise StateError("give what optimizer.state_dict() returned on each rank")
        if state["param_groups"] != states[0]["param_groups"]:
            raise StateError("the states' parameter groups differ: give those that were saved together")
        whole.update(state["state"])
    return {**states[0], "state": dict(sorted(whole.items()))}
