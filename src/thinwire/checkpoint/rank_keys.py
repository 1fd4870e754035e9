"""Keys that name a rank, for state that differs from rank to rank.

`torch.distributed.checkpoint` assumes that equal keys of different ranks have equal values and stores one of
them. Without a key per rank, all ranks would load one rank's residuals, and training would continue without
an error. DCP also loads only keys that the loading object has already, and a new wire has no residuals yet.
It flattens dicts and lists but stores a tuple whole, so the value under the key is a tuple of one element.

Within a rank's state, tensors are named by parameter and not by bucket: DDP rebuilds buckets after the first
backward, and a job with another `bucket_cap_mb` has others, so that a bucket's number says nothing about its
contents.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from thinwire.errors import StateError

_SHARD = re.compile(r"shard (0|[1-9]\d{0,8}) of ([1-9]\d{0,8})")
_KEY = re.compile(r"rank (0|[1-9]\d{0,8}) of ([1-9]\d{0,8})")


def rank_key(rank: int, size: int) -> str:
    """Return the key of a rank's own state.

    >>> rank_key(1, 4)
    'rank 1 of 4'
    """
    return f"rank {rank} of {size}"


def shard_key(shard: int, count: int) -> str:
    """Return the key of one shard's states, above those of ranks, which number its replicas.

    >>> shard_key(1, 2)
    'shard 1 of 2'
    """
    return f"shard {shard} of {count}"


def of_shard(state: object, key: str) -> object:
    """Return the part of a state that belongs to one shard, as states by rank.

    Args:
        state: States by shard and rank, or a list of them, or states by rank of the shard alone.
        key: The shard's key.

    Raises:
        StateError: The state has other shards, but not this one.

    >>> of_shard({"shard 0 of 2": {"rank 0 of 1": ("a",)}}, "shard 0 of 2")
    {'rank 0 of 1': ('a',)}
    """
    listed = isinstance(state, Sequence) and not isinstance(state, str)
    parts: Any = state if listed else [state]
    found, others = [], set()
    for part in parts:
        keys = part if isinstance(part, Mapping) else ()
        shards = {name for name in keys if _SHARD.fullmatch(str(name))}
        others |= shards
        if not shards:
            found.append(part)
        elif key in shards:
            found.append(part[key])
    if others and key not in others:
        raise StateError(
            f"the state has {', '.join(sorted(others))}, and this rank holds {key}: residuals belong to their"
            " shard; load on as many shards as saved them, or leave the wire's state out"
        )
    return found if listed else found[0]


def place_of(key: object) -> tuple[int, int] | None:
    """Return the rank and the number of ranks that a key names, or None for other keys.

    >>> place_of("rank 1 of 4"), place_of("rank 4 of 4"), place_of("step")
    ((1, 4), None, None)
    """
    match = _KEY.fullmatch(key) if isinstance(key, str) else None
    rank, size = (int(match[1]), int(match[2])) if match else (0, 0)
    return (rank, size) if rank < size else None


def by_rank(state: object) -> tuple[int, dict[int, Any]]:
    """Return the number of ranks that saved, and the states found by rank.

    Args:
        state: One mapping by rank key, or a list of several.

    Raises:
        StateError: The state is not by rank, or mixes those of several jobs.

    >>> by_rank([{"rank 0 of 2": ("a",)}, {"rank 1 of 2": ("b",)}])
    (2, {0: 'a', 1: 'b'})
    """
    parts = [state] if isinstance(state, Mapping) else state
    if not parts or not isinstance(parts, Sequence) or isinstance(parts, str):
        raise StateError(_foreign(state))
    found: dict[int, Any] = {}
    sizes = set()
    for part in parts:
        if not part or not isinstance(part, Mapping):
            raise StateError(_foreign(part))
        for key, value in part.items():
            place = place_of(key)
            if place is None or not isinstance(value, tuple | list) or len(value) != 1:
                raise StateError(_foreign(part))
            if place[0] in found:
                raise StateError(f"there are two states of rank {place[0]}: pass each rank's state once")
            sizes.add(place[1])
            found[place[0]] = value[0]
    if len(sizes) > 1:
        raise StateError(f"the states are of jobs with {sorted(sizes)} ranks: pass the states of one job")
    return sizes.pop(), found


def choose(state: object, rank: int, size: int) -> tuple[int, dict[int, Any]]:
    """Return the number of ranks that saved, and the states that a rank loads, by rank.

    These are the rank's own state if the number of ranks is unchanged, and all ranks' states otherwise.

    Args:
        state: One mapping by rank key, or a list of several.
        rank: The rank that loads.
        size: The number of ranks that load.

    Raises:
        StateError: The state is not by rank, or lacks a state that is needed.

    >>> choose({"rank 0 of 2": ("a",), "rank 1 of 2": ("b",)}, rank=1, size=2)
    (2, {1: 'b'})
    >>> choose({"rank 0 of 2": ("a",), "rank 1 of 2": ("b",)}, rank=1, size=3)
    (2, {0: 'a', 1: 'b'})
    """
    saved_size, found = by_rank(state)
    if saved_size == size and rank in found:
        return size, {rank: found[rank]}
    if saved_size != size and len(found) == saved_size:
        return saved_size, dict(sorted(found.items()))
    ranks = f"rank{'s' if len(found) > 1 else ''} {', '.join(map(str, sorted(found)))}"
    raise StateError(
        f"the state is that of {ranks} of {saved_size}, and this is rank {rank} of {size}: each rank loads"
        " its own state. If the number of ranks has changed, pass the states of all ranks that saved, as a"
        " list or by thinwire.read_states(folder)"
    )


def _foreign(state: object) -> str:
    return (
        f"a {type(state).__name__} without keys like 'rank 0 of 2' is not a state of a thinwire wire, nor of"
        " PerRank: pass the result of state_dict()"
    )
