"""What a codec is: a pure function from numbers to what travels, and its inverse as far as there is one.

    encode(x) -> parts          x: any shape, any floating dtype
    decode(parts, into)         into: as many numbers, in the dtype wanted

The sizes and dtypes of the parts depend on the number of numbers alone, never on their values: ranks lay out
each other's bytes by their own. An infinite or NaN number must leave at least one non-finite number after
decoding, so that no rank misses an overflow.

A codec that draws random numbers has a field `seed`; programs set it anew for every step and bucket.
"""

import dataclasses
import threading
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from numbers import Integral
from typing import Any, ClassVar, TypeGuard, TypeVar

import torch

from thinwire.errors import OptionError

Parts = tuple[torch.Tensor, ...]
"""An encoding: one or more tensors that travel together."""

_AT_ONCE = 1 << 18
"""Numbers worked on at a time: what fits in a core's second-level cache with its intermediate results."""


class Codec(ABC):
    """Encodes numbers for the wire; stateless: make it a frozen dataclass."""

    additive: ClassVar[bool] = False
    """Whether encodings may be summed: decode(a + b) = decode(a) + decode(b), but for rounding."""

    @property
    @abstractmethod
    def wire_bits(self) -> float:
        """Bits that each of many numbers takes on the wire."""

    @abstractmethod
    def encode(self, x: torch.Tensor) -> Parts:
        """What travels; never `x` itself."""

    @abstractmethod
    def decode(self, parts: Parts, into: torch.Tensor) -> torch.Tensor:
        """Write the numbers into `into`, in its dtype, and return it."""

    def add(self, parts: Parts, into: torch.Tensor, weight: float = 1.0) -> None:
        """Add `weight` times the numbers to `into`."""
        into.add_(self.decode(parts, torch.empty_like(into)), alpha=weight)

    def align(self, length: int) -> int:
        """The next length from `length` on that takes no more bytes than it must."""
        return length


class BlockCodec(Codec):
    """A codec that treats every `block` consecutive numbers alike, whatever their neighbours.

    A subclass encodes and decodes a matrix with one block a row. This class brings anything into that form,
    a cache-full at a time, and pads the last block with zeros. Fewer numbers than a block make a short one.
    """

    block: int

    @property
    def kept_as(self) -> tuple[torch.dtype, ...] | None:
        """The parts' dtypes, where `encode_blocks` leaves the conversion to the copy that follows it."""
        return None

    @abstractmethod
    def encode_blocks(self, x: torch.Tensor) -> Parts:
        """Encode the rows of `x`, float32, and leave them as they are; each part has a row per row of `x`."""

    @abstractmethod
    def decode_blocks(self, parts: Parts, out: torch.Tensor) -> None:
        """Write the numbers into the rows of `out`, float32."""

    def encode(self, x: torch.Tensor) -> Parts:
        """Block by block; every part has one row per block."""
        flat = numbers_of(x.detach())
        count, width = self._shape(flat.numel())
        scratch = self._scratch(flat)
        whole: list[torch.Tensor] = []
        for start, rows in self._chunks(flat.numel()):
            piece = flat[start * width : (start + rows) * width]
            if piece.numel() == rows * width and piece.dtype == torch.float32:
                blocks = piece.view(rows, width)
            else:
                blocks = scratch[:rows]
                blocks.view(-1)[: piece.numel()].copy_(piece)
                blocks.view(-1)[piece.numel() :].zero_()
            parts = reseeded(self, start).encode_blocks(blocks)
            if not whole:
                dtypes = self.kept_as or tuple(part.dtype for part in parts)
                whole = [
                    part.new_empty((count, *part.shape[1:]), dtype=dtype)
                    for part, dtype in zip(parts, dtypes, strict=True)
                ]
            for all_blocks, part in zip(whole, parts, strict=True):
                all_blocks[start : start + rows].copy_(part)
        return tuple(whole)

    def decode(self, parts: Parts, into: torch.Tensor) -> torch.Tensor:
        """Block by block."""
        flat = room_of(into)
        for piece, blocks in self._decoded(parts, flat):
            if piece.data_ptr() != blocks.data_ptr():
                piece.copy_(blocks.view(-1)[: piece.numel()])
        return into

    def add(self, parts: Parts, into: torch.Tensor, weight: float = 1.0) -> None:
        """Block by block: what is decoded is added while the processor still has it at hand."""
        for piece, blocks in self._decoded(parts, room_of(into), apart=True):
            piece.add_(blocks.view(-1)[: piece.numel()], alpha=weight)

    def align(self, length: int) -> int:
        """Whole blocks."""
        count, width = self._shape(length)
        return count * width

    def _decoded(
        self, parts: Parts, flat: torch.Tensor, *, apart: bool = False
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pieces of `flat`, and the blocks decoded for them: in place where that can be, unless `apart`."""
        width = self._shape(flat.numel())[1]
        scratch = self._scratch(flat)
        for start, rows in self._chunks(flat.numel()):
            piece = flat[start * width : (start + rows) * width]
            in_place = piece.numel() == rows * width and piece.dtype == torch.float32 and not apart
            blocks = piece.view(rows, width) if in_place else scratch[:rows]
            chunk = tuple(part[start : start + rows] for part in parts)
            reseeded(self, start).decode_blocks(chunk, blocks)
            yield piece, blocks

    def _shape(self, length: int) -> tuple[int, int]:
        """How many blocks, and of what width."""
        width = min(self.block, -(-length // 8) * 8) or 8
        return -(-length // width), width

    def _chunks(self, length: int) -> Iterator[tuple[int, int]]:
        """(first block, how many) of what is worked on at a time; one empty chunk for no numbers."""
        count, width = self._shape(length)
        rows = max(1, _AT_ONCE // width)
        for start in range(0, max(count, 1), rows):
            yield start, min(rows, count - start)

    def _scratch(self, flat: torch.Tensor) -> torch.Tensor:
        """Room for one chunk."""
        rows = max(rows for _, rows in self._chunks(flat.numel()))
        return torch.empty(rows, self._shape(flat.numel())[1], device=flat.device)


def numbers_of(x: torch.Tensor) -> torch.Tensor:
    """The same numbers in one row; complex ones as pairs. Shares memory with a contiguous `x`."""
    return (torch.view_as_real(x) if x.is_complex() else x).reshape(-1)


def room_of(into: torch.Tensor) -> torch.Tensor:
    """The same for writing, which a copy would swallow."""
    if not into.is_contiguous():
        raise OptionError(
            f"into has strides {into.stride()}: codecs write to contiguous tensors; decode into one and copy"
        )
    return numbers_of(into)


Some = TypeVar("Some", bound=Codec)


def reseeded(codec: Some, *words: object) -> Some:
    """The codec with its `seed`, if it has one, mixed with these words."""
    if not hasattr(codec, "seed"):
        return codec
    frozen: Any = codec
    changed: Some = dataclasses.replace(frozen, seed=zlib.crc32(f"{frozen.seed} {words}".encode()))
    return changed


def room_like(x: torch.Tensor) -> torch.Tensor:
    """Room for a float32 result of this shape, lent until the next call in this thread.

    On a CPU it is the same memory each time: fresh memory costs more than what is computed in it.
    """
    if x.device.type != "cpu":
        return torch.empty_like(x)
    room: torch.Tensor | None = getattr(_lent, "room", None)
    if room is None or room.numel() < x.numel():
        room = _lent.room = torch.empty(max(x.numel(), _AT_ONCE))
    return room[: x.numel()].view(x.shape)


_lent = threading.local()


def require_codec(codec: object) -> None:
    """Refuse what is no codec."""
    if not isinstance(codec, Codec):
        raise OptionError(
            f"codec={codec!r} is no codec: give an instance of a subclass of thinwire.Codec, such as"
            " thinwire.Quantize(bits=8); Int8() and its like are whole programs"
        )


def check_block(block: object, *, of: int = 1, most: int = 1 << 20) -> None:
    """Refuse block sizes that a codec cannot have."""
    if not is_whole(block) or not of <= block <= most or block % of:
        raise OptionError(
            f"block={block!r} must be a whole number from {of} to {most}"
            + (f", a multiple of {of}" if of > 1 else "")
            + ": so many numbers share a scale; try 256"
        )


def check_seed(seed: object) -> None:
    """Refuse seeds that are no numbers."""
    if not is_whole(seed):
        raise OptionError(f"seed={seed!r} must be a whole number: programs mix it with the step")


def is_whole(value: object) -> "TypeGuard[int]":
    """Whether it is a whole number, of whatever library; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def scale_of(x: torch.Tensor, levels: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's largest magnitude over `levels`, and its reciprocal, 0 where that would not be finite.

    A row with an infinite or NaN number has such a scale.
    """
    most = torch.maximum(x.amax(1, keepdim=True), x.amin(1, keepdim=True).neg_())
    return most / levels, torch.where(most > TINY, levels / most, 0.0)


TINY = 1e-33
"""Rows whose numbers all are smaller than this are taken for zero: reciprocals would overflow."""
