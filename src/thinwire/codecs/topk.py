"""A codec that keeps the largest numbers of every block, and their positions."""

from dataclasses import dataclass
from numbers import Real
from typing import Literal, TypeAlias

import torch

from thinwire.codecs.checks import check_block
from thinwire.codecs.codec import BlockCodec, Parts
from thinwire.codecs.magnitudes import decode_magnitudes, encode_magnitudes
from thinwire.codecs.positions import Positions, pack_bits, packed_bytes, unpack_bits
from thinwire.errors import OptionError
from thinwire.kernels import packing as native
from thinwire.kernels.blocks import finite

Values: TypeAlias = Literal["int2", "int4", "int8", "bf16", "fp32"]
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_BITS = {"int2": 2, "int4": 4, "int8": 8}
_PLACE_BITS = 15
"""Bits of the positions in the largest block."""


@dataclass(frozen=True, kw_only=True)
class LargestEntries(BlockCodec):
    """The numbers of largest magnitude, a fixed share of every block. The others become zero.

    Choosing within blocks is many times faster than among all numbers, and positions take fewer bits: 8 each
    for 64 of 4096 (see `codecs/positions.py`). It needs error feedback. Non-finite numbers are kept first. Of
    equal magnitudes, the first in the block are kept.

    Values in 2, 4 or 8 bits are signs and magnitudes between the smallest and the largest that a block keeps.
    With 2 bits there are two magnitudes, each the mean of its half of the range. The range costs 4 bytes per
    block, so larger blocks suit these values.

    Args:
        ratio: Share that is kept, at least one number per block.
        block: Numbers in a block, at most 32768.
        values: Form in which kept numbers are sent: "int2", "int4", "int8", "bf16" or "fp32".

    Raises:
        OptionError: `ratio` is not above 0 and at most 1, `block` is not a whole number from 1 to 32768, or
            `values` is unknown.

    >>> codec = LargestEntries(ratio=0.25, block=8)
    >>> codec.decode(codec.encode(torch.tensor([1.0, 0, -4, 2, 0, 0, 0, 3])), into=torch.empty(8))
    tensor([ 0.,  0., -4.,  0.,  0.,  0.,  0.,  3.])
    >>> LargestEntries(ratio=64 / 4096, block=4096, values="int2").wire_bits * 4096 / 64
    10.5
    """

    ratio: float = 0.01
    block: int = 1024
    values: Values = "bf16"

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        check_block(self.block, most=1 << _PLACE_BITS)
        if self.values not in (*_BITS, *_DTYPES):
            raise OptionError(
                f"values={self.values!r} must be one of {', '.join(map(repr, (*_BITS, *_DTYPES)))}"
            )

    @property
    def wire_bits(self) -> float:
        """Bits of kept values and their positions, spread over the block."""
        kept, bits = self.kept(self.block), _BITS.get(self.values)
        if bits is None:
            values = kept * _DTYPES[self.values].itemsize
        else:
            values = 2 * torch.bfloat16.itemsize + packed_bytes(kept, bits)
        return 8 * (Positions(self.block, kept).nbytes + values) / self.block

    def finite(self, parts: Parts) -> torch.Tensor:
        """Return whether all kept numbers are finite."""
        return finite(parts[0])

    def encode_blocks(self, x: torch.Tensor) -> Parts:
        """Return values and positions, or ranges of magnitudes, positions and codes of values."""
        return self.encode_entries(x)[0]

    def encode_entries(
        self, x: torch.Tensor
    ) -> tuple[Parts, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Encode a matrix with one block per row, for a caller that needs the error without decoding again.

        Args:
            x: Blocks in float32.

        Returns:
            The parts, the positions of the kept numbers in ascending order, these numbers, and their codes
            before these are packed, or None if there are none.
        """
        kept = self.kept(x.shape[1])
        places = (native.largest if native.supported(x, torch.float32) else largest)(x, kept)
        values, packed = x.gather(1, places), Positions(x.shape[1], kept).pack(places)
        bits = _BITS.get(self.values)
        if bits is None:
            return (values.to(_DTYPES[self.values]), packed), places, values, None
        ranges, codes = encode_magnitudes(values, bits)
        return (ranges, packed, pack_bits(codes, bits)), places, values, codes

    def decode_blocks(self, parts: Parts, out: torch.Tensor) -> None:
        """Write zeros, and the kept values at their positions."""
        places, values = self.decode_entries(parts, out.shape[1])
        out.zero_().scatter_(1, places, values)

    def decode_entries(self, parts: Parts, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the positions and values of the entries of blocks of this width.

        Args:
            parts: The result of `encode_blocks`. Those of many messages have a dimension more before those of
                the matrix, and need not be contiguous.
            width: Numbers in a block.

        Returns:
            Two matrices with one row for each of all blocks.
        """
        kept, bits = self.kept(width), _BITS.get(self.values)
        codes = None if bits is None else unpack_bits(parts[2], bits, kept)
        return Positions(width, kept).unpack(parts[1]), self.decode_values(parts[0], codes)

    def decode_values(self, first: torch.Tensor, codes: torch.Tensor | None) -> torch.Tensor:
        """Return the values of entries in float32, from the first part and codes that are not packed."""
        if codes is None:
            return first.float().reshape(-1, first.shape[-1])
        return decode_magnitudes(first, codes, _BITS[self.values])

    def kept(self, width: int) -> int:
        """Return how many numbers of a block of this width are kept."""
        return max(1, round(self.ratio * width))


def largest(x: torch.Tensor, kept: int) -> torch.Tensor:
    """Return the positions of the `kept` largest magnitudes of each row, in ascending order.

    The bits of a magnitude and its position form one integer. All integers are therefore different, and ties
    are broken equally on every device, which `topk` does not promise.
    """
    places = torch.arange(x.shape[1], dtype=torch.int64, device=x.device)
    magnitudes = x.view(torch.int32).bitwise_and(0x7FFFFFFF)
    # Negated, so that the smallest keys have the largest magnitudes and, of equal ones, the first positions.
    keys = torch.sub(places, magnitudes, alpha=1 << _PLACE_BITS)  # of integers, which are not rounded
    del magnitudes  # as large as x
    best = keys.topk(kept, dim=1, largest=False, sorted=False).values
    return best.bitwise_and_((1 << _PLACE_BITS) - 1).sort(dim=1).values


def check_ratio(ratio: object) -> None:
    """Raise OptionError unless `ratio` is above 0 and at most 1."""
    if not isinstance(ratio, Real) or isinstance(ratio, bool) or not 0 < float(ratio) <= 1:
        raise OptionError(f"ratio={ratio!r} must be above 0 and at most 1: the share that is sent; try 0.01")
