"""One all-reduce a bucket: the exact mean, or the mean of what a codec makes of it."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from thinwire.codecs.cast import Cast
from thinwire.codecs.codec import Codec, numbers_of, require_codec, reseeded
from thinwire.errors import OptionError
from thinwire.programs.memory import Memory
from thinwire.programs.program import Bucket, Outcome, Program
from thinwire.wire.ops import AllReduce, Steps


@dataclass(frozen=True)
class Exact:
    """The mean of all ranks' gradients in their own precision, as DDP without a hook computes it.

    Example::

        wire = thinwire.attach(ddp, thinwire.Exact())
    """

    def __call__(self, bucket: Bucket, memory: Memory) -> Steps[Outcome]:
        """Divide first: the sum cannot overflow sooner than the mean."""
        error = torch.zeros_like(bucket.buffer) if bucket.track_error else None
        mean = yield AllReduce(bucket.buffer.mul_(1 / bucket.world_size))
        return Outcome(mean, error)


@dataclass(frozen=True)
class Reduced:
    """The mean of encoded gradients, for codecs whose encodings add up.

    mean = decode(sum over ranks of encode(gradient / W))

    Dividing before encoding matters: in fp16 70000 alone is infinite, but 70000 and 0 average to 35000.
    Each term is at most max|gradient| / W, so but for rounding no partial sum overflows before the mean can.
    """

    codec: Codec

    spares_vectors: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_codec(self.codec)
        if not self.codec.additive:
            raise OptionError(
                f"codec={self.codec!r} makes encodings that cannot be summed: use TwoShot(codec), or"
                " Gathered(codec) for sparse ones"
            )

    def __call__(self, bucket: Bucket, memory: Memory) -> Steps[Outcome]:
        """Encode, all-reduce, decode into the bucket's own buffer."""
        codec = reseeded(self.codec, bucket.step, bucket.names[0])
        buffer, error = bucket.buffer.mul_(1 / bucket.world_size), None
        encoded = codec.encode(buffer)
        if bucket.track_error:
            error = buffer.clone()
            codec.add(encoded, numbers_of(error), -1)
            error.mul_(bucket.world_size)
        for part in encoded:
            yield AllReduce(part)
        return Outcome(codec.decode(encoded, into=buffer), error)


def FP16() -> Program:  # noqa: N802 - reads as the program it makes
    """Gradients travel as float16: half of fp32's bytes, 11 significant bits, overflow above 65504.

    Example::

        wire = thinwire.attach(ddp, thinwire.FP16())
    """
    return Reduced(Cast(torch.float16))


def BF16() -> Program:  # noqa: N802 - reads as the program it makes
    """Gradients travel as bfloat16: half of fp32's bytes, 8 significant bits, fp32's range.

    The first thing to try: it cannot overflow where fp32 does not, and needs no tuning.

    Example::

        wire = thinwire.attach(ddp, thinwire.BF16())
    """
    return Reduced(Cast(torch.bfloat16))
