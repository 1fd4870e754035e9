"""Comparison of replicas: a check that all ranks hold the same parameters, bit by bit."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from thinwire.codecs.draws import random_words
from thinwire.engine.comm.rendezvous import ranks_text
from thinwire.engine.ops import AllGather, Collectives
from thinwire.engine.pack import real_numbers
from thinwire.errors import DriftError

_WORD = 4
"""Bytes of a word. With words as wide as the sum, two changed top bits would cancel."""
_ROW = 1 << 14
"""Words of a row. A row and its products fit a core's cache, which makes this several times faster."""
_ROWS_AT_ONCE = 64
_SAMPLE = 64


def fingerprint(tensor: torch.Tensor, factors: torch.Tensor | None = None) -> torch.Tensor:
    """Return a 64-bit number that changes with any single changed bit, and with the order of elements.

    It is the sum of all words modulo 2^64, each times an odd number that depends on its place in its row,
    and each row times one that depends on the row's place.

    Args:
        tensor: The tensor.
        factors: The numbers of a row on the tensor's device, which several calls can share.
    """
    words = _words(tensor)
    if factors is None:
        factors = _factors(_ROW, words.device)
    at_once = 1 if words.device.type == "cpu" else _ROWS_AT_ONCE
    whole = words.numel() // _ROW
    sums = [
        words[start * _ROW : min(start + at_once, whole) * _ROW].view(-1, _ROW).long().mul_(factors).sum(1)
        for start in range(0, whole, at_once)
    ]
    rest = words[whole * _ROW :]
    last = rest.long().mul_(factors[: rest.numel()]).sum()
    if not sums:
        return last
    rows = torch.cat([*sums, last.reshape(1)])
    return (rows * _factors(rows.numel(), rows.device)).sum()


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes as 32-bit numbers, in its own memory where that is aligned, padded by zeros."""
    real = real_numbers(tensor.detach().contiguous()).reshape(-1)
    missing = -real.nbytes % _WORD
    if missing or real.storage_offset() * real.element_size() % _WORD:
        padded = real.new_zeros((real.nbytes + missing) // real.element_size())
        padded[: real.numel()] = real
        real = padded
    return real.view(torch.int32)


def _factors(count: int, device: torch.device) -> torch.Tensor:
    """Return odd numbers by place, the first of which is 1.

    They are random, because with evenly spaced ones some changes in several places would cancel. They are not
    cached: a tensor that outlives its call belongs to the call's stream and modes.
    """
    return random_words(count, device) | 1


def fingerprints(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return one fingerprint per tensor."""
    factors: dict[torch.device, torch.Tensor] = {}
    found = []
    for tensor in tensors:
        if tensor.device not in factors:
            factors[tensor.device] = _factors(_ROW, tensor.device)
        found.append(fingerprint(tensor, factors[tensor.device]))
    return torch.stack(found)


def gather_fingerprints(own: torch.Tensor, active: bool) -> Collectives[torch.Tensor]:
    """Gather all ranks' fingerprints, without a read by the host, for `find_drift` after backward.

    Args:
        own: This rank's fingerprints.
        active: Whether this rank has inputs. Ranks that have run out of them (Join) take part but are not
            compared, since their parameters are updated at the end.

    Returns:
        A row for each rank: whether it is active, and its fingerprints.
    """
    gathered: torch.Tensor = yield AllGather(torch.cat([own.new_full((1,), active), own]))
    return gathered


class Drift(NamedTuple):
    """Replicas that differ, as all ranks see it."""

    error: DriftError
    """The first parameter that differs, and the ranks on which it does."""
    smallest: int
    """The index of the smallest parameter that differs."""


def find_drift(
    names: Sequence[str], sizes: Sequence[int], gathered: torch.Tensor, step: int, ranks: Sequence[int]
) -> Drift | None:
    """Compare all ranks' fingerprints. The host waits for them.

    Args:
        names: The parameters' names.
        sizes: The numbers of elements of the parameters.
        gathered: The result of `gather_fingerprints`.
        step: The step, for the error.
        ranks: The ranks of the world, by rank of the group, for the error.

    Returns:
        The differences, the same on every rank, or None if there are none.
    """
    held = gathered.tolist()  # the only read
    rows = {rank: row[1:] for rank, row in zip(ranks, held, strict=True) if row[0]}
    first, reference = next(iter(rows.items()))
    if all(row == reference for row in rows.values()):
        return None
    differs = [len(set(column)) > 1 for column in zip(*rows.values(), strict=True)]
    place = differs.index(True)
    drifted = [rank for rank, row in rows.items() if row[place] != reference[place]]
    error = DriftError(
        f"at step {step} parameter {names[place]!r} on {ranks_text(drifted)} differs from that on rank"
        f" {first} ({sum(differs)} of {len(names)} parameters differ): parameters were"
        " updated on some ranks only (by an optimizer's state, a skipped step, an in-place edit). Fix"
        " that, and resume from the last checkpoint that passed the check; attach(..., check_every=0) turns"
        " it off, for replicas that differ on purpose"
    )
    return Drift(error, min((size, index) for index, size in enumerate(sizes) if differs[index])[1])


def sample_of(tensor: torch.Tensor) -> list[float]:
    """Return a few numbers of a tensor, evenly spaced, for `only_rounded`."""
    numbers = real_numbers(tensor.detach()).reshape(-1)
    sample: list[float] = numbers[:: max(1, numbers.numel() // _SAMPLE)][:_SAMPLE].tolist()
    return sample


def only_rounded(samples: Sequence[Sequence[float]], dtype: torch.dtype, steps: int) -> bool:
    """Return whether rounding explains how far replicas have drifted apart.

    torch's optimizers round differently on different kinds of processors. In every step, a number changes by
    about one unit in its last place then, as in a random walk.

    Args:
        samples: Numbers of the same parameter from the ranks to compare.
        dtype: The parameter's dtype.
        steps: The number of steps that the replicas have taken.
    """
    rows = torch.tensor([list(sample) for sample in samples], dtype=torch.float64, device="cpu")
    limit = 8 * torch.finfo(dtype).eps * math.sqrt(steps)
    return bool(((rows - rows[0]).norm(dim=1) <= limit * rows[0].norm()).all())


def compare_replicas(
    names: Sequence[str], own: torch.Tensor, step: int, ranks: Sequence[int]
) -> Collectives[torch.Tensor]:
    """Gather all ranks' fingerprints and compare them at once. Not for use inside backward.

    Args:
        names: The parameters' names.
        own: This rank's fingerprints, in the same order.
        step: The step, for the error.
        ranks: The ranks of the world, by rank of the group, for the error.

    Returns:
        `own`.

    Raises:
        DriftError: A parameter differs between ranks.
    """
    gathered = yield from gather_fingerprints(own, active=True)
    drift = find_drift(names, [1] * len(names), gathered, step, ranks)
    if drift is not None:
        raise drift.error
    return own
