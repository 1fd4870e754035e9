"""Programs for codecs with small encodings: each rank's encoding reaches all ranks once, or by two-shot."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from thinwire.codecs.codec import Codec, numbers_of, require_codec
from thinwire.codecs.topk import LargestEntries
from thinwire.engine.ops import AllGather, Collective, Collectives
from thinwire.engine.pack import Layout
from thinwire.programs.coding import own_codecs
from thinwire.programs.entries_coder import EntriesGatherCoder
from thinwire.programs.gather_coder import GatherCoder, JoinedGatherCoder
from thinwire.programs.memory import Memory
from thinwire.programs.program import Bucket, Outcome, Program, is_alone, unchanged
from thinwire.programs.triton_coder import TritonGatherCoder, gathers
from thinwire.programs.twoshot import TwoShot


@dataclass(frozen=True, repr=False)
class Gathered(Program):
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

    exact_vectors = True
    stateless = True
    folds_residuals = True
    exact_alone = True

    def __post_init__(self) -> None:
        require_codec(self.codec)

    def outline(self, bucket: Bucket) -> Iterator[Collective]:
        """Yield the collective of a bucket without decoding anything, for planning with many ranks."""
        encoded = own_codecs(self.codec, bucket)[bucket.rank].encode(numbers_of(bucket.buffer))
        yield AllGather(Layout.of(encoded).rows(1)[0])

    def __call__(self, bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
        """Encode, all-gather, and sum the decoded gradients."""
        if is_alone(self, bucket):
            return unchanged(bucket)
        coder = gather_coder_of(self.codec, bucket)
        received = yield AllGather(coder.encode())
        return coder.decode(received)


@dataclass(frozen=True, repr=False)
class SparseMean(Gathered):
    """The mean by `Gathered` on two ranks and by `TwoShot` on more, so that bytes do not grow with the ranks.

    A rank sends W-1 encodings with `Gathered`, and 2 (W-1)/W with `TwoShot`. That is as many on two ranks,
    half as many on four, and a quarter on eight. `Gathered` encodes once, so it is more accurate where it
    sends no more bytes.

    Args:
        codec: Any codec, best a sparse one.

    Raises:
        OptionError: `codec` is not a codec.

    Example::

        sparse = thinwire.SparseMean(thinwire.LargestEntries(ratio=1 / 64, block=4096, values="int2"))
        wire = thinwire.attach(ddp, thinwire.ErrorFeedback(sparse))
    """

    stateless = True
    folds_residuals = True
    exact_alone = True

    def __call__(self, bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
        """Run the exchange that suits the number of ranks."""
        if bucket.world_size <= 2:
            return (yield from super().__call__(bucket, memory))
        return (yield from TwoShot(self.codec)(bucket, memory))

    def outline(self, bucket: Bucket) -> Iterator[Collective]:
        """Yield the collectives for a bucket without encoding it."""
        return super().outline(bucket) if bucket.world_size <= 2 else TwoShot(self.codec).outline(bucket)


def gather_coder_of(codec: Codec, bucket: Bucket) -> GatherCoder:
    """Return the coder of a bucket. On accelerators it launches few kernels."""
    if isinstance(codec, LargestEntries) and bucket.buffer.device.type != "cpu":
        if gathers(codec, bucket):
            return TritonGatherCoder(codec, bucket)
        if bucket.buffer.dtype.to_real() == torch.float32:
            return EntriesGatherCoder(codec, bucket)
    return JoinedGatherCoder(codec, bucket)
