"""The assignment of parameters to owners, in pure functions, so that ranks agree without communicating."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

Assignment: TypeAlias = list[list[list[int]]]
"""The parameters owned, as `assignment[rank][group]`, by their index over all groups."""

_BUCKET = (25 << 20) // 4
"""Elements of float32 in a DDP bucket of the default size."""


def assign(groups: Sequence[Sequence[int]], ranks: int) -> Assignment:
    """Assign parameters to ranks, group by group, the largest first, each to the least loaded rank.

    This is the assignment of torch's ZeroRedundancyOptimizer, so that shards and their order can be compared.
    A group that is added later does not change the assignment of earlier groups. No rank has more than
    1/`ranks` of the whole plus one parameter.

    Args:
        groups: The sizes of the parameters in each group.
        ranks: The number of ranks.

    >>> assign([[3, 5, 1], [4]], ranks=2)
    [[[1], []], [[0, 2], [3]]]
    """
    loads = [0] * ranks
    assignment: Assignment = [[[] for _ in groups] for _ in range(ranks)]
    start = 0
    for place, sizes in enumerate(groups):
        for number in sorted(range(len(sizes)), key=lambda each: -sizes[each]):
            rank = loads.index(min(loads))
            assignment[rank][place].append(start + number)
            loads[rank] += sizes[number]
        start += len(sizes)
    return assignment


def in_runs(groups: Sequence[Sequence[int]], ranks: int) -> Assignment:
    """Assign runs of neighbouring parameters, about a DDP bucket each, to ranks in turn.

    The first run is at the model's end, whose gradients are complete first.

    Args:
        groups: The sizes of the parameters in each group.
        ranks: The number of ranks.

    >>> in_runs([[4, 4, 1]], ranks=2)
    [[[1, 2]], [[0]]]
    """
    assignment: Assignment = [[[] for _ in groups] for _ in range(ranks)]
    numbered = [(place, size) for place, sizes in enumerate(groups) for size in sizes]
    most = min(_BUCKET, -(-sum(size for _, size in numbered) // ranks))
    run = filled = 0
    for number, (place, size) in reversed(list(enumerate(numbered))):
        if filled and filled + size > most:
            run, filled = run + 1, 0
        assignment[run % ranks][place].insert(0, number)
        filled += size
    return assignment


def spread_out(groups: Sequence[Sequence[int]], ranks: int) -> Assignment:
    """Assign parameters to ranks from the model's end, each to the least loaded rank.

    Neighbours, which share a bucket, then have different owners, so that every bucket sends about the same
    amount to each rank. With `assign` one direction of a link is idle while the other carries a bucket's
    surplus.

    Args:
        groups: The sizes of the parameters in each group.
        ranks: The number of ranks.

    >>> spread_out([[4, 4, 1]], ranks=2)
    [[[0, 2]], [[1]]]
    """
    loads = [0] * ranks
    assignment: Assignment = [[[] for _ in groups] for _ in range(ranks)]
    numbered = [(place, size) for place, sizes in enumerate(groups) for size in sizes]
    for number, (place, size) in reversed(list(enumerate(numbered))):
        rank = loads.index(min(loads))
        assignment[rank][place].insert(0, number)
        loads[rank] += size
    return assignment


def owners(sizes: Mapping[str, int], ranks: int, *, spread: bool) -> dict[str, int]:
    """Return the owner of each parameter by name, with all parameters in one group.

    Args:
        sizes: The number of elements of each parameter.
        ranks: The number of ranks.
        spread: Whether neighbours have different owners (`spread_out`) or the same (`in_runs`).

    >>> owners({"a": 4, "b": 4, "c": 1}, 2, spread=True)
    {'a': 0, 'b': 1, 'c': 0}
    """
    assignment = (spread_out if spread else in_runs)([list(sizes.values())], ranks)
    found = {number: rank for rank, (numbers,) in enumerate(assignment) for number in numbers}
    return {name: found[number] for number, name in enumerate(sizes)}
