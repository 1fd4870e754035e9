"""A codec to one bit per number, its sign, with a magnitude per block."""

import sys
from dataclasses import dataclass

import torch

from thinwire.codecs.checks import check_block
from thinwire.codecs.codec import BlockCodec, Parts, Ragged, scratch_like
from thinwire.codecs.magnitudes import finite_scales, sums_of, sums_of_magnitudes
from thinwire.codecs.positions import joined
from thinwire.codecs.rounding import divide

_UPPERMOST = 3 if sys.byteorder == "little" else 0
"""The byte of a float32 that has its sign."""


@dataclass(frozen=True, kw_only=True)
class SignBits(BlockCodec):
    """The signs of numbers, decoded as plus or minus the mean magnitude of their block.

    Zeros have a sign too. Of all possible magnitudes, the mean has the smallest squared error. The codec
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
        eighths = torch.signbit(x).view(torch.uint8).view(rows, 8, width // 8)
        return divide(sums_of(torch.abs(x, out=scratch_like(x))), width), joined(eighths, 1, dim=1)

    def constants(self, device: torch.device) -> Parts:
        """Return the shifts that move the bits of a byte to its uppermost one."""
        return (torch.arange(7, -1, -1, dtype=torch.int8, device=device).view(8, 1),)

    def encode_rows(
        self, x: torch.Tensor, parts: Parts, constants: Parts, ragged: Ragged, *, decoded: bool
    ) -> torch.Tensor | None:
        """Write magnitudes and signs to rows."""
        magnitudes, packed = parts
        width = x.shape[-1]
        divide(sums_of_magnitudes(x), width, out=magnitudes)
        for message, block, count in ragged:
            self.correct_padded((magnitudes[message, block],), count, width)
        # The uppermost bit of a float32 is its sign. Each moves to its place in a byte, and a sum joins them.
        signs = x.view(torch.uint8)[..., _UPPERMOST::4].bitwise_and(0x80).unflatten(-1, (8, -1))
        torch.sum(signs >> constants[0].view(torch.uint8), -2, dtype=torch.uint8, out=packed)
        return torch.copysign(magnitudes, x) if decoded else None

    def decode_blocks(self, parts: Parts, out: torch.Tensor) -> None:
        """Write plus or minus the magnitude."""
        magnitude, packed = parts
        if out.device.type == "cpu":
            # Two thirds of the time of the few kernels below, which convert integers to float32 first.
            for bit, eighth in enumerate(out.chunk(8, dim=-1)):
                eighth.copy_((packed >> bit).bitwise_and_(1))
            out.mul_(-2).add_(1).mul_(magnitude)
            return
        self.decode_rows(parts, self.constants(out.device), out)

    def decode_rows(self, parts: Parts, constants: Parts, out: torch.Tensor) -> torch.Tensor:
        """Move each bit to where an integer has its sign, and copy that to the magnitude."""
        magnitude, packed = parts
        signs = packed.view(torch.int8).unsqueeze(-2) << constants[0]
        torch.copysign(magnitude.unsqueeze(-1), signs, out=out.unflatten(-1, (8, -1)))
        return out
