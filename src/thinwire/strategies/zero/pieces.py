"""A bucket cut into pieces, one for each owner of some of its parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from thinwire.engine.ops import Collectives, Exchange
from thinwire.engine.pack import pack, unpack
from thinwire.programs.program import Bucket


@dataclass(frozen=True)
class Pieces:
    """Names and shapes of a bucket's parameters, grouped by owner."""

    names: tuple[tuple[str, ...], ...]
    shapes: tuple[tuple[torch.Size, ...], ...]

    @classmethod
    def of(cls, bucket: Bucket, owners: Mapping[str, int]) -> "Pieces":
        """Return the bucket's parameters grouped by owner."""
        held = list(zip(bucket.names, bucket.shapes, strict=True))
        by_owner = [[one for one in held if owners[one[0]] == rank] for rank in range(bucket.world_size)]
        return cls(
            tuple(tuple(name for name, _ in own) for own in by_owner),
            tuple(tuple(shape for _, shape in own) for own in by_owner),
        )

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of elements of each owner's piece."""
        return tuple(sum(shape.numel() for shape in own) for own in self.shapes)

    def cut(self, tensors: Mapping[str, torch.Tensor], like: torch.Tensor) -> list[torch.Tensor]:
        """Return a flat copy of each owner's tensors, empty for ranks that own none."""
        return [pack([tensors[name] for name in own]) if own else like.new_empty(0) for own in self.names]

    def share(self, own: torch.Tensor, rank: int) -> Collectives[dict[str, torch.Tensor]]:
        """Send this rank's own piece to all ranks, and return all ranks' tensors by name."""
        lengths = self.lengths
        sends = tuple(0 if other == rank else own.numel() for other in range(len(lengths)))
        receives = tuple(0 if other == rank else length for other, length in enumerate(lengths))
        received = yield Exchange(own.repeat(len(lengths) - 1), sends=sends, receives=receives)
        pieces = list(received.split(receives))
        pieces[rank] = own
        return {
            name: tensor
            for names, shapes, piece in zip(self.names, self.shapes, pieces, strict=True)
            for name, tensor in zip(names, unpack(piece, shapes), strict=True)
        }


def total(pieces: Sequence[torch.Tensor], rank: int) -> Collectives[torch.Tensor]:
    """Send every other piece to its owner, and return the sum over ranks of this rank's own piece."""
    sends = tuple(0 if other == rank else piece.numel() for other, piece in enumerate(pieces))
    own = pieces[rank]
    receives = tuple(0 if other == rank else own.numel() for other in range(len(pieces)))
    others = [piece for other, piece in enumerate(pieces) if other != rank]
    received = yield Exchange(pack(others) if others else own.new_empty(0), sends=sends, receives=receives)
    rows = list(received.view(len(others), own.numel()))
    rows.insert(rank, own)
    result: torch.Tensor = rows[0].clone()
    for row in rows[1:]:  # in rank order, so that the sum does not depend on the owner
        result += row
    return result
