"""A bucket's numbers by the owners of its parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from thinwire.programs.program import Bucket
from thinwire.wire.ops import Exchange, Steps
from thinwire.wire.pack import pack, unpack


@dataclass(frozen=True)
class Pieces:
    """Names and shapes of a bucket's parameters, a list for each rank that may own some."""

    names: tuple[tuple[str, ...], ...]
    shapes: tuple[tuple[torch.Size, ...], ...]

    @classmethod
    def of(cls, bucket: Bucket, owners: Mapping[str, int]) -> "Pieces":
        """The bucket's parameters by owner."""
        held = list(zip(bucket.names, bucket.shapes, strict=True))
        by_owner = [[one for one in held if owners[one[0]] == rank] for rank in range(bucket.world_size)]
        return cls(
            tuple(tuple(name for name, _ in own) for own in by_owner),
            tuple(tuple(shape for _, shape in own) for own in by_owner),
        )

    @property
    def lengths(self) -> tuple[int, ...]:
        """How many numbers each owner has."""
        return tuple(sum(shape.numel() for shape in own) for own in self.shapes)

    def cut(self, tensors: Mapping[str, torch.Tensor], like: torch.Tensor) -> list[torch.Tensor]:
        """One flat copy for every owner."""
        return [pack([tensors[name] for name in own]) if own else like.new_empty(0) for own in self.names]

    def share(self, own: torch.Tensor, rank: int) -> Steps[dict[str, torch.Tensor]]:
        """Every rank sends its own piece to all; all pieces by name."""
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


def total(pieces: Sequence[torch.Tensor], rank: int) -> Steps[torch.Tensor]:
    """The sum over ranks of this rank's own piece; every other piece goes to its owner."""
    sends = tuple(0 if other == rank else piece.numel() for other, piece in enumerate(pieces))
    own = pieces[rank]
    receives = tuple(0 if other == rank else own.numel() for other in range(len(pieces)))
    others = [piece for other, piece in enumerate(pieces) if other != rank]
    received = yield Exchange(pack(others) if others else own.new_empty(0), sends=sends, receives=receives)
    rows = list(received.view(len(others), own.numel()))
    rows.insert(rank, own)
    result: torch.Tensor = rows[0].clone()
    for row in rows[1:]:  # in order of ranks, so that who owns it changes no bit
        result += row
    return result
