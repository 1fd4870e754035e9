"""State that is each rank's own, under a key that names the rank.

`torch.distributed.checkpoint` takes equal keys of different ranks for equal values and stores one of them, so
what ranks do not share must not share a key. It walks into dicts and lists and stores a tuple whole, so the
one value under the key is a tuple of one.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from thinwire.errors import StateError

_KEY = re.compile(r"rank (0|[1-9]\d{0,8}) of ([1-9]\d{0,8})")


def rank_key(rank: int, size: int) -> str:
    """The key of a rank's own state.

    >>> rank_key(1, 4)
    'rank 1 of 4'
    """
    return f"rank {rank} of {size}"


def place_of(key: object) -> tuple[int, int] | None:
    """The rank and the number of ranks that a key names; None for other keys.

    >>> place_of("rank 1 of 4"), place_of("rank 4 of 4"), place_of("step")
    ((1, 4), None, None)
    """
    match = _KEY.fullmatch(key) if isinstance(key, str) else None
    rank, size = (int(match[1]), int(match[2])) if match else (0, 0)
    return (rank, size) if rank < size else None


def by_rank(state: object) -> tuple[int, dict[int, Any]]:
    """How many ranks saved, and what is there of each; from one mapping, or a list of several.

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
                raise StateError(f"there are two states of rank {place[0]}: give each rank's once")
            sizes.add(place[1])
            found[place[0]] = value[0]
    if len(sizes) > 1:
        raise StateError(f"the states are of jobs with {sorted(sizes)} ranks: give all that one job saved")
    return sizes.pop(), found


def choose(state: object, rank: int, size: int) -> tuple[int, dict[int, Any]]:
    """How many ranks saved, and a rank's own state; or, of a job of another size, those of all its ranks.

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
        " what it saved itself. After a change of the number of ranks, give every rank the states of all that"
        " saved: the list of them, or thinwire.read_states(folder)"
    )


def _foreign(state: object) -> str:
    if isinstance(state, Mapping) and "format" in state:
        return f"format {state['format']!r} is not rank by rank: the state was written by another version"
    return (
        f"a {type(state).__name__} without 'rank 0 of 2' and the like is no state of a thinwire wire, nor of"
        " PerRank: it needs what state_dict() returns"
    )
