"""The encodings of a whole bucket by its largest entries, for accelerators without Triton's kernels.

`MatrixCoder` decodes again what it has encoded, to find the error. The error of `LargestEntries` is the input
itself except at the kept positions, which the encoder knows.
"""

import torch

from thinwire.codecs.codec import Parts, numbers_of
from thinwire.codecs.rounding import divide_in_place, sum_pairs
from thinwire.codecs.topk import LargestEntries
from thinwire.engine.foreach import add_all, copy_all
from thinwire.programs.block_coder import layout_of_blocks
from thinwire.programs.bucket_coder import BucketCoder, BucketNumbers, scaled_sum, with_exact
from thinwire.programs.coder import Tensors
from thinwire.programs.division import Division
from thinwire.programs.finite import finite
from thinwire.programs.gather_coder import GatherCoder, WholeBucket
from thinwire.programs.matrix_coder import Places, Slot, places_of
from thinwire.programs.program import Bucket, Outcome

_AT_ONCE = 2
"""Ranks whose rows `Gathered` decodes together. Positions take more memory than the numbers that are kept."""


class EntriesCoder(BucketCoder):
    """Encodes the chunks of all owners at once.

    Args:
        bucket: The gradients.
        codec: The codec.
        width: Numbers in a block.
        division: The chunks.
    """

    def __init__(self, bucket: Bucket, codec: LargestEntries, width: int, division: Division) -> None:
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
        # Its own numbers are needed for the mean. A copy, because x becomes the error.
        first = self._rank * self._blocks
        self._own = x[first : first + self._blocks].clone()
        rows = self._empty(self._world)
        *parts, exact = self._layout.read(rows)
        encode(self._codec, x, tuple(parts), error=numbers.errors is not None)
        if self._exact.slots:
            if self._exact.padded:
                exact.zero_()  # padding is averaged and checked too
            values = [slot.of(numbers.values) for slot in self._exact.slots]
            copy_all(_pieces_of_rows(exact, self._exact), values)
        self._own_exact = exact[self._rank]
        if numbers.errors is not None:
            # That of this rank's chunk is replaced by its mean's.
            copy_all([slot.of(numbers.errors) for slot in slots], pieces)
        return rows

    def encode_mean(self, received: torch.Tensor) -> torch.Tensor:
        """Decode what all ranks sent as one matrix, average, and encode the mean."""
        rank, world, blocks = self._rank, self._world, self._blocks
        *parts, exact = self._layout.read(received)
        terms = self._decoded(parts).to(self._numbers.dtype).view(world, blocks, self._width)
        terms[rank].copy_(self._own)
        # Padding is zero in every term: blocks keep zeros there, or nothing.
        mean = divide_in_place(sum_pairs(terms), world)
        row = self._empty(1)[0]
        *parts, own_exact = self._layout.read(row)
        errors = self._numbers.errors
        encode(self._codec, mean, tuple(parts), error=errors is not None)
        if self._exact.slots:
            # An own row may stay behind in an all-to-all.
            exact[rank].copy_(self._own_exact)
            own_exact.copy_(scaled_sum(exact))
        if errors is not None:
            own = self._coded.of(rank)
            copy_all([slot.of(errors) for slot in own], _pieces(mean.mul_(world), own))
        return row

    def decode(self, encoded: torch.Tensor) -> Outcome:
        """Decode the means of all chunks as one matrix, and copy them to their parameters."""
        *parts, exact = self._layout.read(encoded)
        means = self._numbers.for_means([slot.of(self._numbers.values) for slot in self._exact.slots])
        flags: list[torch.Tensor | None] = []
        if self._coded.slots:
            into = [slot.of(means) for slot in self._coded.slots]
            copy_all(into, _pieces(self._decoded(parts), self._coded.slots))
            flags.append(self._codec.finite(tuple(parts)))
        if self._exact.slots:
            into = [slot.of(means) for slot in self._exact.slots]
            copy_all(into, _pieces_of_rows(exact, self._exact))
            flags.append(finite(exact))
        return self._numbers.outcome(flags)

    def _decoded(self, parts: Tensors) -> torch.Tensor:
        shape = self._world * self._blocks, self._width
        out = torch.empty(shape, dtype=torch.float32, device=self._device)
        if out.numel():
            self._codec.decode_blocks(tuple(parts), out)
        return out

    def _empty(self, count: int) -> torch.Tensor:
        return torch.empty(count, self._layout.nbytes, dtype=torch.uint8, device=self._device)


class EntriesGatherCoder(GatherCoder):
    """Encodes a whole bucket, and decodes the rows of two ranks at a time.

    Args:
        codec: The codec.
        bucket: The gradients, in float32.
    """

    def __init__(self, codec: LargestEntries, bucket: Bucket) -> None:
        self._codec, self._whole = codec, WholeBucket(bucket)
        numbers = self._whole.numbers
        self._length, self._width = numbers.numel(), codec.width(numbers.numel())
        self._layout = layout_of_blocks(codec, self._width, (self._length,), numbers.device)

    def encode(self) -> torch.Tensor:
        """Encode, and replace the numbers by their error."""
        self._whole.add_residuals()
        numbers, layout = self._whole.numbers, self._layout
        x = numbers
        if missing := -self._length % self._width:
            x = torch.nn.functional.pad(numbers, (0, missing))
        row = torch.empty(layout.nbytes, dtype=torch.uint8, device=layout.device)
        encode(self._codec, x.view(-1, self._width), layout.read(row), error=self._whole.tracked)
        if missing and self._whole.tracked:
            numbers.copy_(x[: self._length])
        return row

    def decode(self, received: torch.Tensor) -> Outcome:
        """Sum the decoded gradients in the order of ranks."""
        blocks = -(-self._length // self._width)
        total = torch.zeros(blocks, self._width, dtype=torch.float32, device=self._layout.device)
        for start in range(0, len(received), _AT_ONCE):
            rows = received[start : start + _AT_ONCE]
            places, values = self._codec.decode_entries(self._layout.read(rows), self._width)
            values.add_(0.0)  # the sum of 0 and -0 is 0
            for number, (at, term) in enumerate(zip(places.split(blocks), values.split(blocks), strict=True)):
                # Not `scatter_add_`: GPUs add to memory with subnormal numbers as zeros.
                held = term if start + number == 0 else term.add_(total.gather(1, at))
                total.scatter_(1, at, held)
        mean = self._whole.room_for_mean()
        numbers_of(mean).copy_(divide_in_place(total, len(received)).view(-1)[: self._length])
        return self._whole.outcome(mean)


def encode(codec: LargestEntries, x: torch.Tensor, parts: Parts, *, error: bool) -> None:
    """Encode a matrix of blocks to parts, which may have another dimension before those of the matrix.

    Args:
        codec: The codec.
        x: The blocks. With `error` they are overwritten with x - decoded.
        parts: Overwritten with the encoding.
        error: Whether the error is needed.
    """
    if not len(x):
        return
    encoded, places, values, codes = codec.encode_entries(x.to(torch.float32))
    for part, new in zip(parts, encoded, strict=True):
        part.copy_(new.view(part.shape))
    if error:
        missed = values.to(x.dtype).sub_(codec.decode_values(encoded[0], codes))
        x.scatter_(1, places, missed)


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
