"""The two-shot all-reduce on encoded numbers: a reduce-scatter, then an all-gather.

Every rank averages one chunk for all ranks, so the bytes of a rank do not grow with their number. (A one-shot
all-reduce, as `Gathered` is, sends everything to every rank.)
"""

from collections.abc import Iterator
from dataclasses import dataclass

from thinwire.codecs.codec import BlockCodec, Codec, require_codec
from thinwire.codecs.topk import LargestEntries
from thinwire.engine.ops import AllGather, AllToAll, Collective, Collectives
from thinwire.programs import triton_coder
from thinwire.programs.bucket_coder import BucketCoder, OwnersCoder, row_layouts
from thinwire.programs.coding import coders_of
from thinwire.programs.division import Division
from thinwire.programs.entries_coder import EntriesCoder
from thinwire.programs.matrix_coder import MatrixCoder
from thinwire.programs.memory import Memory
from thinwire.programs.program import Bucket, Outcome, Program, is_alone, unchanged
from thinwire.programs.triton_coder import TritonCoder


@dataclass(frozen=True, repr=False)
class TwoShot(Program):
    """The mean through any codec, in two collectives. A rank sends 2 (W-1)/W of one encoded copy.

        rank r receives chunk r of every rank, encoded         all-to-all
        it computes their mean in float32 and encodes it
        every rank receives the means of all chunks            all-gather

    A chunk is made of slices of parameters. Each parameter has its own blocks of numbers that share a scale,
    so the encoding of one parameter does not depend on its neighbours. Parameters that must be exact are sent
    uncompressed in the same two collectives.

    A rank's own chunk is not encoded before the mean. All ranks decode the same bytes, so replicas stay
    identical with any codec. A sum over ranks beyond float32's range is an overflow.

    The outcome's error covers both encodings. For the chunks of other ranks it is the error of this rank's
    encodings. For its own chunk it is W times the error of the encoded mean, because error feedback on one
    rank has a weight of 1/W in the next mean.

    Args:
        codec: Any codec.

    Raises:
        OptionError: `codec` is not a codec.

    Example::

        wire = thinwire.attach(ddp, thinwire.TwoShot(thinwire.Quantize(bits=8)))
    """

    codec: Codec

    exact_vectors = True
    stateless = True
    carries_exact = True
    folds_residuals = True
    exact_alone = True
    preferred_bytes = 1 << 20

    def __post_init__(self) -> None:
        require_codec(self.codec)

    def __call__(self, bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
        """Encode, all-to-all, average, encode, all-gather, and decode."""
        if is_alone(self, bucket):
            return unchanged(bucket)
        coder = bucket_coder_of(self.codec, bucket)
        # Phase 1, reduce-scatter: this rank receives its own chunk of every other rank, encoded.
        received = yield AllToAll(coder.encode(), in_order=False)
        row = coder.encode_mean(received)
        del received  # a whole bucket of codes, while the means are on their way
        # Phase 2, all-gather: every rank receives the means of all chunks, and decodes the same bytes. A
        # chunk's owner decodes them too: if it kept its more precise mean, replicas would diverge.
        encoded = yield AllGather(row, in_order=False)
        return coder.decode(encoded)

    def outline(self, bucket: Bucket) -> Iterator[Collective]:
        """Yield the collectives of a bucket without encoding anything, for planning with many ranks."""
        coder = coders_of(self.codec, bucket)[0]
        row = row_layouts(bucket, Division.of(bucket, coder.block), coder)[0].rows(1)[0]
        yield AllToAll(row.new_empty(bucket.world_size, len(row)))
        yield AllGather(row)


def bucket_coder_of(codec: Codec, bucket: Bucket) -> BucketCoder:
    """Return the coder of a bucket: by owner on a CPU, and one that launches few kernels elsewhere."""
    coders = coders_of(codec, bucket)
    division = Division.of(bucket, coders[0].block)
    # Random numbers differ by rank, and a matrix would have to be decoded with the seeds of all of them.
    if bucket.buffer.device.type == "cpu" or not isinstance(codec, BlockCodec) or codec.draws:
        return OwnersCoder(bucket, coders, division)
    width = coders[0].block
    if triton_coder.runs(codec, width, bucket):
        return TritonCoder(bucket, codec, width, division)
    # Float64 gradients are encoded in float32, and their error has the rounding too.
    if isinstance(codec, LargestEntries) and bucket.buffer.dtype.to_real().itemsize <= 4:
        return EntriesCoder(bucket, codec, width, division)
    return MatrixCoder(bucket, codec, width, division)
