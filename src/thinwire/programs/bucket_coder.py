"""The encodings of a whole bucket, as `TwoShot` sends them: a row of bytes for each rank's chunk.

    encode        this rank's numbers, a row for each owner of a chunk
    encode_mean   what all ranks sent of this rank's chunk, averaged, in one row
    decode        the means of all chunks

`OwnersCoder` calls a codec once for every owner. It suits a CPU, where a chunk stays in the cache, and any
codec. `MatrixCoder` treats the blocks of all owners as one matrix, so that an accelerator launches equally
many kernels for any number of ranks. `TritonCoder` does the same in six kernels.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch

from thinwire.codecs.codec import numbers_of
from thinwire.codecs.rounding import sum_pairs, sum_pairs_of
from thinwire.engine.foreach import zero_all
from thinwire.engine.pack import Layout
from thinwire.programs.coder import Coder, CoderInput, Tensors, scatter
from thinwire.programs.division import Division, Piece, in_pieces, numbers_in
from thinwire.programs.finite import finite
from thinwire.programs.program import Bucket, Outcome


class BucketCoder(ABC):
    """One exchange of a bucket. Call its methods once each, in their order."""

    @abstractmethod
    def encode(self) -> torch.Tensor:
        """Return a matrix of bytes with one row per owner, to be sent to it.

        This rank's own row need not be written, because its own numbers are averaged unencoded.
        """

    @abstractmethod
    def encode_mean(self, received: torch.Tensor) -> torch.Tensor:
        """Average this rank's chunk, and return the encoded mean as one row of bytes.

        Args:
            received: A matrix of bytes with one row per sender. This rank's own row is not read.
        """

    @abstractmethod
    def decode(self, encoded: torch.Tensor) -> Outcome:
        """Decode the means of all chunks.

        Args:
            encoded: A matrix of bytes with one row per owner, the same on all ranks.
        """


class BucketNumbers:
    """A bucket's gradients and residuals, and the destinations of errors and means.

    With `bucket.residuals`, new residuals are written there and means to the bucket's buffer. If errors are
    tracked without residuals, errors replace the gradients, and means need a separate buffer.

    Attributes:
        values: The gradients, a flat tensor per parameter.
        old: The residuals to add, by parameter, or None.
        keep: The factor of these residuals.
        errors: The tensors for the errors, by parameter, or None if they are not needed.
        dtype: The dtype to compute in, at least float32.
    """

    def __init__(self, bucket: Bucket) -> None:
        flat, residuals = numbers_of(bucket.buffer), bucket.residuals
        pairs = 2 if bucket.buffer.is_complex() else 1
        self._lengths = [pairs * shape.numel() for shape in bucket.shapes]
        self._buffer = bucket.buffer
        self._tracked = bucket.track_error and residuals is None
        self._mean = torch.empty_like(bucket.buffer) if self._tracked else bucket.buffer
        self.values: Tensors = list(flat.split(self._lengths))
        self.dtype = torch.promote_types(flat.dtype, torch.float32)
        self.old: tuple[torch.Tensor | None, ...] | None = None
        self.errors: tuple[torch.Tensor | None, ...] | None = tuple(self.values) if self._tracked else None
        self.keep = 1.0
        if residuals is not None:
            self.old, self.errors, self.keep = residuals.old, residuals.new, residuals.keep

    def for_means(self, exact: Tensors) -> Tensors:
        """Return the tensors for the means, by parameter. Call it after the last use of the gradients.

        Args:
            exact: The exact pieces of the gradients, which have no error.
        """
        if self._tracked:
            zero_all(exact)  # the gradients' buffer becomes the outcome's error
        return list(numbers_of(self._mean).split(self._lengths))

    def outcome(self, flags: list[torch.Tensor | None]) -> Outcome:
        """Return the outcome, with its finiteness if all parts have a flag."""
        error = self._buffer if self._tracked else None
        known = [flag for flag in flags if flag is not None]
        # Flags are of the encodings. A mean that is finite in float32 may not be so in half precision.
        if len(known) < len(flags) or self.values[0].dtype.itemsize < torch.float32.itemsize:
            return Outcome(self._mean, error)
        return Outcome(self._mean, error, known[0] if len(known) == 1 else torch.stack(known).all())


def with_exact(layout: Layout, count: int, bucket: Bucket) -> Layout:
    """Return the layout of a row: an encoding, then `count` exact numbers."""
    like = numbers_of(bucket.buffer)
    dtype = like.dtype if bucket.exact_dtype is None else bucket.exact_dtype.to_real()
    return Layout((*layout.dtypes, dtype), (*layout.shapes, torch.Size((count,))), like.device)


def row_layouts(bucket: Bucket, division: Division, coder: Coder) -> list[Layout]:
    """Return the layout of each owner's row. No row is longer than that of rank 0."""
    device = bucket.buffer.device
    return [
        with_exact(coder.layout(tuple(piece.length for piece in coded), device), numbers_in(exact), bucket)
        for coded, exact in zip(division.coded, division.exact, strict=True)
    ]


class OwnersCoder(BucketCoder):
    """Encodes the chunk of one owner at a time.

    Args:
        bucket: The gradients.
        coders: The coder of each rank.
        division: The chunks.
    """

    def __init__(self, bucket: Bucket, coders: list[Coder], division: Division) -> None:
        self._rank, self._coders, self._division = bucket.rank, coders, division
        self._numbers = BucketNumbers(bucket)
        self._layouts = row_layouts(bucket, division, coders[0])
        self._length = max(layout.nbytes for layout in self._layouts)
        self._device = bucket.buffer.device

    def encode(self) -> torch.Tensor:
        """Encode the chunks of the other ranks."""
        rows = self._empty(len(self._coders))
        for owner, row in enumerate(rows):
            if owner != self._rank:
                *parts, exact = self._layouts[owner].read(row)
                coder = self._coders[self._rank]
                coder.encode(self._given(owner), self._errors(owner), tuple(parts))
                self._join_exact(owner, exact)
        return rows

    def encode_mean(self, received: torch.Tensor) -> torch.Tensor:
        """Decode, average with this rank's own numbers in float32, and encode the mean, in one pass."""
        rank, layout = self._rank, self._layouts[self._rank]
        by_sender = [layout.read(row) for row in received]
        row = self._empty(1)[0]
        *parts, exact = layout.read(row)
        coded = zip(self._coders, by_sender, strict=True)
        others = [(coder, sent[:-1]) for sender, (coder, sent) in enumerate(coded) if sender != rank]
        coder = self._coders[rank]
        coder.encode_mean(self._given(rank), others, rank, self._errors(rank), tuple(parts))
        own = self._join_exact(rank, torch.empty_like(exact))
        exact.copy_(_mean([own if sender == rank else sent[-1] for sender, sent in enumerate(by_sender)]))
        return row

    def decode(self, encoded: torch.Tensor) -> Outcome:
        """Decode the chunks of all owners."""
        owners = range(len(self._coders))
        exact_values = [piece for owner in owners for piece in self._exact(owner)]
        means = self._numbers.for_means(exact_values)
        flags: list[torch.Tensor | None] = []
        for owner in owners:
            *parts, exact = self._layouts[owner].read(encoded[owner])
            coder = self._coders[owner]
            coder.decode(tuple(parts), in_pieces(means, self._division.coded[owner]))
            scatter(exact, in_pieces(means, self._division.exact[owner]))
            flags += [coder.finite(tuple(parts)), finite(exact)]
        return self._numbers.outcome(flags)

    def _empty(self, count: int) -> torch.Tensor:
        """Return uninitialised rows. Padding is sent but never read."""
        return torch.empty(count, self._length, dtype=torch.uint8, device=self._device)

    def _given(self, owner: int) -> CoderInput:
        share, numbers = self._division.coded[owner], self._numbers
        values = in_pieces(numbers.values, share)
        old = None if numbers.old is None else present(numbers.old, share)
        return CoderInput(values, old, numbers.keep)

    def _errors(self, owner: int) -> Tensors | None:
        errors = self._numbers.errors
        return None if errors is None else present(errors, self._division.coded[owner])

    def _exact(self, owner: int) -> Tensors:
        return in_pieces(self._numbers.values, self._division.exact[owner])

    def _join_exact(self, owner: int, into: torch.Tensor) -> torch.Tensor:
        return torch.cat([*self._exact(owner), into[:0]], out=into)  # a chunk may have no exact numbers


def present(tensors: tuple[torch.Tensor | None, ...], share: tuple[Piece, ...]) -> Tensors:
    """Return a share's pieces of residuals or errors, which every encoded parameter has."""
    found = []
    for piece in share:
        tensor = tensors[piece.parameter]
        assert tensor is not None, "only exact parameters have no residual"
        found.append(tensor[piece.start : piece.stop])
    return found


def _mean(rows: Tensors) -> torch.Tensor:
    """Return the mean of all ranks' exact numbers, as `scaled_sum` computes it from a matrix."""
    dtype = torch.promote_types(rows[0].dtype, torch.float32)
    scaled: Iterator[torch.Tensor] = (row.to(dtype) * (1 / len(rows)) for row in rows)
    return sum_pairs_of(scaled)


def scaled_sum(rows: torch.Tensor) -> torch.Tensor:
    """Return the mean over the rows of a matrix, in at least float32.

    Numbers are divided first, so that the sum cannot overflow before the mean does. It is a multiplication by
    1/W as in `Exact`, so that exact parameters get its bits.
    """
    return sum_pairs(rows.to(torch.promote_types(rows.dtype, torch.float32)) * (1 / len(rows)))
