"""Programs of at most one all-reduce per bucket: exact, through a codec, or none at all."""

from dataclasses import dataclass

import torch

from thinwire.codecs.cast import Cast
from thinwire.codecs.codec import Codec, numbers_of, require_codec, reseeded
from thinwire.engine.ops import AllReduce, Collectives
from thinwire.errors import OptionError
from thinwire.programs.description import preset
from thinwire.programs.memory import Memory
from thinwire.programs.program import Bucket, Outcome, Program, is_alone, unchanged
from thinwire.programs.sparse_gradients import sparse_mean


@dataclass(frozen=True, repr=False)
class Exact(Program):
    """The mean of all ranks' gradients in their own dtype, as DDP computes it without a hook.

    Example::

        wire = thinwire.attach(ddp, thinwire.Exact())
    """

    stateless = True
    ignores_order = True
    exact_alone = True
    takes_sparse = True

    def __call__(self, bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
        """All-reduce the gradients, divided first so that the sum cannot overflow before the mean does."""
        if bucket.buffer.is_sparse:
            return (yield from sparse_mean(bucket))
        # A multiplication by 1/W, as in DDP without a hook: the same bits for any W. torch's allreduce_hook
        # divides, which differs in the last bit unless W is a power of two.
        own = bucket.buffer.mul_(1 / bucket.world_size)
        sent = own.to(bucket.exact_dtype or own.dtype)
        error = (own - sent).mul_(bucket.world_size) if bucket.track_error else None
        mean = yield AllReduce(sent)
        return Outcome(mean.to(own.dtype), error)


@dataclass(frozen=True, repr=False)
class Alone(Program):
    """A program that sends nothing, so that every rank keeps its own gradients."""

    stateless = True
    ignores_order = True
    exact_alone = True
    takes_sparse = True

    def __call__(self, bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
        """Return the bucket unchanged."""
        return Outcome(bucket.buffer)
        yield  # a program is a generator


@dataclass(frozen=True, repr=False)
class Reduced(Program):
    """The mean of encoded gradients, for codecs whose encodings can be summed.

        mean = decode(sum over ranks of encode(gradient / W))

    Gradients are divided before they are encoded. In fp16 70000 is infinite, but the mean of 70000 and 0 is
    35000. Each term is at most max|gradient| / W, so no partial sum overflows before the mean can, except by
    rounding.

    Sums of 16-bit encodings are rounded in the collective, where no rank can observe it. So `ErrorFeedback`
    does not accept them. `TwoShot` sends as many bytes, and loses nothing within `ErrorFeedback`.

    Args:
        codec: A codec with `additive` set, such as `Cast` or `RandomEntries`.

    Raises:
        OptionError: `codec` is not a codec, or its encodings cannot be summed.

    Example::

        wire = thinwire.attach(ddp, thinwire.Reduced(thinwire.Cast(torch.bfloat16)))
    """

    codec: Codec

    exact_vectors = True
    stateless = True
    exact_alone = True

    def __post_init__(self) -> None:
        require_codec(self.codec)
        if not self.codec.additive:
            raise OptionError(
                f"codec={self.codec!r} makes encodings that cannot be summed: use TwoShot(codec), or"
                " Gathered(codec) for sparse ones"
            )

    @property
    def leaves_out(self) -> bool:
        """A cast takes numbers from any places. Other codecs encode a bucket as a whole."""
        return isinstance(self.codec, Cast)

    @property
    def tracks_error(self) -> bool:
        """False if the collective rounds sums to 16 bits, which no rank can report."""
        encoded = self.codec.encode(torch.zeros(1, dtype=torch.float32, device="cpu"))
        return all(
            part.dtype.itemsize >= torch.float32.itemsize for part in encoded if part.is_floating_point()
        )

    def __call__(self, bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
        """Encode, all-reduce, and decode to the bucket's own buffer."""
        if is_alone(self, bucket):
            return unchanged(bucket)
        if isinstance(self.codec, Cast) and not bucket.track_error:
            return (yield from _cast_mean(self.codec.dtype, bucket))
        codec = reseeded(self.codec, bucket.step, bucket.names[0])
        buffer, error = bucket.buffer.mul_(1 / bucket.world_size), None
        encoded = codec.encode(buffer)
        if bucket.track_error:
            # error <- gradient - decode(encode(gradient)). The buffer holds gradient / W.
            error = buffer.clone()
            codec.add(encoded, numbers_of(error), -1)
            error.mul_(bucket.world_size)
        for part in encoded:
            yield AllReduce(part)
        return Outcome(codec.decode(encoded, into=buffer), error)


def _cast_mean(dtype: torch.dtype, bucket: Bucket) -> Collectives[Outcome]:
    """Average in another dtype, in one pass over the gradients before the collective and one after it."""
    segments = bucket.segments()
    sent = bucket.buffer.new_empty(sum(segment.numel() for segment in segments), dtype=dtype)
    parts = sent.split([segment.numel() for segment in segments])
    for part, segment in zip(parts, segments, strict=True):
        # Multiplied in the gradients' dtype, then rounded: in float16 a sum may overflow and the mean not.
        torch.mul(segment, 1 / bucket.world_size, out=part)
    yield AllReduce(sent)
    for part, segment in zip(parts, segments, strict=True):
        segment.copy_(part)
    return Outcome(bucket.buffer)


@preset
def FP16() -> Program:  # noqa: N802 - reads as the program it makes
    """Send gradients as float16: half of fp32's bytes, 11 significant bits, overflow above 65504.

    Returns:
        `Reduced(Cast(torch.float16))`.

    Example::

        wire = thinwire.attach(ddp, thinwire.FP16())
    """
    return Reduced(Cast(torch.float16))


@preset
def BF16() -> Program:  # noqa: N802 - reads as the program it makes
    """Send gradients as bfloat16: half of fp32's bytes, 8 significant bits, fp32's range.

    Try this first. It does not overflow where fp32 does not, and has no options to tune.

    Returns:
        `Reduced(Cast(torch.bfloat16))`.

    Example::

        wire = thinwire.attach(ddp, thinwire.BF16())
    """
    return Reduced(Cast(torch.bfloat16))
