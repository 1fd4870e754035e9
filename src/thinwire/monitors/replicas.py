"""Comparison of replicas: a check that all ranks hold the same parameters, bit by bit."""

from collections.abc import Iterable, Sequence

import torch

from thinwire.engine.ops import AllGather, Steps
from thinwire.engine.pack import real_numbers
from thinwire.engine.rendezvous import ranks_text
from thinwire.errors import DriftError

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 20
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 / golden ratio, as a signed number


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Return a 64-bit number that changes with any single changed bit, and with the order of elements.

    It is the sum of all words modulo 2^64, each times an odd number that depends on its place.
    """
    real = real_numbers(tensor.contiguous())
    words = real.reshape(-1).view(_WORDS[real.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), _CHUNK):
        chunk = words[start : start + _CHUNK].to(torch.int64)
        places = torch.arange(start, start + chunk.numel(), dtype=torch.int64, device=tensor.device)
        total += (chunk * (2 * (places * _ODD) + 1)).sum()
    return total


def fingerprints(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return one fingerprint per tensor."""
    return torch.stack([fingerprint(tensor) for tensor in tensors])


def gather_fingerprints(own: torch.Tensor, active: bool) -> Steps[torch.Tensor]:
    """Gather all ranks' fingerprints, without a read by the host, for `check_replicas` after backward.

    Args:
        own: This rank's fingerprints.
        active: Whether this rank has inputs. Ranks that have run out of them (Join) take part but are not
            compared, since their parameters are updated at the end.

    Returns:
        A row for each rank: whether it is active, and its fingerprints.
    """
    gathered: torch.Tensor = yield AllGather(torch.cat([own.new_full((1,), active), own]))
    return gathered


def check_replicas(names: Sequence[str], gathered: torch.Tensor, step: int) -> None:
    """Compare all ranks' fingerprints. The host waits for them.

    Args:
        names: The parameters' names.
        gathered: The result of `gather_fingerprints`.
        step: The step, for the error.

    Raises:
        DriftError: A parameter differs between ranks. Raised on every rank, with the name of the first that
            differs.
    """
    rows = {rank: row[1:] for rank, row in enumerate(gathered.tolist()) if row[0]}  # the only read
    first, reference = next(iter(rows.items()))
    if all(row == reference for row in rows.values()):
        return
    differs = [len(set(column)) > 1 for column in zip(*rows.values(), strict=True)]
    place = differs.index(True)
    drifted = [rank for rank, row in rows.items() if row[place] != reference[place]]
    raise DriftError(
        f"at step {step} parameter {names[place]!r} on {ranks_text(drifted)} differs from that on rank"
        f" {first} ({sum(differs)} of {len(names)} parameters differ): parameters were"
        " updated on some ranks only (by an optimizer's state, a skipped step, an in-place edit). Fix"
        " that, and resume from the last checkpoint that passed the check"
    )


def compare_replicas(names: Sequence[str], own: torch.Tensor, step: int) -> Steps[torch.Tensor]:
    """Gather all ranks' fingerprints and compare them at once. Not for use inside backward.

    Args:
        names: The parameters' names.
        own: This rank's fingerprints, in the same order.
        step: The step, for the error.

    Returns:
        `own`.

    Raises:
        DriftError: A parameter differs between ranks.
    """
    check_replicas(names, (yield from gather_fingerprints(own, active=True)), step)
    return own
