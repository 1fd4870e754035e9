"""Do all ranks still hold the same parameters, bit by bit?"""

from collections.abc import Iterable, Sequence

import torch

from thinwire.errors import DriftError
from thinwire.wire.agree import ranks_text
from thinwire.wire.ops import AllGather, Steps

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 20
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 / golden ratio, as a signed number


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """A 64-bit number that changes with any single changed bit, and with the order of elements.

    The sum of all words, each times an odd number of its own place, modulo 2^64.
    """
    dense = tensor.detach().contiguous()
    real = torch.view_as_real(dense) if dense.is_complex() else dense
    words = real.reshape(-1).view(_WORDS[real.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), _CHUNK):
        chunk = words[start : start + _CHUNK].to(torch.int64)
        places = torch.arange(start, start + chunk.numel(), device=tensor.device)
        total += (chunk * (2 * (places * _ODD) + 1)).sum()
    return total


def fingerprints(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """One number per tensor."""
    return torch.stack([fingerprint(tensor) for tensor in tensors])


def compare_replicas(names: Sequence[str], own: torch.Tensor, step: int, active: bool) -> Steps[torch.Tensor]:
    """Gather all ranks' fingerprints; raise on every rank, naming the first parameter that differs.

    Ranks that are not `active`, having run out of inputs, take part but are not compared: their parameters
    are brought up to date at the end.
    """
    gathered = yield AllGather(torch.cat([own.new_tensor([active]), own]))
    ranks = gathered[:, 0].nonzero().flatten()
    table = gathered[ranks, 1:]
    differs = (table != table[0]).any(0)
    if differs.any():
        place = int(differs.nonzero()[0])
        drifted = ranks[table[:, place] != table[0, place]].tolist()
        raise DriftError(
            f"at step {step} parameter {names[place]!r} on {ranks_text(drifted)} is not what rank"
            f" {int(ranks[0])} holds ({int(differs.sum())} of {len(names)} parameters differ): something"
            " updates parameters on some ranks only (an optimizer's state, a skipped step, an in-place edit);"
            " resume from the last checkpoint that passed the check"
        )
    return own
