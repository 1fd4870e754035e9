"""The choice of a coder for a codec, and a coder for any codec."""

from collections.abc import Sequence
from functools import lru_cache

import torch

from thinwire.codecs.codec import BlockCodec, Codec, Parts, reseeded, unseeded
from thinwire.codecs.rounding import add_scaled, divide_in_place
from thinwire.engine.pack import Layout, changed_layout
from thinwire.programs.block_coder import BlockCoder, NativeCoder
from thinwire.programs.coder import Coder, CoderInput, Tensors, scatter
from thinwire.programs.program import Bucket


def coders_of(codec: Codec, bucket: Bucket) -> list[Coder]:
    """Return the coder of each rank in this step. No block is wider than the largest parameter."""
    pairs, sizes = 2 if bucket.buffer.is_complex() else 1, zip(bucket.names, bucket.shapes, strict=True)
    longest = max((shape.numel() for name, shape in sizes if name not in bucket.exact), default=0)
    if not codec.draws:
        return [coder_of(codec, pairs * longest)] * bucket.world_size
    return [coder_of(own, pairs * longest) for own in own_codecs(codec, bucket)]


def own_codecs(codec: Codec, bucket: Bucket) -> list[Codec]:
    """Return the codec of each rank in this step."""
    return seeded(codec, bucket.world_size, bucket.step, bucket.names[0])


def seeded(codec: Codec, ranks: int, *words: object) -> list[Codec]:
    """Return the codec of each rank. If it draws random numbers, every rank derives the seeds of all ranks.

    Args:
        codec: The codec.
        ranks: The number of ranks.
        *words: What the seeds depend on, equal on all ranks.
    """
    if not codec.draws:
        return [codec] * ranks
    return [reseeded(codec, *words, rank) for rank in range(ranks)]


def coder_of(codec: Codec, longest: int) -> Coder:
    """Return the coder of a codec for pieces of at most this length."""
    if not isinstance(codec, BlockCodec):
        return JoinedCoder(codec)
    width = codec.width(longest)
    return BlockCoder(codec, width) if codec.kernel is None else NativeCoder(codec, width, codec.kernel)


class JoinedCoder(Coder):
    """A coder for any codec, on a joined copy of the pieces."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.block = codec.align(1)

    def layout(self, lengths: tuple[int, ...], device: torch.device) -> Layout:
        """Return the layout of the codec's encoding of this many numbers."""
        return layout_of(unseeded(self.codec), sum(lengths), device)

    def encode(self, given: CoderInput, errors: Tensors | None, parts: Parts) -> None:
        """Join the numbers and encode them."""
        # A single tensor needs no copy, unless its error, which overwrites it, is to be written elsewhere.
        single = given.residuals is None and len(given.values) == 1
        in_place = errors is given.values and given.values[0].dtype == given.dtype
        whole = single and (errors is None or in_place)
        self._write(given.values[0] if whole else _joined(given, parts[0].device), 1, errors, parts)

    def encode_mean(
        self,
        given: CoderInput,
        received: Sequence[tuple[Coder, Parts]],
        rank: int,
        errors: Tensors | None,
        parts: Parts,
    ) -> None:
        """Join the numbers, add those received, and encode the mean."""
        mean = _joined(given, parts[0].device)
        for coder, other in received:
            assert isinstance(coder, JoinedCoder), "ranks use the same codec"
            coder.codec.add(other, mean)
        world = len(received) + 1
        self._write(divide_in_place(mean, world), world, errors, parts)

    def decode(self, parts: Parts, into: Tensors) -> None:
        """Decode into one tensor, and copy its pieces."""
        if into:
            flat = into[0].new_empty(sum(piece.numel() for piece in into))
            scatter(self.codec.decode(parts, flat), into)

    def _write(self, x: torch.Tensor, weight: int, errors: Tensors | None, parts: Parts) -> None:
        encoded = self.codec.encode(x)
        if Layout.of(encoded) != Layout.of(parts):
            raise changed_layout(Layout.of(parts), Layout.of(encoded))
        for part, new in zip(parts, encoded, strict=True):
            part.copy_(new)
        if errors is not None:
            self.codec.add(encoded, x, -1)
            scatter(x.mul_(weight), errors)


def _joined(given: CoderInput, device: torch.device) -> torch.Tensor:
    """Return the numbers in one new tensor of at least float32.

    A rank without pieces has no tensor that could tell the device. The codec encodes nothing there all the
    same, because its encoding of no numbers may have parts.
    """
    if not given.values:
        return torch.empty(0, dtype=torch.float32, device=device)
    x = torch.cat(given.values).to(given.dtype)
    if given.residuals is not None:
        add_scaled(x, torch.cat(given.residuals), given.keep)
    return x


@lru_cache(maxsize=4096)
def layout_of(codec: Codec, length: int, device: torch.device) -> Layout:
    """Return the layout of an encoding of `length` numbers, found by encoding zeros once."""
    return Layout.of(codec.encode(torch.zeros(length, dtype=torch.float32, device=device)))
