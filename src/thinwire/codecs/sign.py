"""One bit a number: its sign, with a magnitude for every block."""

from dataclasses import dataclass

import torch

from thinwire.codecs.codec import BlockCodec, Parts, check_block, room_like


@dataclass(frozen=True, kw_only=True)
class SignBits(BlockCodec):
    """Each number becomes plus or minus its block's mean magnitude; zero counts as plus.

    Of all that one bit can say this is nearest in the mean square. It needs error feedback. Blocks with an
    infinite or NaN number decode to such numbers.

    Args:
        block: Numbers that share a magnitude, which costs 4 bytes.

    >>> codec = SignBits(block=8)
    >>> codec.decode(codec.encode(torch.tensor([1.0, -3.0, 2.0, 2.0])), into=torch.empty(4))
    tensor([ 2., -2.,  2.,  2.])
    """

    block: int = 256

    def __post_init__(self) -> None:
        check_block(self.block, of=8)

    @property
    def wire_bits(self) -> float:
        """One, and a block's share of its magnitude."""
        return 1 + 32 / self.block

    def encode(self, x: torch.Tensor) -> Parts:
        """Signs and magnitudes; that of a short last block is the mean of the numbers it has."""
        magnitude, packed = super().encode(x)
        if len(magnitude):
            padded = self.align(x.numel()) - x.numel()
            width = 8 * packed.shape[1]
            magnitude[-1] *= width / (width - padded)
        return magnitude, packed

    def encode_blocks(self, x: torch.Tensor) -> Parts:
        """Magnitudes, and signs with the eighths of a block in the eight bits of its bytes."""
        signs = (x >= 0).view(torch.uint8)
        packed = signs.new_zeros(x.shape[0], x.shape[1] // 8)
        for bit, eighth in enumerate(signs.chunk(8, dim=1)):
            packed.add_(eighth, alpha=1 << bit)
        return torch.abs(x, out=room_like(x)).mean(1, keepdim=True), packed

    def decode_blocks(self, parts: Parts, out: torch.Tensor) -> None:
        """Plus or minus the magnitude."""
        magnitude, packed = parts
        for bit, eighth in enumerate(out.chunk(8, dim=1)):
            eighth.copy_((packed >> bit).bitwise_and_(1))
        out.sub_(0.5).mul_(magnitude * 2)
