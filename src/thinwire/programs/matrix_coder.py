"""The encodings of a whole bucket as one matrix of blocks, for accelerators.

Every operation of torch launches a kernel there, which takes longer than the work on a small tensor. So the
blocks of all owners and parameters are gathered into one matrix, with one operation for all of them, and a
codec encodes and decodes that matrix at once. The number of launches does not depend on that of parameters,
and only its logarithm on that of ranks (`sum_pairs`).
"""

from functools import lru_cache
from typing import NamedTuple

import torch

from thinwire.codecs.codec import BlockCodec, Parts, Ragged
from thinwire.codecs.rounding import divide_in_place, sum_pairs
from thinwire.engine.foreach import add_all, copy_all, zero_all
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

    def gaps(self, owner: int) -> list[tuple[int, int]]:
        """Return where an owner's row is padded, as ranges of numbers."""
        slots = self.of(owner)
        ends = [0, *(slot.place + slot.stop - slot.start for slot in slots)]
        starts = [*(slot.place for slot in slots), self.length]
        return [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]


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
        self._constants = codec.constants(self._device) if codec.strided and self._coded.slots else ()

    def encode(self) -> torch.Tensor:
        """Encode all numbers, those of this rank's own chunk too: one matrix is faster than two."""
        numbers, slots, errors = self._numbers, self._coded.slots, self._numbers.errors
        x = torch.empty(self._world, self._blocks, self._width, dtype=numbers.dtype, device=self._device)
        pieces = _pieces(x, slots)
        # Numbers of a block share a scale. Whole blocks of padding are arbitrary: their owner zeroes them.
        blocks = x.view(-1, self._width)
        zero_all([blocks[block, count:] for block, count in self._coded.ragged])
        # x <- value + keep * residual
        copy_all(pieces, [slot.of(numbers.values) for slot in slots])
        if numbers.old is not None:
            add_all(pieces, [slot.of(numbers.old) for slot in slots], numbers.keep)
        rows = self._empty(self._world)
        *parts, exact = self._layout.read(rows)
        ragged = [(*divmod(block, self._blocks), count) for block, count in self._coded.ragged]
        decoded = self._encoded(x, tuple(parts), ragged, decoded=errors is not None)
        if self._exact.slots:
            if self._exact.padded:
                exact.zero_()  # padding is averaged and checked too
            values = [slot.of(numbers.values) for slot in self._exact.slots]
            copy_all(_pieces_of_rows(exact, self._exact), values)
        self._own_exact = exact[self._rank]
        self._own, moved = self._own_numbers(x)
        if errors is not None:
            assert decoded is not None, "it was asked for"
            # error <- x - decoded, of other ranks' chunks. That of this rank's own chunk is its mean's.
            error = torch.sub(x, decoded, out=decoded if decoded.dtype == x.dtype else None)
            others = tuple(slot for slot in slots if slot.place // self._coded.length != self._rank)
            into = [slot.of(errors) for slot in others]
            copy_all([*into, *(self._own if moved else ())], [*_pieces(error, others), *moved])
        return rows

    def _own_numbers(self, x: torch.Tensor) -> tuple[Tensors, Tensors]:
        """Return where this rank's own numbers stay until the mean is taken, and what to copy there.

        x itself is not kept, because it would be in memory while rows are sent.
        """
        numbers, own = self._numbers, self._coded.of(self._rank)
        if numbers.old is None:
            return [slot.of(numbers.values) for slot in own], []
        if numbers.errors is not None and numbers.values[0].dtype == x.dtype:
            # The new residuals are free until the error of the mean is known.
            return [slot.of(numbers.errors) for slot in own], _pieces(x[self._rank], own)
        return _pieces(x[self._rank].clone(), own), []

    def encode_mean(self, received: torch.Tensor) -> torch.Tensor:
        """Decode what all ranks sent as one matrix, average, and encode the mean."""
        rank, world, blocks = self._rank, self._world, self._blocks
        *parts, exact = self._layout.read(received)
        own, errors = self._coded.of(rank), self._numbers.errors
        terms = self._decoded(self._received(parts)).to(self._numbers.dtype)
        copy_all(_pieces(terms[rank], own), self._own)
        mean = divide_in_place(sum_pairs(terms), world)
        # Received padding is arbitrary, but that of the mean must be finite, as all ranks check its scales.
        flat = mean.view(-1)
        zero_all([flat[start:stop] for start, stop in self._coded.gaps(rank)])

        row = self._empty(1)
        *parts, own_exact = self._layout.read(row)
        first = rank * blocks
        ragged = [(0, block - first, n) for block, n in self._coded.ragged if first <= block < first + blocks]
        decoded = self._encoded(mean.unsqueeze(0), tuple(parts), ragged, decoded=errors is not None)
        if self._exact.slots:
            exact[rank].copy_(self._own_exact)
            own_exact[0].copy_(scaled_sum(exact))
        if errors is not None:
            assert decoded is not None, "it was asked for"
            mean.sub_(decoded[0]).mul_(world)
            copy_all([slot.of(errors) for slot in own], _pieces(mean, own))
        return row[0]

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
        """Decode what `_received` returned, to blocks of shape (messages, blocks, width)."""
        shape = (self._world, self._blocks, self._width)
        out = torch.empty(shape, dtype=torch.float32, device=self._device)
        if not out.numel():
            return out
        if self._codec.strided:
            return self._codec.decode_rows(parts, self._constants, out)
        self._codec.decode_blocks(parts, out.flatten(0, 1))
        return out

    def _received(self, parts: Tensors) -> Parts:
        """Return the parts of all rows, for the codec: matrices with one block per row, or as they are."""
        if self._codec.strided:
            return tuple(parts)
        return tuple(part.flatten(0, 1).contiguous() for part in parts)

    def _encoded(
        self, x: torch.Tensor, parts: Parts, ragged: Ragged, *, decoded: bool
    ) -> torch.Tensor | None:
        """Encode blocks of shape (messages, blocks, width) to parts, and return them decoded if asked to."""
        codec, layout, wide = self._codec, self._layout, x.to(torch.float32)
        if not x.numel():
            return torch.empty_like(wide)
        if codec.strided:
            return codec.encode_rows(wide, parts, self._constants, ragged, decoded=decoded)
        encoded = codec.encode_blocks(wide.flatten(0, 1))
        for message, block, count in ragged:
            row = message * self._blocks + block
            codec.correct_padded(tuple(part[row] for part in encoded), count, self._width)
        for part, new, shape in zip(parts, encoded, layout.shapes, strict=False):
            if new.shape[1:] != shape[1:]:
                raise changed_layout(
                    Layout(layout.dtypes[:-1], layout.shapes[:-1], x.device), Layout.of(encoded)
                )
            part.copy_(new.view(part.shape))
        if not decoded:
            return None
        out = torch.empty_like(wide)
        sent = tuple(new.to(part.dtype) for part, new in zip(parts, encoded, strict=True))
        codec.decode_blocks(sent, out.flatten(0, 1))
        return out

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
