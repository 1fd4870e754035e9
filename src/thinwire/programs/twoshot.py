"""The two-shot all-reduce on encoded numbers: a reduce-scatter, then an all-gather.

Every rank averages one chunk for all ranks, so the bytes of a rank do not grow with their number. (A one-shot
all-reduce, as `Gathered` is, sends everything to every rank.)
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from thinwire.codecs.codec import Codec, Parts, numbers_of, require_codec
from thinwire.engine.ops import AllGather, AllToAll, Collective, Collectives
from thinwire.engine.pack import Layout
from thinwire.programs.coder import Coder, CoderInput, Tensors, scatter
from thinwire.programs.coding import coders_of
from thinwire.programs.division import Division, Piece, in_pieces, numbers_in
from thinwire.programs.finite import finite
from thinwire.programs.memory import Memory
from thinwire.programs.program import Bucket, Outcome, Program, is_alone, unchanged
from thinwire.programs.reduce_scatter import Rows, to_owners


@dataclass(frozen=True, repr=False)
class TwoShot(Program):
    """The mean through any codec, in two collectives. A rank sends 2 (W-1)/W of one encoded copy.

        rank r receives chunk r of every rank, encoded         all-to-all
        it computes their mean in float32 and encodes it
        every rank receives the means of all chunks            all-gather

    A chunk is made of slices of parameters. Each parameter has its own blocks of numbers that share a scale,
    so the encoding of one parameter does not depend on its neighbours. Parameters that must be exact are sent
    uncompressed in the same two collectives.

    A rank's own chunk is not encoded before the mean. All ranks decode the same bytes, so replicas stay
    identical with any codec. A sum over ranks beyond float32's range is an overflow.

    The outcome's error covers both encodings. For the chunks of other ranks it is the error of this rank's
    encodings. For its own chunk it is W times the error of the encoded mean, because error feedback on one
    rank has a weight of 1/W in the next mean.

    Args:
        codec: Any codec.

    Raises:
        OptionError: `codec` is not a codec.

    Example::

        wire = thinwire.attach(ddp, thinwire.TwoShot(thinwire.Quantize(bits=8)))
    """

    codec: Codec

    exact_vectors = True
    stateless = True
    carries_exact = True
    folds_residuals = True
    exact_alone = True
    preferred_bytes = 1 << 20

    def __post_init__(self) -> None:
        require_codec(self.codec)

    def __call__(self, bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
        """Encode, all-to-all, average, encode, all-gather, and decode."""
        if is_alone(self, bucket):
            return unchanged(bucket)
        rank, world = bucket.rank, bucket.world_size
        coders = coders_of(self.codec, bucket)
        division = Division.of(bucket, coders[0].block)
        numbers, rows = _Numbers(bucket, division), _rows(bucket, division, coders[0])

        def write(owner: int, row: Parts) -> None:
            *parts, exact = row
            coders[rank].encode(numbers.given(owner), numbers.errors(owner), tuple(parts))
            torch.cat([*numbers.exact(owner), exact[:0]], out=exact)  # a chunk may have no exact numbers

        # Phase 1, reduce-scatter: this rank receives its own chunk of every other rank, encoded.
        received = yield from to_owners(rows, rank, write, in_order=False)
        # Decode, average with this rank's own numbers in float32, and encode the mean, in one pass.
        row = rows.empty(rows.lengths[rank])
        *parts, exact = rows.read(row, rank)
        encodings = [(coders[sender], sent[:-1]) for sender, sent in received.items()]
        coders[rank].encode_mean(numbers.given(rank), encodings, world, numbers.errors(rank), tuple(parts))
        own = torch.cat([*numbers.exact(rank), exact[:0]], out=torch.empty_like(exact))
        exact.copy_(_mean([received[sender][-1] if sender != rank else own for sender in range(world)]))

        # Phase 2, all-gather: every rank receives the means of all chunks, and decodes the same bytes. A
        # chunk's owner decodes them too: if it kept its more precise mean, replicas would diverge.
        encoded = yield AllGather(row, in_order=False)
        means = numbers.for_means()
        flags: list[torch.Tensor | None] = []
        for owner in range(world):
            *parts, exact = rows.read(encoded[owner], owner)
            coders[owner].decode(tuple(parts), in_pieces(means, division.coded[owner]))
            scatter(exact, in_pieces(means, division.exact[owner]))
            flags += [coders[owner].finite(tuple(parts)), finite(exact)]
        return numbers.outcome(flags)

    def outline(self, bucket: Bucket) -> Iterator[Collective]:
        """Yield the collectives of a bucket without encoding anything, for planning with many ranks."""
        coder = coders_of(self.codec, bucket)[0]
        rows = _rows(bucket, Division.of(bucket, coder.block), coder)
        row = rows.empty(rows.lengths[0])
        yield AllToAll(row.new_empty(bucket.world_size, len(row)))
        yield AllGather(row)


def _rows(bucket: Bucket, division: Division, coder: Coder) -> Rows:
    """Return the rows that ranks exchange: a chunk's encoding, then its exact numbers."""
    like = numbers_of(bucket.buffer)
    dtype = like.dtype if bucket.exact_dtype is None else bucket.exact_dtype.to_real()
    layouts = []
    for coded, exact in zip(division.coded, division.exact, strict=True):
        layout = coder.layout(tuple(piece.length for piece in coded), like.device)
        shape = torch.Size((numbers_in(exact),))
        layouts.append(Layout((*layout.dtypes, dtype), (*layout.shapes, shape), layout.device))
    return Rows(layouts, padded=True)


class _Numbers:
    """A bucket's gradients and residuals by chunk, and the destinations of errors and means.

    With `bucket.residuals`, new residuals are written there and means to the bucket's buffer. If errors are
    tracked without residuals, errors replace the gradients, and means need a separate buffer.
    """

    def __init__(self, bucket: Bucket, division: Division) -> None:
        self._bucket, self._division = bucket, division
        flat = numbers_of(bucket.buffer)
        pairs = 2 if bucket.buffer.is_complex() else 1
        self._lengths = [pairs * shape.numel() for shape in bucket.shapes]
        self._values = list(flat.split(self._lengths))
        self._tracked = bucket.track_error and bucket.residuals is None
        self._mean = torch.empty_like(bucket.buffer) if self._tracked else bucket.buffer

    def given(self, owner: int) -> CoderInput:
        """Return the numbers of an owner's chunk that are encoded, with their residuals."""
        share, residuals = self._division.coded[owner], self._bucket.residuals
        values = in_pieces(self._values, share)
        if residuals is None:
            return CoderInput(values)
        return CoderInput(values, _present(residuals.old, share), residuals.keep)

    def errors(self, owner: int) -> Tensors | None:
        """Return the tensors for the errors of an owner's chunk, or None if they are not needed."""
        share, residuals = self._division.coded[owner], self._bucket.residuals
        if residuals is not None:
            return _present(residuals.new, share)
        return in_pieces(self._values, share) if self._tracked else None

    def exact(self, owner: int) -> Tensors:
        """Return the exact numbers of an owner's chunk."""
        return in_pieces(self._values, self._division.exact[owner])

    def for_means(self) -> Tensors:
        """Return the tensors for the means, by parameter. Call it after the last use of the gradients."""
        if self._tracked:
            # The gradients' buffer becomes the outcome's error. Exact numbers have none.
            for owner in range(len(self._division.exact)):
                for piece in self.exact(owner):
                    piece.zero_()
        return list(numbers_of(self._mean).split(self._lengths))

    def outcome(self, flags: list[torch.Tensor | None]) -> Outcome:
        """Return the outcome, with its finiteness if all parts have a flag."""
        error = self._bucket.buffer if self._tracked else None
        known = [flag for flag in flags if flag is not None]
        # Flags are of the encodings. A mean that is finite in float32 may not be so in half precision.
        if len(known) < len(flags) or self._values[0].dtype.itemsize < torch.float32.itemsize:
            return Outcome(self._mean, error)
        return Outcome(self._mean, error, torch.stack(known).all())


def _present(tensors: tuple[torch.Tensor | None, ...], share: tuple[Piece, ...]) -> Tensors:
    """Return a share's pieces of residuals, which every encoded parameter has."""
    found = []
    for piece in share:
        tensor = tensors[piece.parameter]
        assert tensor is not None, "only exact parameters have no residual"
        found.append(tensor[piece.start : piece.stop])
    return found


def _mean(rows: Tensors) -> torch.Tensor:
    """Return the mean of all ranks' numbers, in at least float32 and in the order of ranks.

    Numbers are divided first, so that the sum cannot overflow before the mean does.
    """
    # A multiplication by 1/W as in `Exact`, so that exact parameters get its bits.
    dtype = torch.promote_types(rows[0].dtype, torch.float32)
    total = rows[0].to(dtype) * (1 / len(rows))
    for row in rows[1:]:
        total += row.to(dtype) * (1 / len(rows))
    return total
