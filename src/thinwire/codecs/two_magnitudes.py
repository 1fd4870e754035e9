"""A codec to two bits per number: its sign, and one of the two magnitudes of its block."""

from dataclasses import dataclass

import torch

from thinwire.codecs.checks import check_block
from thinwire.codecs.codec import BlockCodec, Parts, Ragged
from thinwire.codecs.magnitudes import finite_scales, two_means
from thinwire.codecs.positions import joined

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
    non-finite number decodes to non-finite numbers.

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

    @property
    def strided(self) -> bool:
        """All operations are along the last dimension."""
        return True

    def finite(self, parts: Parts) -> torch.Tensor:
        """Return whether all magnitudes are finite."""
        return finite_scales(parts[0])

    def encode_blocks(self, x: torch.Tensor) -> Parts:
        """Return magnitudes and packed codes: bits 2i and 2i + 1 of the bytes hold the i-th quarter."""
        rows, quarter = x.shape[0], x.shape[1] // 4
        # For each quarter a plane of signs and one of sizes, of which every byte takes a bit.
        planes = x.new_empty((rows, 4, 2, quarter), dtype=torch.bool)
        means = two_means(x, _THRESHOLD, planes[:, :, 1])
        torch.signbit(x.view(rows, 4, quarter), out=planes[:, :, 0])
        # Two magnitudes are the halves of a float32, which is finite if the upper half, the large one, is. So
        # layouts and kernels treat them as the float32 scale that other block codecs have.
        scale = means.bfloat16().view(torch.float32)
        return scale, joined(planes.view(torch.uint8).view(rows, 8, quarter), 1, dim=1)

    def decode_blocks(self, parts: Parts, out: torch.Tensor) -> None:
        """Write plus or minus one of the magnitudes."""
        if out.device.type != "cpu":
            self.decode_rows(parts, self.constants(out.device), out)
            return
        low, high = parts[0].view(torch.bfloat16).float().unsqueeze(2).split(1, dim=1)
        quarters = out.view(out.shape[0], 4, parts[1].shape[1])
        # The upper bit of each code is moved to where an integer has its sign, and then the lower bit.
        places = torch.arange(6, -1, -2, dtype=torch.int8, device=out.device).view(4, 1)
        codes = parts[1].view(torch.int8).unsqueeze(1) << places
        torch.where(codes < 0, high, low, out=quarters)
        quarters.copysign_(codes.bitwise_left_shift_(1))

    def constants(self, device: torch.device) -> Parts:
        """Return the shifts that move the bits of a byte to its uppermost one, and back."""
        places = torch.arange(8, dtype=torch.int8, device=device).view(8, 1)
        return 7 - places, places

    def encode_rows(
        self, x: torch.Tensor, parts: Parts, constants: Parts, ragged: Ragged, *, decoded: bool
    ) -> torch.Tensor | None:
        """Write magnitudes and codes to rows, and take the decoded numbers from the codes' planes."""
        messages, blocks, width = x.shape
        planes = x.new_empty((messages * blocks, 4, 2, width // 4), dtype=torch.bool)
        means = two_means(x.flatten(0, 1), _THRESHOLD, planes[:, :, 1])
        planes = planes.unflatten(0, (messages, blocks))
        quarters = x.unflatten(-1, (4, -1))
        torch.signbit(quarters, out=planes[..., 0, :])
        sent = parts[0].view(torch.bfloat16).copy_(means.view(messages, blocks, 2))
        bits = planes.view(torch.uint8).flatten(-3, -2)
        torch.sum(bits << constants[1].view(torch.uint8), -2, dtype=torch.uint8, out=parts[1])
        if not decoded:
            return None
        low, high = sent.unsqueeze(-1).split(1, dim=-2)
        # In bf16 up to here. The signs are float32, and so is the result.
        return torch.copysign(torch.where(planes[..., 1, :], high, low), quarters).flatten(-2)

    def decode_rows(self, parts: Parts, constants: Parts, out: torch.Tensor) -> torch.Tensor:
        """Move each bit to where an integer has its sign, for the choice of magnitudes and for copysign."""
        low, high = parts[0].view(torch.bfloat16).unsqueeze(-1).split(1, dim=-2)
        bits = (parts[1].view(torch.int8).unsqueeze(-2) << constants[0]).unflatten(-2, (4, 2))
        magnitudes = torch.where(bits[..., 1, :] < 0, high, low)
        torch.copysign(magnitudes, bits[..., 0, :], out=out.unflatten(-1, (4, -1)))
        return out
