"""A codec to one bit per number, its sign, with a magnitude per block."""

from dataclasses import dataclass

import torch

from thinwire.codecs.checks import check_block
from thinwire.codecs.codec import BlockCodec, Parts, scratch_like
from thinwire.codecs.magnitudes import sums_of
from thinwire.codecs.rounding import divide


@dataclass(frozen=True, kw_only=True)
class SignBits(BlockCodec):
    """The signs of numbers, decoded as plus or minus the mean magnitude of their block.

    The sign of zero is plus. Of all possible magnitudes, the mean has the smallest squared error. The codec
    needs error feedback. A block with a non-finite number decodes to non-finite numbers.

    Args:
        block: Numbers that share a magnitude, a multiple of 8. A magnitude costs 4 bytes.

    Raises:
        OptionError: `block` is not a multiple of 8 from 8 to 2**20.

    >>> codec = SignBits(block=8)
    >>> codec.decode(codec.encode(torch.tensor([1.0, -3.0, 2.0, 2.0])), into=torch.empty(4))
    tensor([ 2., -2.,  2.,  2.])
    """

    block: int = 256

    def __post_init__(self) -> None:
        check_block(self.block, of=8)

    @property
    def wire_bits(self) -> float:
        """One bit, and a share of the block's magnitude."""
        return 1 + 32 / self.block

    @property
    def kernel(self) -> str:
        """Native code for every block size."""
        return "sign"

    def correct_padded(self, parts: Parts, count: int, width: int) -> None:
        """Undo the effect of padding on the magnitude of a short block."""
        parts[0].mul_(width / count)

    def finite(self, parts: Parts) -> torch.Tensor:
        """Return whether all magnitudes are finite."""
        return parts[0].isfinite().all()

    def encode_blocks(self, x: torch.Tensor) -> Parts:
        """Return magnitudes and packed signs: bit i of the bytes holds the i-th eighth of a block."""
        signs = (x >= 0).view(torch.uint8)
        packed = signs.new_zeros(x.shape[0], x.shape[1] // 8)
        for bit, eighth in enumerate(signs.chunk(8, dim=1)):
            packed.add_(eighth, alpha=1 << bit)  # of integers, which are not rounded
        return divide(sums_of(torch.abs(x, out=scratch_like(x))), x.shape[1]), packed

    def decode_blocks(self, parts: Parts, out: torch.Tensor) -> None:
        """Write plus or minus the magnitude."""
        magnitude, packed = parts
        for bit, eighth in enumerate(out.chunk(8, dim=1)):
            eighth.copy_((packed >> bit).bitwise_and_(1))
        out.mul_(2).sub_(1).mul_(magnitude)
