"""Two exchanges of encoded chunks: the bytes that a rank sends do not grow with the number of ranks."""

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch

from thinwire.codecs.codec import Codec, numbers_of, require_codec
from thinwire.programs.gathered import own_codecs
from thinwire.programs.memory import Memory
from thinwire.programs.program import Bucket, Outcome
from thinwire.wire.ops import AllGather, AllToAll, Steps
from thinwire.wire.pack import Layout


@dataclass(frozen=True)
class TwoShot:
    """The mean through any codec; a rank sends 2 (W-1)/W of one encoded copy.

        rank r receives chunk r of every rank, encoded         all-to-all
        it takes their mean in float32 and encodes that
        every rank receives the means of all chunks            all-gather

    A rank's own chunk enters the mean as it is. Whatever the codec does, all ranks decode the same bytes, so
    replicas stay identical. A sum over ranks beyond float32's range is an overflow.

    The error that it tracks is that of both encodings: of what this rank sent, and for its own chunk W times
    that of the mean, since what one rank feeds back counts 1/W.

    Example::

        wire = thinwire.attach(ddp, thinwire.TwoShot(thinwire.Quantize(bits=8)))
    """

    codec: Codec

    spares_vectors: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_codec(self.codec)

    def __call__(self, bucket: Bucket, memory: Memory) -> Steps[Outcome]:
        """Encode, all-to-all, mean, encode, all-gather, decode."""
        rank, world = bucket.rank, bucket.world_size
        codecs = own_codecs(self.codec, bucket)
        chunks = _chunks(numbers_of(bucket.buffer), self.codec, world)
        layouts = [layout_of(self.codec, chunk.numel(), chunk.device) for chunk in chunks]
        others = [place for place in range(world) if place != rank]

        rows = layouts[0].rows(world)
        for place in others:
            encoded = codecs[rank].encode(chunks[place])
            layouts[place].write(encoded, rows[place])
            if bucket.track_error:
                codecs[rank].add(encoded, chunks[place], -1)
        received = yield AllToAll(rows)

        mean = chunks[rank].to(torch.float32, copy=True)
        for place in others:
            codecs[place].add(layouts[rank].read(received[place]), mean)
        encoded = codecs[rank].encode(mean.div_(world))
        row = layouts[0].rows(1)[0]
        layouts[rank].write(encoded, row)
        encoded_means = yield AllGather(row)

        means = bucket.buffer
        if bucket.track_error:
            codecs[rank].add(encoded, mean, -1)
            chunks[rank].copy_(mean.mul_(world))
            means = torch.empty_like(bucket.buffer)
        for place, chunk in enumerate(_chunks(numbers_of(means), self.codec, world)):
            codecs[place].decode(layouts[place].read(encoded_means[place]), into=chunk)
        return Outcome(means, bucket.buffer if bucket.track_error else None)


def _chunks(numbers: torch.Tensor, codec: Codec, count: int) -> list[torch.Tensor]:
    """One for every rank, in order and of one length, but that the numbers end where they end."""
    length = codec.align(-(-numbers.numel() // count))
    return [numbers[place * length : (place + 1) * length] for place in range(count)]


@lru_cache(maxsize=4096)
def layout_of(codec: Codec, length: int, device: torch.device) -> Layout:
    """How so many numbers are laid out once encoded: tried out, once."""
    return Layout.of(codec.encode(torch.zeros(length, device=device)))
