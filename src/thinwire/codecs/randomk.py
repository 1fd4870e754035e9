"""A random share of the numbers, the same places on every rank."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from thinwire.codecs.codec import BlockCodec, Parts, check_seed
from thinwire.codecs.topk import check_ratio


@dataclass(frozen=True, kw_only=True)
class RandomEntries(BlockCodec):
    """Keeps one number out of every 1/ratio, at a place drawn from the seed; the others become zero.

    Places do not travel: who has the seed knows them. Encodings of one seed add up, so all-reduce can sum
    them. It needs error feedback. An infinite or NaN number makes its block's value NaN, chosen or not.

    Args:
        ratio: The share that is kept; 1/ratio is rounded to a whole number.
        seed: Of the places; programs draw others for every step.

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
        """Numbers of which one is kept."""
        return round(1 / self.ratio)

    @property
    def wire_bits(self) -> float:
        """A float32 per block."""
        return 32 / self.block

    def encode_blocks(self, x: torch.Tensor) -> Parts:
        """The chosen values."""
        overflow = x.amax(1, keepdim=True).mul_(0) + x.amin(1, keepdim=True).mul_(0)
        return (x.gather(1, self._places(x)) + overflow,)

    def decode_blocks(self, parts: Parts, out: torch.Tensor) -> None:
        """Zeros, but for what was kept."""
        out.zero_().scatter_(1, self._places(out), *parts)

    def _places(self, x: torch.Tensor) -> torch.Tensor:
        """One per row; drawn on the CPU, which draws alike everywhere."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randint(x.shape[1], (x.shape[0], 1), generator=generator).to(x.device)
