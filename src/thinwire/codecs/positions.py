"""Small integers packed into bytes, and sorted positions within a block in the Elias-Fano code.

The lower bits of a position are stored unchanged. The upper bits, which ascend, are stored in unary. A bit
vector has a one for each position, preceded by as many zeros as the upper part has grown since the last
position. So 64 positions out of 4096 take 6 bits each for the lower part and 2 for the upper, instead of 12.
The length depends only on the two counts, never on the positions, as encodings require.

See Vigna: Quasi-succinct indices, https://arxiv.org/abs/1206.4300.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

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
    def unary_bits(self) -> int:
        """Bits of the unary vector of the upper parts."""
        return self._unary_bits(self.lower_bits)

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
        # The bits of a row, one per byte: those of all lower parts, and the unary vector of the upper parts.
        each = places.new_zeros((places.shape[0], self.nbytes * 8), dtype=torch.uint8)
        numbers = _numbers(max(self.kept, bits), places)
        _split_bits(places, numbers[:bits], out=each[:, : self.kept * bits])
        ones = (places >> bits).add_(numbers[: self.kept])
        each[:, packed_bytes(self.kept, bits) * 8 :].scatter_(1, ones, 1)
        return joined(each.view(places.shape[0], self.nbytes, 8), 1, dim=2)

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """Return the positions of each row as an int64 matrix, without a host read.

        Args:
            packed: The result of `pack`. It may have dimensions before the last, and need not be contiguous.

        Returns:
            A matrix with one row for each of all blocks. Invalid bytes also decode to positions within the
            block.
        """
        return self._unpacked(packed).clamp_(max=self.width - 1)

    def _unpacked(self, packed: torch.Tensor) -> torch.Tensor:
        bits = self.lower_bits
        if packed.dim() == 2 and native.supported(packed, torch.uint8):
            return native.unpack_positions(packed, bits, self._unary_bits(bits), self.kept)
        rows, numbers = packed.shape[:-1].numel(), _numbers(max(self.kept, bits), packed)
        shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
        each = (packed.unsqueeze(-1) >> shifts).bitwise_and_(1).view(rows, self.nbytes * 8)
        unary = each[:, packed_bytes(self.kept, bits) * 8 :]
        # The i-th one is at its upper part + i. It is where the count of ones first exceeds i.
        count = numbers[: self.kept].expand(rows, self.kept).contiguous()
        upper = torch.searchsorted(unary.cumsum(1, dtype=torch.int32), count, right=True).sub_(count)
        if bits == 0:
            return upper
        lower = each[:, : self.kept * bits].view(rows, self.kept, bits)
        if bits > 1:
            lower = lower << numbers[:bits]
        return torch.add(lower.sum(2) if bits > 1 else lower.squeeze(2), upper, alpha=1 << bits)

    def _unary_bits(self, lower_bits: int) -> int:
        return self.kept + ((self.width - 1) >> lower_bits)


def _numbers(count: int, like: torch.Tensor) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int32, device=like.device)


def _split_bits(numbers: torch.Tensor, places: torch.Tensor, out: torch.Tensor) -> None:
    """Write the bits of each number at these places to bytes of their own."""
    rows, count = numbers.shape
    torch.bitwise_and(numbers.unsqueeze(2) >> places, 1, out=out.view(rows, count, len(places)))


def packed_bytes(count: int, bits: int) -> int:
    """Return the bytes that `count` integers of `bits` bits take."""
    return -(-count * bits // 8)


def joined(codes: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Join 8 / bits small integers along a dimension to one byte, the first in its lowest bits.

    Halves are joined to each other, in one kernel each, until one is left.

    >>> joined(torch.tensor([[1, 0, 0, 0, 0, 0, 1, 0]], dtype=torch.uint8), 1, dim=1)
    tensor([65], dtype=torch.uint8)
    """
    while codes.shape[dim] > 1:
        half = codes.shape[dim] // 2
        lower, upper = codes.split(half, dim)
        codes = torch.add(lower, upper, alpha=1 << bits * half)  # of integers, which are not rounded
    return codes.squeeze(dim)


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
    size = packed_bytes(count, bits)
    if native.supported(numbers, numbers.dtype):
        return native.pack(numbers.long(), bits, size)
    if 8 % bits == 0:
        whole, missing = numbers.to(torch.uint8), size * 8 // bits - count
        if missing:  # padding by nothing would copy
            whole = functional.pad(whole, (0, missing))
        return joined(whole.view(rows, size, 8 // bits), bits, dim=2)
    each = numbers.new_zeros((rows, size * 8), dtype=torch.uint8)
    _split_bits(numbers, _numbers(bits, numbers), out=each[:, : count * bits])
    return joined(each.view(rows, size, 8), 1, dim=2)


def unpack_bits(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Return the `count` integers in each row of packed bytes, in an integer dtype that has room for them.

    The bytes may have dimensions before the last, and need not be contiguous. The result is a matrix.

    >>> unpack_bits(torch.tensor([[33, 3]], dtype=torch.uint8), 4, 3).long()
    tensor([[1, 2, 3]])
    """
    if packed.dim() == 2 and native.supported(packed, torch.uint8):
        return native.unpack(packed, bits, count)
    rows, size = packed.shape[:-1].numel(), packed.shape[-1]
    if 8 % bits == 0:
        places = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
        each = (packed.unsqueeze(-1) >> places).bitwise_and_((1 << bits) - 1)
        return each.view(rows, size * 8 // bits)[:, :count]
    places = _numbers(max(8, bits), packed)
    each = (packed.unsqueeze(-1) >> places[:8]).bitwise_and_(1).view(rows, size * 8)
    return (each[:, : count * bits].view(rows, count, bits) << places[:bits]).sum(2)
