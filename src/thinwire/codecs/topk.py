"""The largest numbers of every block, and where they stood."""

from dataclasses import dataclass
from numbers import Real

import torch

from thinwire.codecs.codec import BlockCodec, Parts, check_block, room_like
from thinwire.errors import OptionError

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class LargestEntries(BlockCodec):
    """Keeps the numbers of largest magnitude, a fixed share of every block; the others become zero.

    Choosing within blocks is many times faster than over all numbers, and lets places travel in one or two
    bytes. It needs error feedback. Infinite and NaN numbers count as the largest.

    Args:
        ratio: The share that is kept, at least one number a block.
        block: Out of how many it is chosen; up to 256 a place takes one byte, up to 32768 two.
        values: "bf16" or "fp32", as what the numbers travel.

    >>> codec = LargestEntries(ratio=0.25, block=8)
    >>> codec.decode(codec.encode(torch.tensor([1.0, 0, -4, 2, 0, 0, 0, 3])), into=torch.empty(8))
    tensor([ 0.,  0., -4.,  0.,  0.,  0.,  0.,  3.])
    """

    ratio: float = 0.01
    block: int = 1024
    values: str = "bf16"

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        check_block(self.block, most=1 << 15)
        if self.values not in _DTYPES:
            raise OptionError(f"values={self.values!r} must be {' or '.join(map(repr, _DTYPES))}")

    @property
    def wire_bits(self) -> float:
        """Values and places, spread over the block."""
        place = 8 if self.block <= 256 else 16
        return (_DTYPES[self.values].itemsize * 8 + place) * self._kept(self.block) / self.block

    def encode_blocks(self, x: torch.Tensor) -> Parts:
        """Places and values."""
        magnitudes, kept = torch.abs(x, out=room_like(x)), self._kept(x.shape[1])
        places = (
            magnitudes.topk(kept, dim=1, sorted=False).indices if kept > 1 else magnitudes.argmax(1, True)
        )
        values = x.gather(1, places).to(_DTYPES[self.values])
        return places.to(torch.uint8 if self.block <= 256 else torch.int16), values

    def decode_blocks(self, parts: Parts, out: torch.Tensor) -> None:
        """Zeros, but for what was kept."""
        places, values = parts
        out.zero_().scatter_(1, places.long(), values.float())

    def _kept(self, width: int) -> int:
        return max(1, round(self.ratio * width))


def check_ratio(ratio: object) -> None:
    """Refuse shares that make no sense."""
    if not isinstance(ratio, Real) or isinstance(ratio, bool) or not 0 < float(ratio) <= 1:
        raise OptionError(f"ratio={ratio!r} must be above 0 and at most 1: the share that is sent; try 0.01")
