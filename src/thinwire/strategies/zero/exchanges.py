"""The two exchanges of ZeRO: gradients to their owners, exact or encoded, and parameters to all ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from thinwire.codecs.codec import Codec
from thinwire.codecs.rounding import add_scaled, divide_in_place
from thinwire.engine.ops import Collectives, Exchange
from thinwire.engine.pack import pack, unpack
from thinwire.programs.allreduce import Exact, Reduced
from thinwire.programs.coding import own_codecs
from thinwire.programs.error_feedback import ErrorFeedback
from thinwire.programs.finite import finite
from thinwire.programs.gathered import Gathered
from thinwire.programs.memory import RESIDUAL, Memory
from thinwire.programs.program import Bucket, Program, mean_of
from thinwire.programs.reduce_scatter import reduce_scatter
from thinwire.programs.twoshot import TwoShot


@dataclass(frozen=True)
class Pieces:
    """Names and shapes of a bucket's parameters, grouped by owner."""

    names: tuple[tuple[str, ...], ...]
    shapes: tuple[tuple[torch.Size, ...], ...]

    @classmethod
    def of(cls, bucket: Bucket, owners: Mapping[str, int]) -> "Pieces":
        """Return the bucket's parameters grouped by owner."""
        held = list(zip(bucket.names, bucket.shapes, strict=True))
        by_owner = [
            [(name, shape) for name, shape in held if owners[name] == rank]
            for rank in range(bucket.world_size)
        ]
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
        # Owners' pieces differ in length. An all-gather would pad all of them to the longest.
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


def reduce_to_owners(
    program: Program, bucket: Bucket, pieces: Pieces, memory: Memory
) -> Collectives[torch.Tensor]:
    """Return the mean of the gradients of a bucket that this rank owns, in one flat tensor.

    With `Exact` and codec programs, gradients are sent to their owners only, which is (W-1)/W of an encoding.
    Any other program runs as an all-reduce, and each rank keeps its own part of the mean. So does any program
    of a single rank, which owns everything.
    """
    if bucket.world_size == 1:
        return (yield from _from_all(program, bucket, pieces, memory))
    if isinstance(program, ErrorFeedback):
        codec = _codec_of(program.program)
        if codec is not None:
            return (yield from _with_feedback(codec, program.keep, bucket, pieces, memory))
    codec = _codec_of(program)
    if codec is not None:
        cut = pieces.cut(bucket.views(), bucket.buffer)
        mean = yield from reduce_scatter(own_codecs(codec, bucket), bucket.rank, cut)
        return divide_in_place(mean, bucket.world_size).to(bucket.buffer.dtype)
    if isinstance(program, Exact):
        # 1/W before the sum, as DDP does without a hook, so that the bits are plain DDP's on two ranks.
        cut = pieces.cut(
            replace(bucket, buffer=bucket.buffer.mul_(1 / bucket.world_size)).views(), bucket.buffer
        )
        return (yield from _sum(cut, bucket.rank))
    return (yield from _from_all(program, bucket, pieces, memory))


def _from_all(program: Program, bucket: Bucket, pieces: Pieces, memory: Memory) -> Collectives[torch.Tensor]:
    """Average with a program among all ranks, and return the part of the mean that this rank owns."""
    mean = yield from mean_of(program, bucket, memory)
    return pieces.cut(replace(bucket, buffer=mean).views(), mean)[bucket.rank]


def _codec_of(program: Program) -> Codec | None:
    return program.codec if isinstance(program, Reduced | TwoShot | Gathered) else None


def _with_feedback(
    codec: Codec, keep: float, bucket: Bucket, pieces: Pieces, memory: Memory
) -> Collectives[torch.Tensor]:
    """Reduce with error feedback, each rank keeping the residual of its own encodings."""
    views = {}
    for name, gradient in bucket.views().items():
        corrected = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
        residual = memory.read(name, RESIDUAL, partial(torch.zeros_like, corrected))
        views[name] = add_scaled(corrected, residual, keep)
    cut = pieces.cut(views, next(iter(views.values())))
    mean = yield from reduce_scatter(own_codecs(codec, bucket), bucket.rank, cut, track_error=True)
    divide_in_place(mean, bucket.world_size)
    rounded = mean.to(bucket.buffer.dtype)
    # The owner keeps the rounding error of the gradients' dtype times W, because its residual has weight 1/W.
    cut[bucket.rank].copy_((mean - rounded).mul_(bucket.world_size))
    for names, shapes, missed in zip(pieces.names, pieces.shapes, cut, strict=True):
        # A step inside backward cannot be rolled back, so the residual must not become non-finite.
        flag = finite(missed)
        for name, error in zip(names, unpack(missed, shapes), strict=True):
            residual = memory.read(name, RESIDUAL, partial(torch.zeros_like, error))
            memory.put(name, RESIDUAL, torch.where(flag, error, residual))
    return rounded


def _sum(pieces: Sequence[torch.Tensor], rank: int) -> Collectives[torch.Tensor]:
    """Send every other piece to its owner, and return the sum over ranks of this rank's own piece."""
    sends = tuple(0 if other == rank else piece.numel() for other, piece in enumerate(pieces))
    own = pieces[rank]
    receives = tuple(0 if other == rank else own.numel() for other in range(len(pieces)))
    others = [piece for other, piece in enumerate(pieces) if other != rank]
    received = yield Exchange(pack(others) if others else own.new_empty(0), sends=sends, receives=receives)
    rows = list(received.view(len(others), own.numel()))
    rows.insert(rank, own)
    result: torch.Tensor = rows[0].clone()
    for row in rows[1:]:  # in the order of ranks, so that the sum does not depend on the owner
        result += row
    return result
