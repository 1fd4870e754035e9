"""A codec to integers of 8 or 4 bits, with a scale per block."""

from dataclasses import dataclass

import torch

from thinwire.codecs.checks import check_block, check_seed, is_whole
from thinwire.codecs.codec import BlockCodec, Parts, Ragged, scratch_like
from thinwire.codecs.draws import random_floats
from thinwire.codecs.magnitudes import TINY, finite_scales, scale_of, write_scaled
from thinwire.codecs.rounding import divide
from thinwire.errors import OptionError


@dataclass(frozen=True, kw_only=True)
class Quantize(BlockCodec):
    """Rounding to integers of `bits` bits, in units of the block's scale.

        symmetric   x = scale * code            scale = max|x| / 127         (7 with 4 bits)
        affine      x = low + scale * code      scale = (max x - low) / 255  (15)

    The error of a number is at most half its block's scale, or a whole scale with stochastic rounding. A
    block with a non-finite number decodes to NaN. A scale is at least float32's smallest normal number,
    1e-38.

    Args:
        bits: 8, or 4 (two codes per byte).
        block: Numbers that share a scale. Smaller blocks are more accurate. A block's scale costs 4 bytes,
            or 8 with the offset if affine.
        affine: Use the codes for the block's own range instead of a range that is symmetric about zero. It is
            better for numbers of one sign, and no better for gradients.
        stochastic: Round up or down at random, so that the mean of many roundings is exact.
        seed: Seed of the random numbers. Programs derive a new one for every step, bucket and rank.

    Raises:
        OptionError: An option has the wrong type or is out of range.

    >>> codec = Quantize(bits=8)
    >>> codec.decode(codec.encode(torch.tensor([127.0, -3.2])), into=torch.empty(2))
    tensor([127.,  -3.])
    """

    bits: int = 8
    block: int = 256
    affine: bool = False
    stochastic: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not is_whole(self.bits) or self.bits not in (4, 8):
            raise OptionError(f"bits={self.bits!r} must be 8 or 4: codes fill bytes, or halves of bytes")
        check_block(self.block, of=8 // self.bits)
        check_seed(self.seed)
        for name, value in (("affine", self.affine), ("stochastic", self.stochastic)):
            if not isinstance(value, bool):
                raise OptionError(f"{name}={value!r} must be True or False")

    @property
    def wire_bits(self) -> float:
        """Bits of a code, and a share of the block's scale (and offset)."""
        return self.bits + (64 if self.affine else 32) / self.block

    @property
    def draws(self) -> bool:
        """Only stochastic rounding does."""
        return self.stochastic

    @property
    def kernel(self) -> str | None:
        """Native code for symmetric codes with rounding to nearest."""
        return None if self.affine or self.stochastic else f"int{self.bits}"

    @property
    def strided(self) -> bool:
        """All operations are along the last dimension."""
        return True

    @property
    def part_dtypes(self) -> tuple[torch.dtype, ...] | None:
        """Dtypes of scales and codes: `encode_blocks` leaves 8-bit codes as rounded float32."""
        scales = (torch.float32, torch.float32) if self.affine else (torch.float32,)
        return (*scales, torch.uint8 if self.affine else torch.int8)

    def encode_blocks(self, x: torch.Tensor) -> Parts:
        """Return scales, offsets if affine, and codes."""
        if self.affine:
            low = x.amin(1, keepdim=True)
            levels = 2**self.bits - 1
            scale = divide(x.amax(1, keepdim=True) - low, levels)
            inverse = torch.where(scale * levels > TINY, scale.reciprocal(), 0.0)
            codes = self._rounded(torch.sub(x, low, out=scratch_like(x)).mul_(inverse)).clamp_(0, levels)
            return scale, low, self._packed(codes, torch.uint8)
        scale, inverse = scale_of(x, 2 ** (self.bits - 1) - 1)
        return scale, self._packed(self._rounded(torch.mul(x, inverse, out=scratch_like(x))), torch.int8)

    def decode_blocks(self, parts: Parts, out: torch.Tensor) -> None:
        """Multiply codes by their block's scale, and add the offset if affine."""
        self._write(parts[-1] if self.bits == 8 else _halves(parts[-1]), parts, out)

    def constants(self, device: torch.device) -> Parts:
        """Return the shifts that move the codes of both halves of a block to the upper bits of a byte."""
        return (
            () if self.bits == 8 else (torch.arange(4, -1, -4, dtype=torch.int8, device=device).view(2, 1),)
        )

    def encode_rows(
        self, x: torch.Tensor, parts: Parts, constants: Parts, ragged: Ragged, *, decoded: bool
    ) -> torch.Tensor | None:
        """Write scales and codes to rows, and multiply the codes before they are packed."""
        if self.affine or self.stochastic:
            return super().encode_rows(x, parts, constants, ragged, decoded=decoded)
        scale, inverse = scale_of(x, 2 ** (self.bits - 1) - 1, out=parts[0])
        numbers = torch.mul(x, inverse).round_()
        codes = parts[1]
        if self.bits == 8:
            codes.copy_(numbers)
        else:
            codes = numbers.to(torch.int8)
            low, high = codes.chunk(2, dim=-1)
            torch.add(low.bitwise_and(15), high, alpha=16, out=parts[1])  # of integers, which are not rounded
        # Not the rounded numbers times the scale: they have zeros with a sign, which codes have not.
        return torch.mul(codes, scale, out=numbers) if decoded else None

    def decode_rows(self, parts: Parts, constants: Parts, out: torch.Tensor) -> torch.Tensor:
        """Multiply codes by their block's scale, and add the offset if affine."""
        codes = parts[-1]
        if self.bits == 4:
            # To the upper bits and back: the lower bits are gone then, and signed codes keep their sign.
            (shifts,) = constants
            codes = (codes.unsqueeze(-2) << shifts.view(codes.dtype)).bitwise_right_shift_(4).flatten(-2)
        self._write(codes, parts, out)
        return out

    def _write(self, codes: torch.Tensor, parts: Parts, out: torch.Tensor) -> None:
        write_scaled(codes, parts[0], out)
        if self.affine:
            out.add_(parts[1])

    def finite(self, parts: Parts) -> torch.Tensor | None:
        """Return whether the largest magnitude of every block is finite."""
        return None if self.affine else finite_scales(parts[0], 2 ** (self.bits - 1) - 1)

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        if not self.stochastic:
            return x.round_()
        most = 2**self.bits - 1 if self.affine else 2 ** (self.bits - 1) - 1
        chance = random_floats(x.numel(), x.device, self.seed).view(x.shape)
        return x.add_(chance).floor_().clamp_(max=most)

    def _packed(self, rounded: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Pack 4-bit codes: the first half of a block in the lower bits of bytes, the second in the upper."""
        if self.bits == 8:
            return rounded
        low, high = rounded.to(dtype).chunk(2, dim=1)
        return low.bitwise_and(15).add_(high, alpha=16)  # of integers, which are not rounded


def _halves(codes: torch.Tensor) -> torch.Tensor:
    """Return 4-bit codes in bytes. Arithmetic shifts keep the sign of signed ones."""
    *rows, half = codes.shape
    both = codes.new_empty(*rows, 2, half)
    torch.bitwise_left_shift(codes, 4, out=both[..., 0, :])
    both[..., 1, :].copy_(codes)
    return both.bitwise_right_shift_(4).view(*rows, 2 * half)
