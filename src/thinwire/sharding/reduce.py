"""Gradients to their owners: half of an exchange, through any codec."""

from dataclasses import replace
from functools import partial

import torch

from thinwire.codecs.codec import Codec
from thinwire.programs.allreduce import Exact, Reduced
from thinwire.programs.error_feedback import ErrorFeedback
from thinwire.programs.gathered import Gathered, own_codecs
from thinwire.programs.memory import RESIDUAL, Memory
from thinwire.programs.overflow import all_finite
from thinwire.programs.program import Bucket, Program, outcome_of
from thinwire.programs.twoshot import TwoShot, layout_of
from thinwire.sharding.pieces import Pieces, total
from thinwire.wire.ops import Exchange, Steps
from thinwire.wire.pack import unpack


def reduce_to_owners(program: Program, bucket: Bucket, pieces: Pieces, memory: Memory) -> Steps[torch.Tensor]:
    """The mean of what each rank owns of a bucket.

    Exact means and those by codecs go to their owners only: (W-1)/W of an encoding. Any other program runs as
    it is, and each rank keeps its part of what all receive.
    """
    if isinstance(program, ErrorFeedback):
        codec = _codec_of(program.program)
        if codec is not None:
            return (yield from _with_feedback(codec, program.keep, bucket, pieces, memory))
    codec = _codec_of(program)
    if codec is not None:
        cut = pieces.cut(bucket.views(), bucket.buffer)
        mean = yield from _encoded(codec, bucket, cut, track_error=False)
        return mean.to(bucket.buffer.dtype)
    if isinstance(program, Exact):
        cut = pieces.cut(
            replace(bucket, buffer=bucket.buffer.mul_(1 / bucket.world_size)).views(), bucket.buffer
        )
        return (yield from total(cut, bucket.rank))
    mean = (yield from outcome_of(program, bucket, memory)).mean
    return pieces.cut(replace(bucket, buffer=mean).views(), mean)[bucket.rank]


def _codec_of(program: Program) -> Codec | None:
    return program.codec if isinstance(program, Reduced | TwoShot | Gathered) else None


def _with_feedback(
    codec: Codec, keep: float, bucket: Bucket, pieces: Pieces, memory: Memory
) -> Steps[torch.Tensor]:
    """What an owner did not get is kept by the rank that did not get it across, as `ErrorFeedback` does."""
    views = {}
    for name, gradient in bucket.views().items():
        corrected = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
        residual = memory.read(name, RESIDUAL, partial(torch.zeros_like, corrected))
        views[name] = corrected.add_(residual, alpha=keep)
    cut = pieces.cut(views, next(iter(views.values())))
    mean = yield from _encoded(codec, bucket, cut, track_error=True)
    rounded = mean.to(bucket.buffer.dtype)
    # What the gradients' own dtype rounds off; what one rank feeds back counts 1/W.
    cut[bucket.rank].copy_((mean - rounded).mul_(bucket.world_size))
    for names, shapes, missed in zip(pieces.names, pieces.shapes, cut, strict=True):
        if all_finite(missed):  # where steps are taken inside backward, nobody asks all ranks
            for name, error in zip(names, unpack(missed, shapes), strict=True):
                memory.put(name, RESIDUAL, error)
    return rounded


def _encoded(
    codec: Codec, bucket: Bucket, cut: list[torch.Tensor], *, track_error: bool
) -> Steps[torch.Tensor]:
    """Encoded pieces to owners, who take the mean; what they did not get is left in `cut`, if tracked."""
    rank, world = bucket.rank, bucket.world_size
    codecs, own = own_codecs(codec, bucket), cut[rank]
    rows, sends = [], [0] * world
    for owner, piece in enumerate(cut):
        if owner == rank or not piece.numel():
            continue
        layout = layout_of(codec, piece.numel(), piece.device)
        encoded = codecs[rank].encode(piece)
        rows.append(layout.write(encoded, layout.rows(1)[0]))
        sends[owner] = layout.nbytes
        if track_error:
            codecs[rank].add(encoded, piece, -1)
    ours = layout_of(codec, own.numel(), own.device) if own.numel() else None
    receives = tuple(0 if other == rank or ours is None else ours.nbytes for other in range(world))
    empty = torch.empty(0, dtype=torch.uint8, device=own.device)
    received = yield Exchange(torch.cat(rows) if rows else empty, sends=tuple(sends), receives=receives)
    mean = own.to(torch.promote_types(own.dtype, torch.float32), copy=True)
    for other, row in enumerate(received.split(receives)):
        if other != rank and ours is not None:
            codecs[other].add(ours.read(row), mean)
    return mean.div_(world)
