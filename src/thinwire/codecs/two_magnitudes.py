"""A codec to two bits per number: its sign, and one of the two magnitudes of its block."""

from dataclasses import dataclass

import torch

from thinwire.codecs.checks import check_block
from thinwire.codecs.codec import BlockCodec, Parts, scratch_like
from thinwire.codecs.magnitudes import two_means

_THRESHOLD = 1.21
"""The factor of a block's mean square above which the square of a number counts as large.

The root is 1.1. For normal numbers that are sent once, 0.98 is best. With error feedback, a somewhat higher
threshold leaves smaller residuals (docs/design/decisions.md).
"""


@dataclass(frozen=True, kw_only=True)
class TwoMagnitudes(BlockCodec):
    """The signs of numbers, and two magnitudes per block: the means of its large and of its small numbers.

    A number is large if it exceeds 1.1 times the root mean square of its block. Both means are sent as bf16.
    If most numbers are zero, the others are the large ones. It needs error feedback. A block with a
    non-finite number decodes to NaN.

    Args:
        block: Numbers that share two magnitudes, a multiple of 4. The magnitudes cost 4 bytes.

    Raises:
        OptionError: `block` is not a multiple of 4 from 4 to 2**20.

    >>> codec = TwoMagnitudes(block=8)
    >>> x = torch.tensor([1.0, -3.0, 20.0, 2.0, -2.0, 1.0, 3.0, -16.0])
    >>> codec.decode(codec.encode(x), into=torch.empty(8))
    tensor([  2.,  -2.,  18.,   2.,  -2.,   2.,   2., -18.])
    """

    block: int = 128

    def __post_init__(self) -> None:
        check_block(self.block, of=4)

    @property
    def wire_bits(self) -> float:
        """Two bits, and a share of the block's magnitudes."""
        return 2 + 32 / self.block

    @property
    def kernel(self) -> str:
        """Native code for every block size."""
        return "int2"

    def finite(self, parts: Parts) -> torch.Tensor:
        """Return whether all magnitudes are finite."""
        return parts[0].isfinite().all()

    def encode_blocks(self, x: torch.Tensor) -> Parts:
        """Return magnitudes and packed codes: bits 2i and 2i + 1 of the bytes hold the i-th quarter."""
        magnitudes = torch.abs(x, out=scratch_like(x))
        low, high, large = two_means(magnitudes, _THRESHOLD)
        codes = large.view(torch.uint8).mul(2).add_((x < 0).view(torch.uint8))
        packed = codes.new_zeros(x.shape[0], x.shape[1] // 4)
        for number, quarter in enumerate(codes.chunk(4, dim=1)):
            packed.add_(quarter, alpha=1 << 2 * number)  # of integers, which are not rounded
        return _joined(low, high), packed

    def decode_blocks(self, parts: Parts, out: torch.Tensor) -> None:
        """Write plus or minus one of the magnitudes."""
        bits = parts[0].view(torch.int32)
        low, high = (bits << 16).view(torch.float32), (bits & ~0xFFFF).view(torch.float32)
        for number, quarter in enumerate(out.chunk(4, dim=1)):
            codes = parts[1] >> 2 * number
            magnitudes = torch.where(codes.bitwise_and(2).bool(), high, low)
            quarter.copy_(torch.where(codes.bitwise_and(1).bool(), -magnitudes, magnitudes))


def _joined(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Return two magnitudes as the halves of a float32, which is finite if `high`, its upper half, is.

    So layouts and kernels treat them as the float32 scale that other block codecs have.
    """
    lower, upper = (mean.bfloat16().view(torch.int16).int() for mean in (low, high))
    return ((upper << 16) | (lower & 0xFFFF)).view(torch.float32)
