"""A codec to 8-bit floating point, with a scale per block."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from thinwire.codecs.checks import check_block
from thinwire.codecs.codec import BlockCodec, Parts, Ragged, scratch_like
from thinwire.codecs.magnitudes import finite_scales, scale_of
from thinwire.errors import OptionError

Variant: TypeAlias = Literal["e4m3", "e5m2"]
_FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True, kw_only=True)
class Float8(BlockCodec):
    """A cast to float8, with each block scaled to the format's range. Codes are sent as bytes.

    The error is relative to each number, not to the largest of its block. This is better than int8 where the
    numbers of a block differ by orders of magnitude, and worse where they do not. A block with a non-finite
    number decodes to NaN. Numbers are encoded down to float32's smallest normal number, 1e-38.

    Args:
        variant: "e4m3" has 3 bits of mantissa (error up to 1/16 of a number). "e5m2" has 2 (error up to 1/8)
            and more range within a block.
        block: Numbers that share a scale.

    Raises:
        OptionError: `variant` is unknown, or `block` is not a whole number from 1 to 2**20.

    >>> codec = Float8(variant="e4m3")
    >>> codec.decode(codec.encode(torch.tensor([448.0, 33.0])), into=torch.empty(2))
    tensor([448.,  32.])
    """

    variant: Variant = "e4m3"
    block: int = 256

    def __post_init__(self) -> None:
        if not isinstance(self.variant, str) or self.variant not in _FORMATS:
            raise OptionError(f"variant={self.variant!r} must be {' or '.join(map(repr, _FORMATS))}")
        check_block(self.block)

    @property
    def wire_bits(self) -> float:
        """Eight bits, and a share of the block's scale."""
        return 8 + 32 / self.block

    @property
    def kernel(self) -> str:
        """Native code for both formats."""
        return self.variant

    @property
    def strided(self) -> bool:
        """All operations are along the last dimension."""
        return True

    def finite(self, parts: Parts) -> torch.Tensor:
        """Return whether the largest magnitude of every block is finite."""
        return finite_scales(parts[0], torch.finfo(_FORMATS[self.variant]).max)

    def encode_blocks(self, x: torch.Tensor) -> Parts:
        """Return scales and codes."""
        dtype = _FORMATS[self.variant]
        scale, inverse = scale_of(x, torch.finfo(dtype).max)
        return scale, torch.mul(x, inverse, out=scratch_like(x)).to(dtype).view(torch.uint8)

    def encode_rows(
        self, x: torch.Tensor, parts: Parts, constants: Parts, ragged: Ragged, *, decoded: bool
    ) -> torch.Tensor | None:
        """Write scales and codes to rows. One kernel multiplies the numbers and converts them to float8."""
        dtype = _FORMATS[self.variant]
        _, inverse = scale_of(x, torch.finfo(dtype).max, out=parts[0])
        torch.mul(x, inverse, out=parts[1].view(dtype))
        return self.decode_rows(parts, constants, torch.empty_like(x)) if decoded else None

    def decode_blocks(self, parts: Parts, out: torch.Tensor) -> None:
        """Multiply codes by their block's scale."""
        scale, codes = parts
        if self.variant == "e4m3" and out.device.type == "cpu":
            out.copy_(_to_half(codes)).mul_(scale * 256)
        else:
            out.copy_(codes.view(_FORMATS[self.variant])).mul_(scale)


def _to_half(codes: torch.Tensor) -> torch.Tensor:
    """Return e4m3 numbers as float16, 256 times too small, by shifting their bits to float16's places.

    This is ten times as fast as torch's conversion on a CPU. NaN is lost, but the block's scale is NaN then.
    """
    bits = codes.view(torch.int8).to(torch.int16)
    return bits.bitwise_left_shift_(7).bitwise_and_(~0x407F).view(torch.float16)
