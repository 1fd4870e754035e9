"""The division of a bucket's numbers over ranks, as slices of its parameters."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch

from thinwire.programs.program import Bucket


class Piece(NamedTuple):
    """A slice of one parameter's numbers."""

    parameter: int
    """The parameter's place in the bucket."""
    start: int
    stop: int

    @property
    def length(self) -> int:
        """The number of elements."""
        return self.stop - self.start


Share = tuple[Piece, ...]
"""The pieces that one rank averages."""


@dataclass(frozen=True)
class Division:
    """A bucket's numbers divided over ranks.

    Attributes:
        coded: The share of each rank in the parameters that are encoded. Shares begin and end at block
            boundaries, and no block has numbers of two parameters.
        exact: The share of each rank in the parameters that are averaged exactly.
    """

    coded: tuple[Share, ...]
    exact: tuple[Share, ...]

    @classmethod
    def of(cls, bucket: Bucket, block: int) -> "Division":
        """Return the division of a bucket whose numbers are encoded in blocks of this length."""
        pairs = 2 if bucket.buffer.is_complex() else 1
        lengths = tuple(pairs * shape.numel() for shape in bucket.shapes)
        exact = tuple(name in bucket.exact for name in bucket.names)
        return _divided(lengths, exact, block, bucket.world_size)


@lru_cache(maxsize=4096)
def _divided(lengths: tuple[int, ...], exact: tuple[bool, ...], block: int, ranks: int) -> Division:
    coded = [number for number, spared in enumerate(exact) if not spared]
    spared = [number for number, spared in enumerate(exact) if spared]
    return Division(_shares(coded, lengths, block, ranks), _shares(spared, lengths, 1, ranks))


def _shares(members: Sequence[int], lengths: Sequence[int], block: int, ranks: int) -> tuple[Share, ...]:
    """Divide parameters into runs of equally many blocks. The last run may be shorter or empty."""
    # Blocks are numbered over all members. Rank r has blocks [r * most, (r + 1) * most), cut where members
    # end, so that no piece spans two of them.
    blocks = [-(-lengths[member] // block) for member in members]
    most = -(-sum(blocks) // ranks)
    shares: list[list[Piece]] = [[] for _ in range(ranks)]
    for member, first, count in zip(members, accumulate(blocks, initial=0), blocks, strict=False):
        taken = 0
        while taken < count:
            rank = (first + taken) // most
            end = min(count, (rank + 1) * most - first)
            shares[rank].append(Piece(member, taken * block, min(end * block, lengths[member])))
            taken = end
    return tuple(map(tuple, shares))


def in_pieces(tensors: Sequence[torch.Tensor], share: Share) -> list[torch.Tensor]:
    """Return a share's pieces as views of the parameters' flat tensors."""
    return [tensors[piece.parameter][piece.start : piece.stop] for piece in share]


def numbers_in(share: Share) -> int:
    """Return the number of elements in a share."""
    return sum(piece.length for piece in share)
