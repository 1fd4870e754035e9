"""A program for sparse encodings that chooses the exchange by the number of ranks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from thinwire.engine.ops import Collective, Collectives
from thinwire.programs.gathered import Gathered
from thinwire.programs.memory import Memory
from thinwire.programs.program import Bucket, Outcome
from thinwire.programs.twoshot import TwoShot


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

    exact_alone: ClassVar[bool] = True

    def __call__(self, bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
        """Run the exchange that suits the number of ranks."""
        if bucket.world_size <= 2:
            return (yield from super().__call__(bucket, memory))
        return (yield from TwoShot(self.codec)(bucket, memory))

    def outline(self, bucket: Bucket) -> Iterator[Collective]:
        """Yield the collectives for a bucket without encoding it."""
        return super().outline(bucket) if bucket.world_size <= 2 else TwoShot(self.codec).outline(bucket)
