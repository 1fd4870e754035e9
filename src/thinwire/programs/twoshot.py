"""Two exchanges of encoded chunks: the bytes that a rank sends do not grow with the number of ranks."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from thinwire.codecs.codec import Codec, Parts, numbers_of, reseeded
from thinwire.programs.gathered import check_decodes_alone
from thinwire.programs.program import Bucket, Memory, Outcome
from thinwire.wire.ops import AllGather, AllToAll, Steps
from thinwire.wire.pack import Layout


@dataclass(frozen=True)
class TwoShot:
    """The mean through any codec; a rank sends 2 (W-1)/W of one encoded copy.

        rank r receives chunk r of every rank, encoded         all-to-all
        it takes their mean in float32 and encodes that
        every rank receives the means of all chunks            all-gather

    A rank's own chunk enters the mean as it is. Whatever the codec does, all ranks decode the same bytes, so
    replicas stay identical.

    The error that it tracks is that of both encodings: of what this rank sent, and for its own chunk W times
    that of the mean, since what one rank feeds back counts 1/W.

    Example::

        wire = thinwire.attach(ddp, thinwire.TwoShot(thinwire.Quantize(bits=8)))
    """

    codec: Codec

    def __post_init__(self) -> None:
        check_decodes_alone(self.codec)

    def __call__(self, bucket: Bucket, memory: Memory) -> Steps[Outcome]:
        """Encode, all-to-all, mean, encode, all-gather, decode."""
        rank, world = bucket.rank, bucket.world_size
        codec = reseeded(self.codec, bucket.step, bucket.names[0], rank)
        chunks = Chunks(numbers_of(bucket.buffer), codec, world)
        others = [place for place in range(world) if place != rank]

        encodings = {place: codec.encode(chunks[place]) for place in others or [rank]}
        layout = Layout.of(next(iter(encodings.values())))
        rows = layout.rows(world)
        for place, encoded in encodings.items():
            layout.write(encoded, rows[place])
            if bucket.track_error and place != rank:
                chunks.subtract(place, encoded)
        del encodings
        received = yield AllToAll(rows)

        mean = chunks[rank].to(torch.float32, copy=True)
        for place in others:
            codec.add(layout.read(received[place]), mean)
        encoded = codec.encode(mean.div_(world))
        encoded_means = yield AllGather(layout.write(encoded, layout.rows(1)[0]))

        if not bucket.track_error:
            chunks.decode(encoded_means, layout)
            return Outcome(bucket.buffer)
        codec.add(encoded, mean, -1)
        chunks.replace(rank, mean.mul_(world))
        means = torch.empty_like(bucket.buffer)
        Chunks(numbers_of(means), codec, world).decode(encoded_means, layout)
        return Outcome(means, error=bucket.buffer)


class Chunks:
    """A bucket's numbers in equal chunks, one a rank; what the last ones lack is padded with zeros."""

    def __init__(self, numbers: torch.Tensor, codec: Codec, count: int) -> None:
        self._codec = codec
        self._length = codec.align(-(-numbers.numel() // count))
        starts = range(0, count * self._length, self._length) if self._length else [0] * count
        self._chunks = [numbers[start : start + self._length] for start in starts]

    def __getitem__(self, place: int) -> torch.Tensor:
        """A chunk in full length."""
        chunk = self._chunks[place]
        short = self._length - chunk.numel()
        return functional.pad(chunk, (0, short)) if short else chunk

    def replace(self, place: int, numbers: torch.Tensor) -> None:
        """Put other numbers there."""
        chunk = self._chunks[place]
        if chunk.data_ptr() != numbers.data_ptr():
            chunk.copy_(numbers[: chunk.numel()])

    def subtract(self, place: int, encoded: Parts) -> None:
        """Leave of a chunk what its encoding misses."""
        rest = self[place]
        self._codec.add(encoded, rest, -1)
        self.replace(place, rest)

    def decode(self, rows: torch.Tensor, layout: Layout) -> None:
        """Overwrite every chunk with what its row holds."""
        for place, row in enumerate(rows):
            numbers = self._chunks[place]
            full = numbers if numbers.numel() == self._length else numbers.new_empty(self._length)
            self.replace(place, self._codec.decode(layout.read(row), into=full))
