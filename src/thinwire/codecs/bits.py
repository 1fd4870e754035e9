"""Small integers packed into bytes without gaps."""

import torch

from thinwire.kernels import packing as native


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
