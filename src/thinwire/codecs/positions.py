"""Small integers packed into bytes, and sorted positions within a block in the Elias-Fano code.

The lower bits of a position are stored unchanged. The upper bits, which ascend, are stored in unary. A bit
vector has a one for each position, preceded by as many zeros as the upper part has grown since the last
position. So 64 positions out of 4096 take 6 bits each for the lower part and 2 for the upper, instead of 12.
The length depends only on the two counts, never on the positions, as encodings require.

See Vigna: Quasi-succinct indices, https://arxiv.org/abs/1206.4300.
"""

from dataclasses import dataclass

import torch

from thinwire.kernels import packing as native


@dataclass(frozen=True)
class Positions:
    """The code of `kept` ascending positions within a block.

    Args:
        width: Numbers in a block.
        kept: Positions, from 1 to `width`.

    >>> code = Positions(4096, 64)
    >>> code.nbytes
    64
    >>> places = torch.arange(0, 4096, 64)[None]
    >>> torch.equal(code.unpack(code.pack(places)), places)
    True
    """

    width: int
    kept: int

    @property
    def lower_bits(self) -> int:
        """Bits of the lower part, chosen so that the code is shortest."""
        return min(range(self.width.bit_length()), key=lambda bits: self.kept * bits + self._unary_bits(bits))

    @property
    def nbytes(self) -> int:
        """Bytes of a block's positions."""
        bits = self.lower_bits
        return packed_bytes(self.kept, bits) + packed_bytes(self._unary_bits(bits), 1)

    def pack(self, places: torch.Tensor) -> torch.Tensor:
        """Return the bytes of each row of positions.

        Args:
            places: An int64 matrix with `kept` columns. Each row ascends strictly, from 0 to `width` - 1.

        Returns:
            A uint8 matrix with `nbytes` columns.
        """
        bits = self.lower_bits
        if native.supported(places, torch.int64):
            return native.pack_positions(places, bits, self._unary_bits(bits), self.nbytes)
        ones = (places >> bits) + self._numbers(self.kept, places)
        unary = places.new_zeros(places.shape[0], self._unary_bits(bits)).scatter_(1, ones, 1)
        lower = places & ((1 << bits) - 1)
        return torch.cat([pack_bits(lower, bits), pack_bits(unary, 1)], dim=1)

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """Return the positions of each row as an int64 matrix, without a host read.

        Invalid bytes also decode to positions within the block.
        """
        return self._unpacked(packed).clamp_(max=self.width - 1)

    def _unpacked(self, packed: torch.Tensor) -> torch.Tensor:
        bits = self.lower_bits
        if native.supported(packed, torch.uint8):
            return native.unpack_positions(packed, bits, self._unary_bits(bits), self.kept)
        lower, unary = packed.split(
            [packed_bytes(self.kept, bits), packed_bytes(self._unary_bits(bits), 1)], 1
        )
        ones = unpack_bits(unary, 1, self._unary_bits(bits))
        number = ones.cumsum(1) - 1
        # The i-th one is at its upper part + i. All zeros write to one more column, which is dropped.
        column = torch.where(ones.bool(), number, self.kept).clamp_(max=self.kept)
        upper = self._numbers(ones.shape[1], packed) - number
        found = upper.new_zeros(packed.shape[0], self.kept + 1).scatter_(1, column, upper)[:, : self.kept]
        return (found << bits) + unpack_bits(lower, bits, self.kept)

    def _unary_bits(self, lower_bits: int) -> int:
        return self.kept + ((self.width - 1) >> lower_bits)

    @staticmethod
    def _numbers(count: int, like: torch.Tensor) -> torch.Tensor:
        return torch.arange(count, dtype=torch.int64, device=like.device)


def packed_bytes(count: int, bits: int) -> int:
    """Return the bytes that `count` integers of `bits` bits take."""
    return -(-count * bits // 8)


def pack_bits(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack each row of a matrix into bytes, lowest bits first.

    Args:
        numbers: Integers from 0 to 2**bits - 1, of any integer dtype.
        bits: Bits of each.

    Returns:
        A uint8 matrix. The unused bits of a row's last byte are zero.

    >>> pack_bits(torch.tensor([[1, 2, 3]]), 4)
    tensor([[33,  3]], dtype=torch.uint8)
    """
    rows, count = numbers.shape
    size, numbers = packed_bytes(count, bits), numbers.long()
    if native.supported(numbers, torch.int64):
        return native.pack(numbers, bits, size)
    places = torch.arange(bits, dtype=torch.int64, device=numbers.device)
    each = (numbers.unsqueeze(2) >> places).bitwise_and_(1).view(rows, count * bits)
    whole = each.new_zeros(rows, size * 8)
    whole[:, : count * bits] = each
    weights = torch.arange(8, dtype=torch.int64, device=numbers.device)
    return (whole.view(rows, size, 8) << weights).sum(2).to(torch.uint8)


def unpack_bits(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Return the `count` integers in each row of packed bytes, as int64.

    >>> unpack_bits(torch.tensor([[33, 3]], dtype=torch.uint8), 4, 3)
    tensor([[1, 2, 3]])
    """
    if native.supported(packed, torch.uint8):
        return native.unpack(packed, bits, count)
    rows = packed.shape[0]
    places = torch.arange(8, dtype=torch.int64, device=packed.device)
    each = (packed.long().unsqueeze(2) >> places).bitwise_and_(1).view(rows, packed.shape[1] * 8)
    weights = torch.arange(bits, dtype=torch.int64, device=packed.device)
    return (each[:, : count * bits].view(rows, count, bits) << weights).sum(2)
