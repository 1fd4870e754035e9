"""Every rank receives every rank's encoding: for encodings so small that this costs little."""

from dataclasses import dataclass

import torch

from thinwire.codecs.codec import Codec, numbers_of, reseeded
from thinwire.errors import OptionError
from thinwire.programs.program import Bucket, Memory, Outcome
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

    def __post_init__(self) -> None:
        check_decodes_alone(self.codec)

    def __call__(self, bucket: Bucket, memory: Memory) -> Steps[Outcome]:
        """Encode, all-gather, sum up."""
        codec = reseeded(self.codec, bucket.step, bucket.names[0], bucket.rank)
        encoded = codec.encode(numbers_of(bucket.buffer))
        layout = Layout.of(encoded)
        received = yield AllGather(layout.write(encoded, layout.rows(1)[0]))
        mean = bucket.buffer
        if bucket.track_error:
            codec.add(encoded, numbers_of(bucket.buffer), -1)
            mean = torch.empty_like(bucket.buffer)
        mean.zero_()
        for row in received:
            codec.add(layout.read(row), numbers_of(mean))
        return Outcome(mean.div_(bucket.world_size), error=bucket.buffer if bucket.track_error else None)


def check_decodes_alone(codec: Codec) -> None:
    """Refuse codecs whose encodings can only be read by who has their seed, since every rank has its own."""
    if codec.additive and hasattr(codec, "seed"):
        raise OptionError(
            f"codec={codec!r} needs the sender's seed to decode, and ranks have seeds of their own here: its"
            " encodings add up, so use Reduced(codec)"
        )
