"""Coders for codecs of blocks, with torch and with native code."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from thinwire.codecs.codec import BlockCodec, Parts, reseeded, rows_at_once, unseeded
from thinwire.codecs.rounding import add_scaled, divide_in_place, sum_pairs_of
from thinwire.engine.pack import Layout, changed_layout
from thinwire.kernels import blocks as kernels
from thinwire.programs.coder import Coder, CoderInput, Tensors


class BlockCoder(Coder):
    """A coder for codecs of blocks. The last block of every piece is padded with zeros."""

    codec: BlockCodec

    def __init__(self, codec: BlockCodec, width: int) -> None:
        self.codec = codec
        self.block = width

    def layout(self, lengths: tuple[int, ...], device: torch.device) -> Layout:
        """Return the layout of parts with one row per block."""
        # Every step has other seeds. With them, each step would encode zeros again to find the same layout.
        return layout_of_blocks(unseeded(self.codec), self.block, lengths, device)

    def encode(self, given: CoderInput, errors: Tensors | None, parts: Parts) -> None:
        """Encode batch by batch."""
        room = _Scratch(given, self.block)
        for batch in room.batches:
            self._write(room, batch, room.filled(batch, in_place=errors is None), 1, errors, parts)

    def encode_mean(
        self,
        given: CoderInput,
        received: Sequence[tuple[Coder, Parts]],
        rank: int,
        errors: Tensors | None,
        parts: Parts,
    ) -> None:
        """Average batch by batch."""
        room, world = _Scratch(given, self.block), len(received) + 1
        for batch in room.batches:
            own = room.filled(batch, in_place=False)
            mean = sum_pairs_of(self._terms(batch, own, received, rank))
            batch.pad(mean)  # the padding of received blocks may not decode to zeros
            self._write(room, batch, divide_in_place(mean, world), world, errors, parts)

    @staticmethod
    def _terms(
        batch: "_Batch", own: torch.Tensor, received: Sequence[tuple[Coder, Parts]], rank: int
    ) -> Iterator[torch.Tensor]:
        """Yield every rank's numbers of a batch, in the order of ranks."""
        for number, (coder, other) in enumerate(received):
            assert isinstance(coder, BlockCoder), "ranks use the same codec"
            if number == rank:
                yield own
            yield coder._decoded(batch, other, torch.empty_like(own, dtype=torch.float32)).to(own.dtype)
        if rank == len(received):
            yield own

    def decode(self, parts: Parts, into: Tensors) -> None:
        """Decode batch by batch, in place where a batch is made of whole blocks."""
        room = _Scratch(CoderInput(into), self.block)
        for batch in room.batches:
            blocks = room.whole_blocks(batch)
            if blocks is not None:
                self._decoded(batch, parts, blocks)
            else:
                batch.scatter(self._decoded(batch, parts, room.back(batch)), into)

    def _write(
        self,
        room: "_Scratch",
        batch: "_Batch",
        x: torch.Tensor,
        weight: int,
        errors: Tensors | None,
        parts: Parts,
    ) -> None:
        # By batch, because an encoding must not repeat its random numbers from batch to batch.
        codec, rows = reseeded(self.codec, batch.first), batch.of(parts)
        encoded = codec.encode_blocks(x.to(torch.float32))
        for row, count in batch.padded:
            codec.correct_padded(tuple(part[row] for part in encoded), count, self.block)
        for part, new in zip(rows, encoded, strict=True):
            if part.shape != new.shape:
                raise changed_layout(Layout.of(rows), Layout.of(encoded))
            part.copy_(new)
        if errors is not None:
            x.sub_(self._decoded(batch, parts, room.back(batch)))
            batch.scatter(x if weight == 1 else x.mul_(weight), errors)

    def _decoded(self, batch: "_Batch", parts: Parts, out: torch.Tensor) -> torch.Tensor:
        reseeded(self.codec, batch.first).decode_blocks(batch.of(parts), out)
        return out


class NativeCoder(BlockCoder):
    """A coder for codecs with a native kernel. It gives the same bits as torch in a single pass over memory.

    Torch runs instead if native code is not built, or if numbers are not float32 or not on a CPU.
    """

    def __init__(self, codec: BlockCodec, width: int, kernel: str) -> None:
        super().__init__(codec, width)
        self._kernel = kernel

    def encode(self, given: CoderInput, errors: Tensors | None, parts: Parts) -> None:
        """Encode in one call, or batch by batch."""
        if not self._runs(given.values, given.residuals, errors):
            return super().encode(given, errors, parts)
        scales, codes = parts
        kernels.encode(
            self._kernel, self.block, given.values, given.residuals, given.keep, errors, scales, codes
        )
        return None

    def encode_mean(
        self,
        given: CoderInput,
        received: Sequence[tuple[Coder, Parts]],
        rank: int,
        errors: Tensors | None,
        parts: Parts,
    ) -> None:
        """Average in one call, or batch by batch."""
        if not self._runs(given.values, given.residuals, errors):
            return super().encode_mean(given, received, rank, errors, parts)
        scales, codes = parts
        others = [(own[0], own[1]) for _, own in received]
        kernels.mean_encode(
            self._kernel,
            self.block,
            given.values,
            given.residuals,
            given.keep,
            others,
            rank,
            errors,
            scales,
            codes,
        )
        return None

    def decode(self, parts: Parts, into: Tensors) -> None:
        """Decode in one call, or batch by batch."""
        if not self._runs(into):
            return super().decode(parts, into)
        scales, codes = parts
        kernels.decode(self._kernel, self.block, scales, codes, into)
        return None

    def _runs(self, *pieces: Tensors | None) -> bool:
        """Return whether native code runs. It does not run on a rank without pieces."""
        given = [piece for some in pieces for piece in some or ()]
        return bool(given) and kernels.supported(self._kernel, given)


class _Slot(NamedTuple):
    """Consecutive numbers of a piece, and the place of the first of them in a batch."""

    piece: int
    start: int
    stop: int
    place: int


class _Batch(NamedTuple):
    """Blocks that are processed together."""

    first: int
    rows: int
    slots: tuple[_Slot, ...]
    gaps: tuple[tuple[int, int], ...]
    """Places that are padded."""
    padded: tuple[tuple[int, int], ...]
    """Rows that are padded, with the count of numbers in each."""

    def of(self, parts: Parts) -> Parts:
        """Return the rows of this batch."""
        return tuple(part[self.first : self.first + self.rows] for part in parts)

    def pad(self, blocks: torch.Tensor) -> None:
        """Write zeros where the blocks have no numbers."""
        flat = blocks.view(-1)
        for start, stop in self.gaps:
            flat[start:stop].zero_()

    def scatter(self, blocks: torch.Tensor, into: Tensors) -> None:
        """Copy the numbers of the blocks to their pieces."""
        flat = blocks.view(-1)
        for slot in self.slots:
            count = slot.stop - slot.start
            into[slot.piece][slot.start : slot.stop].copy_(flat[slot.place : slot.place + count])


class _Scratch:
    """Buffers for one batch of blocks at a time."""

    def __init__(self, given: CoderInput, width: int) -> None:
        self._given, self._width = given, width
        self.batches: tuple[_Batch, ...] = ()
        if given.values:
            like = given.values[0]
            lengths = tuple(piece.numel() for piece in given.values)
            self.batches = _batches(lengths, width, rows_at_once(width, like.device))
        self._x: torch.Tensor | None = None
        self._back: torch.Tensor | None = None

    def filled(self, batch: _Batch, *, in_place: bool) -> torch.Tensor:
        """Return the batch's numbers in blocks, without a copy if `in_place` and it is possible."""
        given = self._given
        if in_place and given.residuals is None and (blocks := self.whole_blocks(batch)) is not None:
            return blocks
        if self._x is None:
            self._x = self._new(given.dtype)
        x = self._x[: batch.rows]
        flat = x.view(-1)
        for slot in batch.slots:
            there = flat[slot.place : slot.place + slot.stop - slot.start].copy_(
                given.values[slot.piece][slot.start : slot.stop]
            )
            if given.residuals is not None:
                residual = given.residuals[slot.piece][slot.start : slot.stop]
                add_scaled(there, residual, given.keep)
        batch.pad(x)
        return x

    def back(self, batch: _Batch) -> torch.Tensor:
        """Return a float32 buffer for the batch's decoded blocks."""
        if self._back is None:
            self._back = self._new(torch.float32)
        return self._back[: batch.rows]

    def whole_blocks(self, batch: _Batch) -> torch.Tensor | None:
        """Return the values of the batch as a view in blocks, or None if no such view exists."""
        if len(batch.slots) > 1 or batch.gaps:
            return None
        (slot,) = batch.slots
        piece = self._given.values[slot.piece]
        if piece.dtype != torch.float32:
            return None
        return piece[slot.start : slot.stop].view(batch.rows, self._width)

    def _new(self, dtype: torch.dtype) -> torch.Tensor:
        rows = max(batch.rows for batch in self.batches)
        return self._given.values[0].new_empty((rows, self._width), dtype=dtype)


@lru_cache(maxsize=4096)
def _batches(lengths: tuple[int, ...], width: int, at_once: int) -> tuple[_Batch, ...]:
    """Return the blocks of pieces in batches of at most `at_once` blocks."""
    found: list[_Batch] = []
    slots: list[_Slot] = []
    first = row = 0

    def end() -> None:
        nonlocal first, row
        ends = [(slot.place + slot.stop - slot.start, slot) for slot in slots]
        ragged = [(stop, -(-stop // width) * width) for stop, _ in ends if stop % width]
        padded = tuple((stop // width, stop % width) for stop, _ in ragged)
        found.append(_Batch(first, row, tuple(slots), tuple(ragged), padded))
        slots.clear()
        first, row = first + row, 0

    for piece, length in enumerate(lengths):
        start = 0
        while start < length:
            stop = min(length, start + (at_once - row) * width)
            slots.append(_Slot(piece, start, stop, row * width))
            row += -(-(stop - start) // width)
            start = stop
            if row == at_once:
                end()
    if slots:
        end()
    return tuple(found)


@lru_cache(maxsize=4096)
def layout_of_blocks(codec: BlockCodec, width: int, lengths: tuple[int, ...], device: torch.device) -> Layout:
    """Return the layout of the blocks of pieces, found by encoding one block of zeros."""
    # Shapes never depend on values, so one block of zeros shows them all.
    parts = codec.encode_blocks(torch.zeros(1, width, dtype=torch.float32, device=device))
    dtypes = codec.part_dtypes or tuple(part.dtype for part in parts)
    count = sum(-(-length // width) for length in lengths)
    return Layout(dtypes, tuple(torch.Size((count, *part.shape[1:])) for part in parts), device)
