"""Every rank receives every rank's encoding: for encodings so small that this costs little."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from thinwire.codecs.codec import Codec, numbers_of, require_codec, reseeded
from thinwire.programs.memory import Memory
from thinwire.programs.program import Bucket, Outcome
from thinwire.wire.ops import AllGather, Steps
from thinwire.wire.pack import Layout


@dataclass(frozen=True)
class Gathered:
    """The mean of all ranks' encodings, each encoded once; a rank sends W-1 encoded copies.

    For sparse codecs: where ranks chose the same place, their numbers add up. One encoding is more accurate
    than `TwoShot`'s two, but bytes grow with the number of ranks.

    Example::

        wire = thinwire.attach(ddp, thinwire.Gathered(thinwire.LargestEntries(ratio=0.01)))
    """

    codec: Codec

    spares_vectors: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_codec(self.codec)

    def __call__(self, bucket: Bucket, memory: Memory) -> Steps[Outcome]:
        """Encode, all-gather, sum up."""
        codecs, numbers = own_codecs(self.codec, bucket), numbers_of(bucket.buffer)
        encoded = codecs[bucket.rank].encode(numbers)
        layout = Layout.of(encoded)
        received = yield AllGather(layout.write(encoded, layout.rows(1)[0]))
        total = torch.zeros_like(numbers, dtype=torch.promote_types(numbers.dtype, torch.float32))
        for codec, row in zip(codecs, received, strict=True):
            codec.add(layout.read(row), total)
        mean = torch.empty_like(bucket.buffer) if bucket.track_error else bucket.buffer
        numbers_of(mean).copy_(total.div_(bucket.world_size))
        if not bucket.track_error:
            return Outcome(mean)
        codecs[bucket.rank].add(encoded, numbers, -1)
        return Outcome(mean, error=bucket.buffer)


def own_codecs(codec: Codec, bucket: Bucket) -> list[Codec]:
    """The codec as each rank has it in this step: with a seed of its own, which the others know as well."""
    if not hasattr(codec, "seed"):
        return [codec] * bucket.world_size
    return [reseeded(codec, bucket.step, bucket.names[0], rank) for rank in range(bucket.world_size)]
