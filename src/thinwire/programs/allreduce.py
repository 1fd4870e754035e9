"""One all-reduce a bucket: the exact mean, or the mean of what a codec makes of it."""

from dataclasses import dataclass

import torch

from thinwire.codecs.cast import Cast
from thinwire.programs.program import Bucket, Memory, Outcome, Program
from thinwire.wire.ops import AllReduce, Steps


@dataclass(frozen=True)
class Exact:
    """The mean of all ranks' gradients in their own precision, as DDP without a hook computes it.

    Example::

        wire = thinwire.attach(ddp, thinwire.Exact())
    """

    def __call__(self, bucket: Bucket, memory: Memory) -> Steps[Outcome]:
        """Divide first: the sum cannot overflow sooner than the mean."""
        mean = yield AllReduce(bucket.buffer.mul_(1 / bucket.world_size))
        return Outcome(mean)


@dataclass(frozen=True)
class Reduced:
    """The mean of encoded gradients, for codecs whose encodings add up.

    mean = decode(sum over ranks of encode(gradient / W))

    Dividing before encoding matters: in fp16 70000 alone is infinite, but 70000 and 0 average to 35000.
    Each term is at most max|gradient| / W, so but for rounding no partial sum overflows before the mean can.
    """

    codec: Cast

    def __call__(self, bucket: Bucket, memory: Memory) -> Steps[Outcome]:
        """Encode, all-reduce, decode into the bucket's own buffer."""
        (encoded,) = self.codec.encode(bucket.buffer.mul_(1 / bucket.world_size))
        total = yield AllReduce(encoded)
        return Outcome(self.codec.decode((total,), into=bucket.buffer))


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
