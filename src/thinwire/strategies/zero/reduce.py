"""Reduction of gradients to their owners, exact or through any codec."""

from dataclasses import replace
from functools import partial

import torch

from thinwire.codecs.codec import Codec
from thinwire.engine.ops import Collectives, Exchange
from thinwire.engine.pack import unpack
from thinwire.programs.allreduce import Exact, Reduced
from thinwire.programs.coding import layout_of, own_codecs
from thinwire.programs.error_feedback import ErrorFeedback
from thinwire.programs.finite import finite
from thinwire.programs.gathered import Gathered
from thinwire.programs.memory import RESIDUAL, Memory
from thinwire.programs.program import Bucket, Program, outcome_of
from thinwire.programs.twoshot import TwoShot
from thinwire.strategies.zero.pieces import Pieces, total


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
        mean = yield from _encoded(codec, bucket, cut, track_error=False)
        return mean.to(bucket.buffer.dtype)
    if isinstance(program, Exact):
        cut = pieces.cut(
            replace(bucket, buffer=bucket.buffer.mul_(1 / bucket.world_size)).views(), bucket.buffer
        )
        return (yield from total(cut, bucket.rank))
    return (yield from _from_all(program, bucket, pieces, memory))


def _from_all(program: Program, bucket: Bucket, pieces: Pieces, memory: Memory) -> Collectives[torch.Tensor]:
    """Average with a program among all ranks, and return the part of the mean that this rank owns."""
    mean = (yield from outcome_of(program, bucket, memory)).mean
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
        views[name] = corrected.add_(residual, alpha=keep)
    cut = pieces.cut(views, next(iter(views.values())))
    mean = yield from _encoded(codec, bucket, cut, track_error=True)
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


def _encoded(
    codec: Codec, bucket: Bucket, cut: list[torch.Tensor], *, track_error: bool
) -> Collectives[torch.Tensor]:
    """Send encoded pieces to their owners and return the own mean. Leave errors in `cut` if tracked."""
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
