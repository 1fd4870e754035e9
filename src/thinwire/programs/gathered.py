"""A program that all-gathers encodings, for codecs whose encodings are small."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from thinwire.codecs.codec import Codec, numbers_of, require_codec
from thinwire.engine.ops import AllGather, Collective, Collectives
from thinwire.engine.pack import Layout
from thinwire.programs.coding import own_codecs
from thinwire.programs.description import ReprAsWritten
from thinwire.programs.memory import Memory
from thinwire.programs.program import Bucket, Outcome, is_alone, unchanged


@dataclass(frozen=True, repr=False)
class Gathered(ReprAsWritten):
    """The mean of all ranks' gradients, each encoded once. A rank sends W-1 encoded copies.

    It suits sparse codecs, because ranks may keep numbers at different positions. Encoding once is more
    accurate than `TwoShot`, which encodes twice, but the bytes grow with the number of ranks.

    Args:
        codec: Any codec.

    Raises:
        OptionError: `codec` is not a codec.

    Example::

        wire = thinwire.attach(ddp, thinwire.Gathered(thinwire.LargestEntries(ratio=0.01)))
    """

    codec: Codec

    exact_vectors: ClassVar[bool] = True
    exact_alone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_codec(self.codec)

    def outline(self, bucket: Bucket) -> Iterator[Collective]:
        """Yield the collective of a bucket without decoding anything, for planning with many ranks.

        Args:
            bucket: Gradients, of which only shape, dtype and device are used.

        Yields:
            The collective.
        """
        encoded = own_codecs(self.codec, bucket)[bucket.rank].encode(numbers_of(bucket.buffer))
        yield AllGather(Layout.of(encoded).rows(1)[0])

    def __call__(self, bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
        """Encode, all-gather, and sum the decoded gradients."""
        if is_alone(self, bucket):
            return unchanged(bucket)
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
