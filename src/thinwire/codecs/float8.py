"""Eight-bit floating point, with a scale for every block."""

from dataclasses import dataclass

import torch

from thinwire.codecs.codec import BlockCodec, Parts, check_block, room_like, scale_of
from thinwire.errors import OptionError

_FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True, kw_only=True)
class Float8(BlockCodec):
    """Casts to float8 after scaling each block to the format's range; travels as bytes.

    The error is relative to each number rather than to its block's largest: better than int8 where a block's
    numbers differ by orders of magnitude, worse where they do not. Blocks with an infinite or NaN number
    decode to NaN; blocks whose numbers all are below 1e-33 to zero.

    Args:
        variant: "e4m3" has 3 bits of mantissa (error up to 1/16 of a number), "e5m2" has 2 (1/8) and more
            range within a block.
        block: Numbers that share a scale.

    >>> codec = Float8(variant="e4m3")
    >>> codec.decode(codec.encode(torch.tensor([448.0, 33.0])), into=torch.empty(2))
    tensor([448.,  32.])
    """

    variant: str = "e4m3"
    block: int = 256

    def __post_init__(self) -> None:
        if not isinstance(self.variant, str) or self.variant not in _FORMATS:
            raise OptionError(f"variant={self.variant!r} must be {' or '.join(map(repr, _FORMATS))}")
        check_block(self.block)

    @property
    def wire_bits(self) -> float:
        """Eight, and a block's share of its scale."""
        return 8 + 32 / self.block

    def encode_blocks(self, x: torch.Tensor) -> Parts:
        """Scales and codes."""
        dtype = _FORMATS[self.variant]
        scale, inverse = scale_of(x, torch.finfo(dtype).max)
        return scale, torch.mul(x, inverse, out=room_like(x)).to(dtype).view(torch.uint8)

    def decode_blocks(self, parts: Parts, out: torch.Tensor) -> None:
        """Codes times scales."""
        scale, codes = parts
        if self.variant == "e4m3":
            out.copy_(_to_half(codes)).mul_(scale * 256)
        else:
            out.copy_(codes.view(_FORMATS[self.variant])).mul_(scale)


def _to_half(codes: torch.Tensor) -> torch.Tensor:
    """e4m3 numbers as float16, 256 times too small: their bits moved to where float16 has them.

    torch converts e4m3 number by number on a CPU, ten times as slow. (NaN is lost: the scale has it.)
    """
    bits = codes.view(torch.int8).to(torch.int16)
    return bits.bitwise_left_shift_(7).bitwise_and_(~0x407F).view(torch.float16)
