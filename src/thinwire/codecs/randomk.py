"""A codec that keeps a random share of the numbers, at the same positions on every rank."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from thinwire.codecs.checks import check_seed
from thinwire.codecs.codec import BlockCodec, Parts
from thinwire.codecs.draws import random_integers
from thinwire.codecs.topk import check_ratio


@dataclass(frozen=True, kw_only=True)
class RandomEntries(BlockCodec):
    """One number out of every 1/ratio, at a position drawn from the seed. The others become zero.

    Positions are not sent, because every rank derives them from the seed. Encodings of one seed can be
    summed, so `Reduced` can all-reduce them. It needs error feedback. A block with a non-finite number,
    chosen or not, decodes to NaN.

    Args:
        ratio: Share that is kept. 1/ratio is rounded to a whole number.
        seed: Seed of the positions. Programs derive a new one for every step and bucket.

    Raises:
        OptionError: `ratio` is not above 0 and at most 1, or `seed` is not a whole number.

    >>> codec = RandomEntries(ratio=0.25, seed=1)
    >>> int(codec.decode(codec.encode(torch.ones(16)), into=torch.empty(16)).sum())
    4
    """

    additive: ClassVar[bool] = True

    ratio: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        check_seed(self.seed)

    @property
    def block(self) -> int:  # type: ignore[override] # read only, as fields of frozen dataclasses are
        """Numbers out of which one is kept."""
        return round(1 / self.ratio)

    @property
    def wire_bits(self) -> float:
        """Bits of a float32, spread over the block."""
        return 32 / self.block

    def encode_blocks(self, x: torch.Tensor) -> Parts:
        """Return the values at the chosen positions."""
        overflow = x.amax(1, keepdim=True).mul_(0) + x.amin(1, keepdim=True).mul_(0)
        return (x.gather(1, self._places(x)) + overflow,)

    def decode_blocks(self, parts: Parts, out: torch.Tensor) -> None:
        """Write zeros, and the kept values at their positions.

        A block whose value is not finite becomes NaN, all of it, because the position may be in the padding.
        """
        (values,) = parts
        out.copy_((values * 0).abs_().expand_as(out)).scatter_(1, self._places(out), values)

    def _places(self, x: torch.Tensor) -> torch.Tensor:
        """Return one position per row, the same on every device."""
        return random_integers(x.shape[0], x.shape[1], x.device, self.seed).view(-1, 1)
