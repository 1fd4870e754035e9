"""Who owns which parameter."""

from collections.abc import Mapping

_BUCKET_NUMBERS = 25 * (1 << 20) // 4


def spread(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """An owner for each parameter, loads as even as whole parameters allow; neighbours go to different ranks.

    >>> spread({"a": 4, "b": 4, "c": 1}, 2)
    {'a': 0, 'b': 1, 'c': 0}
    """
    loads = [0] * count
    owners = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += sizes[name]
    return {name: owners[name] for name in sizes}


def in_runs(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """Runs of neighbours, about a bucket of DDP's each, go round the ranks, from the model's end.

    >>> in_runs({"a": 4, "b": 4, "c": 1}, 2)
    {'a': 1, 'b': 1, 'c': 0}
    """
    most = min(_BUCKET_NUMBERS, -(-sum(sizes.values()) // count))
    owners, run, filled = {}, 0, 0
    for name in reversed(list(sizes)):
        if filled and filled + sizes[name] > most:
            run, filled = run + 1, 0
        owners[name] = run % count
        filled += sizes[name]
    return {name: owners[name] for name in sizes}
