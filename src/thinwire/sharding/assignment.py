"""Which rank owns which parameter: pure, so that every rank finds the same answer alone."""

from collections.abc import Sequence
from typing import TypeAlias

Assignment: TypeAlias = list[list[list[int]]]
"""`assignment[rank][group]`: the numbers of the parameters owned, counted through all groups."""


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
