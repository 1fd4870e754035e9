"""The base classes of codecs, and the helpers that codecs share.

    encode(x) -> parts          x: any shape, any floating dtype
    decode(parts, into)         into: as many numbers as x has, in any floating dtype

Shapes and dtypes of the parts depend only on the number of elements, never on their values, because each rank
reads the others' bytes with its own layout. If a number is non-finite, at least one decoded number must be
non-finite, so that every rank detects the overflow.

A codec that draws random numbers has a field `seed`. Programs derive a new seed for every step and bucket.
"""

import dataclasses
import sys
import threading
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, TypeVar

import torch

from thinwire.codecs.rounding import add_scaled
from thinwire.errors import OptionError
from thinwire.kernels import blocks as native_blocks

Parts = tuple[torch.Tensor, ...]
"""An encoding: one or more tensors that are sent together."""

Ragged = Sequence[tuple[int, int, int]]
"""Padded blocks of messages: the message, the block, and the count of numbers that are not padding."""

_AT_ONCE = 1 << 18
"""Numbers processed at a time, so that they and their intermediate results fit in a core's L2 cache."""


class Codec(ABC):
    """The protocol of codecs. A codec is stateless, and preferably a frozen dataclass.

    Example::

        @dataclass(frozen=True)
        class Half(thinwire.Codec):
            additive = True
            wire_bits = 16

            def encode(self, x):
                return (x.flatten().to(torch.float16, copy=True),)

            def decode(self, parts, into):
                return into.copy_(parts[0].view_as(into))

        wire = thinwire.attach(ddp, thinwire.Reduced(Half()))
    """

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers from its `seed`."""
        return hasattr(self, "seed")

    additive: ClassVar[bool] = False
    """Whether encodings can be summed: decode(a + b) = decode(a) + decode(b), except for rounding."""

    @property
    @abstractmethod
    def wire_bits(self) -> float:
        """Bits per number on the wire, for a large tensor."""

    @abstractmethod
    def encode(self, x: torch.Tensor) -> Parts:
        """Encode the numbers of a tensor.

        Args:
            x: Numbers of any shape and floating dtype. It is not changed.

        Returns:
            Tensors that share no memory with `x`. Their shapes and dtypes depend only on the number of
            elements of `x`.
        """

    @abstractmethod
    def decode(self, parts: Parts, into: torch.Tensor) -> torch.Tensor:
        """Write the encoded numbers to a tensor, in its dtype.

        Args:
            parts: An encoding, as `encode` returns it.
            into: A contiguous tensor with as many numbers as were encoded. All of it is overwritten.

        Returns:
            `into`.

        Raises:
            OptionError: `into` is not contiguous.
        """

    def add(self, parts: Parts, into: torch.Tensor, weight: float = 1.0) -> None:
        """Add `weight` times the encoded numbers to a tensor.

        Args:
            parts: An encoding, as `encode` returns it.
            into: A contiguous tensor with as many numbers as were encoded. It is changed in place.
            weight: Factor of the encoded numbers.

        Raises:
            OptionError: `into` is not contiguous.
        """
        add_scaled(into, self.decode(parts, torch.empty_like(into)), weight)

    def align(self, length: int) -> int:
        """Return the length to which a chunk is rounded up, so that its last block is not padded.

        Args:
            length: Number of elements in a chunk.

        Returns:
            A length of at least `length` whose encoding wastes no bytes on padding.
        """
        return length

    def finite(self, parts: Parts) -> torch.Tensor | None:
        """Return whether all decoded numbers will be finite, from the parts alone.

        A check of scales reads one number per block. It must not depend on whether native code runs: at the
        edge of float32's range a scale can be finite although a decoded number is not, and ranks would
        diverge.

        Args:
            parts: An encoding, as `encode` returns it.

        Returns:
            A scalar bool tensor, which must be equal for equal parts on all hosts. With None, the default,
            the decoded numbers are checked.
        """
        return None


class BlockCodec(Codec):
    """A codec that encodes every `block` consecutive numbers independently of all others.

    A subclass encodes and decodes a matrix with one block per row. This class brings tensors into that form,
    one cache-sized chunk at a time, and pads the last block with zeros. A tensor with fewer numbers than
    `block` is one narrower block.

    Example::

        @dataclass(frozen=True)
        class Scaled(thinwire.BlockCodec):
            block: int = 64

            @property
            def wire_bits(self):
                return 8 + 32 / self.block

            def encode_blocks(self, x):
                scale = x.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127
                return scale, (x / scale).round().to(torch.int8)

            def decode_blocks(self, parts, out):
                scale, codes = parts
                out.copy_(codes).mul_(scale)

        wire = thinwire.attach(ddp, thinwire.ErrorFeedback(thinwire.TwoShot(Scaled())))
    """

    block: int
    """Numbers in a block."""

    @property
    def kernel(self) -> str | None:
        """The encoding of `thinwire.kernels.blocks` that gives the same bits, or None if there is none.

        A codec with a kernel has two parts: float32 scales, one per block, and codes.
        """
        return None

    @property
    def part_dtypes(self) -> tuple[torch.dtype, ...] | None:
        """Dtypes of the parts if they differ from those that `encode_blocks` returns, else None."""
        return None

    @property
    def strided(self) -> bool:
        """Whether `encode_rows`, `decode_rows` and `finite` take many messages at once, by default not.

        Numbers and parts then have a dimension more before those of the matrix, and parts are not contiguous.
        It saves copies on accelerators.
        """
        return False

    def constants(self, device: torch.device) -> Parts:
        """Return tensors that `encode_rows` and `decode_rows` need, to make them once for several calls."""
        return ()

    @abstractmethod
    def encode_blocks(self, x: torch.Tensor) -> Parts:
        """Encode a matrix with one block per row.

        Args:
            x: Blocks in float32. Do not change them. Tensors shorter than `block` come as one narrower block,
                whose width is a multiple of 8. An empty tensor comes as a matrix without rows.

        Returns:
            Parts with one row per row of `x`.
        """

    @abstractmethod
    def decode_blocks(self, parts: Parts, out: torch.Tensor) -> None:
        """Write the encoded numbers to a matrix with one block per row.

        Args:
            parts: The result of `encode_blocks`, in the dtypes of `part_dtypes`.
            out: A float32 matrix. Overwrite all of it.
        """

    def encode_rows(
        self, x: torch.Tensor, parts: Parts, constants: Parts, ragged: Ragged, *, decoded: bool
    ) -> torch.Tensor | None:
        """Encode the blocks of many messages directly to their parts, for a codec that is `strided`.

        An accelerator launches a kernel for every operation. A subclass saves those that copy parts, and
        those that decode them again.

        Args:
            x: Blocks in float32, of shape (messages, blocks, width). Do not change them.
            parts: Overwritten with the encoding. Parts have shape (messages, blocks, ...).
            constants: The result of `constants`.
            ragged: The blocks that are padded with zeros.
            decoded: Whether to return the decoded numbers.

        Returns:
            The numbers that `decode_rows` would return for `parts`, in a new tensor, or None.
        """
        encoded = self.encode_blocks(x.flatten(0, 1))
        for place, part in enumerate(parts):
            part.copy_(encoded[place].view(part.shape))
        del encoded  # codes can be as large as x
        for message, block, count in ragged:
            self.correct_padded(tuple(part[message, block] for part in parts), count, x.shape[-1])
        return self.decode_rows(parts, constants, torch.empty_like(x)) if decoded else None

    def decode_rows(self, parts: Parts, constants: Parts, out: torch.Tensor) -> torch.Tensor:
        """Write the numbers of many messages to `out`, and return it, for a codec that is `strided`.

        Args:
            parts: Encodings, of shape (messages, blocks, ...).
            constants: The result of `constants`.
            out: A contiguous float32 tensor of shape (messages, blocks, width). Overwrite all of it.
        """
        self.decode_blocks(parts, out)
        return out

    def correct_padded(self, parts: Parts, count: int, width: int) -> None:
        """Correct the encoding of a block that was padded with zeros, in place. By default do nothing.

        Args:
            parts: The block's row of each part.
            count: Numbers in the block.
            width: Numbers and zeros in the block.
        """

    def width(self, length: int) -> int:
        """Return the width of a block.

        Args:
            length: Number of elements of the tensor.

        Returns:
            `block`, or `length` rounded up to a multiple of 8 if that is less.
        """
        return self._shape(length)[1]

    def encode(self, x: torch.Tensor) -> Parts:
        """Encode block by block. Every part has one row per block."""
        flat = numbers_of(x.detach())
        kernel = self._native(flat)
        if kernel is None:
            return self._encode_with_torch(flat)
        count, width = self._shape(flat.numel())
        scales = flat.new_empty((count, 1))
        row = width * native_blocks.bits_of(kernel) // 8
        codes = flat.new_empty((count, row), dtype=self.part_dtypes[-1] if self.part_dtypes else torch.uint8)
        native_blocks.encode(kernel, width, [flat], None, 1.0, None, scales, codes)
        return scales, codes

    def _native(self, flat: torch.Tensor, parts: Parts = ()) -> str | None:
        """Return the kernel if native code can be called with these tensors, else None."""
        kernel = self.kernel
        if kernel is None or not native_blocks.supported(kernel, [flat]):
            return None
        return kernel if all(part.is_contiguous() for part in parts) else None

    def _encode_with_torch(self, flat: torch.Tensor) -> Parts:
        """Encode flat numbers chunk by chunk with `encode_blocks`."""
        count, width = self._shape(flat.numel())
        scratch = self._scratch(flat)
        whole: list[torch.Tensor] = []
        for start, rows in self._chunks(flat):
            piece = flat[start * width : (start + rows) * width]
            if piece.numel() == rows * width and piece.dtype == torch.float32:
                blocks = piece.view(rows, width)
            else:
                blocks = scratch[:rows]
                blocks.view(-1)[: piece.numel()].copy_(piece)
                blocks.view(-1)[piece.numel() :].zero_()
            parts = reseeded(self, start).encode_blocks(blocks)
            if piece.numel() % width:
                self.correct_padded(tuple(part[-1] for part in parts), piece.numel() % width, width)
            if not whole:
                dtypes = self.part_dtypes or tuple(part.dtype for part in parts)
                whole = [
                    part.new_empty((count, *part.shape[1:]), dtype=dtype)
                    for part, dtype in zip(parts, dtypes, strict=True)
                ]
            for all_blocks, part in zip(whole, parts, strict=True):
                all_blocks[start : start + rows].copy_(part)
        return tuple(whole)

    def decode(self, parts: Parts, into: torch.Tensor) -> torch.Tensor:
        """Decode block by block into `into`, and return it."""
        flat = flat_output(into)
        kernel = self._native(flat, parts)
        if kernel is not None:
            scales, codes = parts
            native_blocks.decode(kernel, self._shape(flat.numel())[1], scales, codes, [flat])
            return into
        for piece, blocks, in_place in self._decoded(parts, flat):
            if not in_place:
                piece.copy_(blocks.view(-1)[: piece.numel()])
        return into

    def add(self, parts: Parts, into: torch.Tensor, weight: float = 1.0) -> None:
        """Add `weight` times the encoded numbers, chunk by chunk while they are in the cache."""
        flat = flat_output(into)
        kernel = self._native(flat, parts)
        if kernel is not None:
            scales, codes = parts
            native_blocks.add(kernel, self._shape(flat.numel())[1], scales, codes, [flat], weight)
            return
        for piece, blocks, _ in self._decoded(parts, flat, in_scratch=True):
            add_scaled(piece, blocks.view(-1)[: piece.numel()], weight)

    def align(self, length: int) -> int:
        """Return `length` rounded up to whole blocks."""
        count, width = self._shape(length)
        return count * width

    def _decoded(
        self, parts: Parts, flat: torch.Tensor, *, in_scratch: bool = False
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, bool]]:
        """Yield pieces of `flat`, their decoded blocks, and whether these share the piece's memory."""
        width = self._shape(flat.numel())[1]
        scratch = self._scratch(flat)
        for start, rows in self._chunks(flat):
            piece = flat[start * width : (start + rows) * width]
            in_place = piece.numel() == rows * width and piece.dtype == torch.float32 and not in_scratch
            blocks = piece.view(rows, width) if in_place else scratch[:rows]
            chunk = tuple(part[start : start + rows] for part in parts)
            reseeded(self, start).decode_blocks(chunk, blocks)
            yield piece, blocks, in_place

    def _shape(self, length: int) -> tuple[int, int]:
        """Return the number of blocks and their width."""
        width = min(self.block, -(-length // 8) * 8) or 8
        return -(-length // width), width

    def _chunks(self, flat: torch.Tensor) -> Iterator[tuple[int, int]]:
        """Yield the first block and the number of blocks of each chunk, or one empty chunk for no numbers.

        A chunk fits in the cache of a CPU. On an accelerator one chunk contains everything, to launch few
        kernels.
        """
        count, width = self._shape(flat.numel())
        rows = rows_at_once(width, flat.device)
        for start in range(0, max(count, 1), rows):
            yield start, min(rows, count - start)

    def _scratch(self, flat: torch.Tensor) -> torch.Tensor:
        """Return an uninitialised float32 buffer for one chunk."""
        rows = max(rows for _, rows in self._chunks(flat))
        return flat.new_empty((rows, self._shape(flat.numel())[1]), dtype=torch.float32)


def rows_at_once(width: int, device: torch.device) -> int:
    """Return the number of blocks that are processed together: as many as fit in a cache, or all on a GPU."""
    return max(1, _AT_ONCE // width) if device.type == "cpu" else sys.maxsize


def numbers_of(x: torch.Tensor) -> torch.Tensor:
    """Return the numbers as a flat tensor, complex ones as pairs. It is a view of a contiguous `x`."""
    return (torch.view_as_real(x) if x.is_complex() else x).reshape(-1)


def flat_output(into: torch.Tensor) -> torch.Tensor:
    """Return a flat view of `into` to write to. Raise OptionError unless it is contiguous."""
    if not into.is_contiguous():
        raise OptionError(
            f"into has strides {into.stride()}: codecs write to contiguous tensors; decode into one and copy"
        )
    return numbers_of(into)


Some = TypeVar("Some", bound=Codec)


def reseeded(codec: Some, *words: object) -> Some:
    """Return the codec with its `seed`, if it has one, mixed with these words."""
    if not hasattr(codec, "seed"):
        return codec
    frozen: Any = codec
    changed: Some = dataclasses.replace(frozen, seed=zlib.crc32(f"{frozen.seed} {words}".encode()))
    return changed


def unseeded(codec: Some) -> Some:
    """Return the codec with the seed 0, if it has one. Shapes and dtypes of parts never depend on a seed."""
    frozen: Any = codec
    same: Some = dataclasses.replace(frozen, seed=0) if hasattr(codec, "seed") else codec
    return same


def scratch_like(x: torch.Tensor) -> torch.Tensor:
    """Return an uninitialised float32 tensor of this shape, valid until the next call in this thread.

    On a CPU all calls share one buffer, because allocating costs more than the computation does.
    """
    if x.device.type != "cpu" or type(x) is not torch.Tensor:
        return torch.empty_like(x)
    buffer: torch.Tensor | None = getattr(_reused, "buffer", None)
    if buffer is None or buffer.numel() < x.numel():
        buffer = _reused.buffer = x.new_empty(max(x.numel(), _AT_ONCE), dtype=torch.float32)
    return buffer[: x.numel()].view(x.shape)


_reused = threading.local()


def require_codec(codec: object) -> None:
    """Raise OptionError unless `codec` is an instance of Codec."""
    if not isinstance(codec, Codec):
        raise OptionError(
            f"codec={codec!r} is not a codec: pass an instance of a subclass of thinwire.Codec, such as"
            " thinwire.Quantize(bits=8); Int8() and other presets are complete programs"
        )
