"""A codec to one bit per number, its sign, with a magnitude per block."""

from dataclasses import dataclass

import torch

from thinwire.codecs.checks import check_block
from thinwire.codecs.codec import BlockCodec, Parts, scratch_like
from thinwire.codecs.magnitudes import finite_scales, sums_of
from thinwire.codecs.positions import joined
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

    @property
    def strided(self) -> bool:
        """All operations are along the last dimension."""
        return True

    def correct_padded(self, parts: Parts, count: int, width: int) -> None:
        """Undo the effect of padding on the magnitude of a short block."""
        parts[0].mul_(width / count)

    def finite(self, parts: Parts) -> torch.Tensor:
        """Return whether all magnitudes are finite."""
        return finite_scales(parts[0])

    def encode_blocks(self, x: torch.Tensor) -> Parts:
        """Return magnitudes and packed signs: bit i of the bytes holds the i-th eighth of a block."""
        rows, width = x.shape
        eighths = (x >= 0).view(torch.uint8).view(rows, 8, width // 8)
        return divide(sums_of(torch.abs(x, out=scratch_like(x))), width), joined(eighths, 1, dim=1)

    def decode_blocks(self, parts: Parts, out: torch.Tensor) -> None:
        """Write plus or minus the magnitude."""
        magnitude, packed = parts
        if out.device.type == "cpu":
            # Two thirds of the time of the few kernels below, which convert integers to float32 first.
            for bit, eighth in enumerate(out.chunk(8, dim=-1)):
                eighth.copy_((packed >> bit).bitwise_and_(1))
            out.mul_(2).sub_(1).mul_(magnitude)
            return
        eighths = out.view(*out.shape[:-1], 8, packed.shape[-1])
        # Each bit, inverted, is moved to where an integer has its sign.
        places = torch.arange(7, -1, -1, dtype=torch.int8, device=out.device).view(8, 1)
        signs = packed.view(torch.int8).bitwise_not().unsqueeze(-2) << places
        torch.copysign(magnitude.unsqueeze(-1), signs, out=eighths)
