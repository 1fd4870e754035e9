"""Which rank owns which parameter: pure, so that every rank finds the same answer alone."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

Assignment: TypeAlias = list[list[list[int]]]
"""`assignment[rank][group]`: the numbers of the parameters owned, counted through all groups."""

_BUCKET = (25 << 20) // 4
"""Numbers in a bucket of DDP's, by default."""


def assign(groups: Sequence[Sequence[int]], ranks: int) -> Assignment:
    """Share out parameters of these sizes: group after group, the largest first, to whoever has least so far.

    The same as torch's, so that shards and their order can be compared; a group that comes later does not
    move those before it. No rank has more than 1/`ranks` of the whole and one parameter.

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
    """Runs of neighbours, about a bucket of DDP's each, go round the ranks, beginning at the model's end.

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


def owners(sizes: Mapping[str, int], ranks: int, *, spread: bool) -> dict[str, int]:
    """The owner of each parameter by name, as one group.

    >>> owners({"a": 4, "b": 4, "c": 1}, 2, spread=True)
    {'a': 0, 'b': 1, 'c': 0}
    """
    assignment = (assign if spread else in_runs)([list(sizes.values())], ranks)
    found = {number: rank for rank, (numbers,) in enumerate(assignment) for number in numbers}
    return {name: found[number] for number, name in enumerate(sizes)}
