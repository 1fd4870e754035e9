"""The encodings of a whole bucket as one matrix of blocks, for accelerators.

Every operation of torch launches a kernel there, which takes longer than the work on a small tensor. So the
blocks of all owners and parameters are gathered into one matrix, with one operation for all of them, and a
codec encodes and decodes that matrix at once. The number of launches does not depend on that of parameters,
and only its logarithm on that of ranks (`sum_pairs`).
"""

from functools import lru_cache
from typing import NamedTuple

import torch

from thinwire.codecs.codec import BlockCodec, Parts
from thinwire.codecs.rounding import divide_in_place, sum_pairs
from thinwire.engine.foreach import add_all, copy_all
from thinwire.engine.pack import Layout, changed_layout
from thinwire.programs.block_coder import layout_of_blocks
from thinwire.programs.bucket_coder import BucketCoder, BucketNumbers, scaled_sum, with_exact
from thinwire.programs.coder import Tensors
from thinwire.programs.division import Division, Share
from thinwire.programs.finite import finite
from thinwire.programs.program import Bucket, Outcome


class Slot(NamedTuple):
    """A piece of a parameter, and the place of its first number in a matrix of all owners' chunks."""

    parameter: int
    start: int
    stop: int
    place: int

    def of(self, tensors: "Tensors | tuple[torch.Tensor | None, ...]") -> torch.Tensor:
        """Return the piece of its parameter's flat tensor."""
        tensor = tensors[self.parameter]
        assert tensor is not None, "only exact parameters have no residual"
        return tensor[self.start : self.stop]


class Places(NamedTuple):
    """The slots of shares in a matrix with one row of equally many numbers per owner."""

    length: int
    """The numbers of an owner's row, with padding."""
    slots: tuple[Slot, ...]
    ragged: tuple[tuple[int, int], ...]
    """The blocks that are padded, with the count of numbers in each."""
    padded: bool
    """Whether any number of the matrix is padding."""

    def of(self, owner: int) -> tuple[Slot, ...]:
        """Return the slots of one owner, with their places in its row."""
        first = owner * self.length
        mine = (slot for slot in self.slots if first <= slot.place < first + self.length)
        return tuple(slot._replace(place=slot.place - first) for slot in mine)


@lru_cache(maxsize=4096)
def places_of(shares: tuple[Share, ...], width: int) -> Places:
    """Return the places of shares whose pieces begin at multiples of `width`."""
    sizes = [sum(-(-piece.length // width) for piece in share) * width for share in shares]
    length = max(sizes)
    slots, ragged = [], []
    for owner, share in enumerate(shares):
        place = owner * length
        for piece in share:
            slots.append(Slot(*piece, place))
            if piece.length % width:
                ragged.append(((place + piece.length) // width, piece.length % width))
            place += -(-piece.length // width) * width
    padded = bool(ragged) or min(sizes) < length
    return Places(length, tuple(slots), tuple(ragged), padded)


class MatrixCoder(BucketCoder):
    """Encodes the chunks of all owners at once.

    Args:
        bucket: The gradients.
        codec: A codec of blocks that draws no random numbers.
        width: Numbers in a block.
        division: The chunks.
    """

    def __init__(self, bucket: Bucket, codec: BlockCodec, width: int, division: Division) -> None:
        self._rank, self._world, self._codec, self._width = bucket.rank, bucket.world_size, codec, width
        self._device = bucket.buffer.device
        self._numbers = BucketNumbers(bucket)
        self._coded, self._exact = places_of(division.coded, width), places_of(division.exact, 1)
        self._blocks = self._coded.length // width
        layout = layout_of_blocks(codec, width, (self._coded.length,), self._device)
        self._layout = with_exact(layout, self._exact.length, bucket)

    def encode(self) -> torch.Tensor:
        """Encode all numbers, those of this rank's own chunk too: one matrix is faster than two."""
        numbers, slots = self._numbers, self._coded.slots
        new = torch.zeros if self._coded.padded else torch.empty
        x = new((self._world * self._blocks, self._width), dtype=numbers.dtype, device=self._device)
        pieces = _pieces(x, slots)
        # x <- value + keep * residual
        copy_all(pieces, [slot.of(numbers.values) for slot in slots])
        if numbers.old is not None:
            add_all(pieces, [slot.of(numbers.old) for slot in slots], numbers.keep)
        # Its own numbers are needed for the mean. A copy, so that x need not be kept while rows are sent.
        first = self._rank * self._blocks
        self._own = x[first : first + self._blocks].clone()

        rows = self._empty(self._world)
        *parts, exact = self._layout.read(rows)
        sent = self._write(self._encoded(x, self._coded.ragged), tuple(parts))
        if self._exact.slots:
            if self._exact.padded:
                exact.zero_()  # padding is averaged and checked too
            values = [slot.of(numbers.values) for slot in self._exact.slots]
            copy_all(_pieces_of_rows(exact, self._exact), values)
        self._own_exact = exact[self._rank]
        if numbers.errors is not None:
            # error <- x - decoded. That of this rank's chunk is replaced by its mean's.
            x.sub_(self._decoded(sent).view(x.shape))
            copy_all([slot.of(numbers.errors) for slot in slots], pieces)
        return rows

    def encode_mean(self, received: torch.Tensor) -> torch.Tensor:
        """Decode what all ranks sent as one matrix, average, and encode the mean."""
        rank, world, blocks = self._rank, self._world, self._blocks
        *parts, exact = self._layout.read(received)
        terms = self._decoded(self._received(parts)).to(self._numbers.dtype).view(world, blocks, self._width)
        terms[rank].copy_(self._own)
        mean = divide_in_place(sum_pairs(terms), world)
        first = rank * blocks
        ragged = tuple((row - first, n) for row, n in self._coded.ragged if first <= row < first + blocks)
        for block, count in ragged:
            mean[block, count:].zero_()  # the padding of received blocks may not decode to zeros

        row = self._empty(1)[0]
        *parts, own_exact = self._layout.read(row)
        sent = self._write(self._encoded(mean, ragged), tuple(parts))
        if self._exact.slots:
            # An own row may stay behind in an all-to-all.
            exact[rank].copy_(self._own_exact)
            own_exact.copy_(scaled_sum(exact))
        errors = self._numbers.errors
        if errors is not None:
            mean.sub_(self._decoded(sent)).mul_(world)
            own = self._coded.of(rank)
            copy_all([slot.of(errors) for slot in own], _pieces(mean, own))
        return row

    def decode(self, encoded: torch.Tensor) -> Outcome:
        """Decode the means of all chunks as one matrix, and copy them to their parameters."""
        *coded, exact = self._layout.read(encoded)
        parts = self._received(coded)
        means = self._numbers.for_means([slot.of(self._numbers.values) for slot in self._exact.slots])
        flags = []
        if self._coded.slots:
            into = [slot.of(means) for slot in self._coded.slots]
            copy_all(into, _pieces(self._decoded(parts), self._coded.slots))
            flags.append(self._codec.finite(parts))
        if self._exact.slots:
            into = [slot.of(means) for slot in self._exact.slots]
            copy_all(into, _pieces_of_rows(exact, self._exact))
            flags.append(finite(exact))
        return self._numbers.outcome(flags)

    def _decoded(self, parts: Parts) -> torch.Tensor:
        rows = parts[0].shape[:-1] if self._codec.strided else parts[0].shape[:1]
        out = torch.empty(*rows, self._width, dtype=torch.float32, device=self._device)
        self._codec.decode_blocks(parts, out)
        return out

    def _encoded(self, x: torch.Tensor, ragged: tuple[tuple[int, int], ...]) -> Parts:
        """Encode a matrix of blocks."""
        codec, layout = self._codec, self._layout
        if not len(x):
            return tuple(
                x.new_empty(shape, dtype=dtype)
                for dtype, shape in zip(layout.dtypes[:-1], layout.shapes, strict=False)
            )
        parts = codec.encode_blocks(x.to(torch.float32))
        for row, count in ragged:
            codec.correct_padded(tuple(part[row] for part in parts), count, self._width)
        for part, shape in zip(parts, layout.shapes, strict=False):
            if part.shape[1:] != shape[1:]:
                raise changed_layout(
                    Layout(layout.dtypes[:-1], layout.shapes[:-1], x.device), Layout.of(parts)
                )
        return parts

    def _write(self, encoded: Parts, parts: Parts) -> Parts:
        """Write an encoding to the parts of rows, and return what was sent, for `_decoded`."""
        for part, new in zip(parts, encoded, strict=True):
            part.copy_(new.view(part.shape))
        if self._codec.strided:
            return parts
        return tuple(new.to(part.dtype) for part, new in zip(parts, encoded, strict=True))

    def _received(self, parts: Tensors) -> Parts:
        """Return the parts of all rows, for `_decoded`: matrices with one block per row, or as they are."""
        if self._codec.strided:
            return tuple(parts)
        return tuple(part.flatten(0, 1).contiguous() for part in parts)

    def _empty(self, count: int) -> torch.Tensor:
        return torch.empty(count, self._layout.nbytes, dtype=torch.uint8, device=self._device)


def _pieces(matrix: torch.Tensor, slots: tuple[Slot, ...]) -> Tensors:
    flat = matrix.view(-1)
    return [flat[slot.place : slot.place + slot.stop - slot.start] for slot in slots]


def _pieces_of_rows(rows: torch.Tensor, places: Places) -> Tensors:
    """Return the slots of a matrix whose rows are parts of longer ones."""
    pieces = []
    for slot in places.slots:
        owner, start = divmod(slot.place, places.length)
        pieces.append(rows[owner, start : start + slot.stop - slot.start])
    return pieces
