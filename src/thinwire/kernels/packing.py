"""The positions of the largest magnitudes, positions in the Elias-Fano code, and small integers in bytes.

`codecs/positions.py` and `codecs/topk.py` have the pure-torch counterparts.
"""

import ctypes

import torch

from thinwire.errors import OptionError
from thinwire.kernels.library import native
from thinwire.kernels.tensors import addressable

_MOST_BITS = 32


def supported(x: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether native code is in use and `x` is a plain contiguous tensor of this dtype on the CPU."""
    return addressable([x], dtype)


def largest(x: torch.Tensor, kept: int) -> torch.Tensor:
    """Return the positions of the `kept` largest magnitudes of each row, in ascending order.

    NaN is larger than infinity. Of equal magnitudes the first are taken; `torch.topk` promises no order.

    Args:
        x: Matrix for which `supported` is true.
        kept: Positions per row, from 1 to the row's length.

    Returns:
        An int64 matrix with `kept` columns.

    Raises:
        OptionError: `x` is not a matrix, not supported, or has fewer columns than `kept`.
    """
    library, rows, width = _checked(x, torch.float32)
    if not 1 <= kept <= width:
        raise OptionError(f"kept={kept} of rows with {width} numbers: pass a number from 1 to {width}")
    places = torch.empty(rows, kept, dtype=torch.int64, device="cpu")
    library.tw_largest(x.data_ptr(), rows, width, kept, places.data_ptr())
    return places


def pack(numbers: torch.Tensor, bits: int, nbytes: int) -> torch.Tensor:
    """Pack the lowest `bits` bits of each number of each row into `nbytes` bytes.

    Args:
        numbers: An int64 matrix for which `supported` is true.
        bits: Bits of each number.
        nbytes: Bytes of a row.

    Returns:
        A uint8 matrix.
    """
    library, rows, count = _checked(numbers, torch.int64)
    _check_bytes(bits, -(-count * bits // 8), nbytes)
    into = torch.empty(rows, nbytes, dtype=torch.uint8, device="cpu")
    library.tw_pack(numbers.data_ptr(), rows, count, bits, into.data_ptr())
    return into


def unpack(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Return the `count` integers in each row of packed bytes as an int64 matrix.

    Args:
        packed: A uint8 matrix for which `supported` is true.
        bits: Bits of each number.
        count: Numbers in a row.
    """
    library, rows, nbytes = _checked(packed, torch.uint8)
    _check_bytes(bits, -(-count * bits // 8), nbytes)
    numbers = torch.empty(rows, count, dtype=torch.int64, device="cpu")
    library.tw_unpack(packed.data_ptr(), rows, count, bits, numbers.data_ptr())
    return numbers


def pack_positions(places: torch.Tensor, bits: int, ones: int, nbytes: int) -> torch.Tensor:
    """Encode rows of ascending positions.

    Args:
        places: An int64 matrix for which `supported` is true. The upper bits are at most ones - kept.
        bits: Number of lower bits, which are stored unchanged.
        ones: Length of the bit vector of the upper bits.
        nbytes: Bytes of a row.

    Returns:
        A uint8 matrix.
    """
    library, rows, kept = _checked(places, torch.int64)
    _check_bytes(bits, -(-kept * bits // 8) + -(-ones // 8), nbytes)
    into = torch.empty(rows, nbytes, dtype=torch.uint8, device="cpu")
    library.tw_pack_positions(places.data_ptr(), rows, kept, bits, ones, into.data_ptr())
    return into


def unpack_positions(packed: torch.Tensor, bits: int, ones: int, kept: int) -> torch.Tensor:
    """Return the `kept` positions of each row as an int64 matrix.

    Args:
        packed: A uint8 matrix for which `supported` is true.
        bits: Number of lower bits, which are stored unchanged.
        ones: Length of the bit vector of the upper bits.
        kept: Positions in a row.
    """
    library, rows, nbytes = _checked(packed, torch.uint8)
    _check_bytes(bits, -(-kept * bits // 8) + -(-ones // 8), nbytes)
    places = torch.empty(rows, kept, dtype=torch.int64, device="cpu")
    library.tw_unpack_positions(packed.data_ptr(), rows, kept, bits, ones, places.data_ptr())
    return places


def _checked(x: torch.Tensor, dtype: torch.dtype) -> tuple[ctypes.CDLL, int, int]:
    """Return the library and a matrix's shape. Raise OptionError unless its memory can be read."""
    library = native()
    if library is None or x.dim() != 2 or not supported(x, dtype):
        raise OptionError(
            f"{tuple(x.shape)} {x.dtype} cannot be passed to native code, which takes contiguous CPU matrices"
            f" of {dtype}: call `supported` first"
        )
    return library, x.shape[0], x.shape[1]


def _check_bytes(bits: int, needed: int, nbytes: int) -> None:
    if not 0 <= bits <= _MOST_BITS or needed != nbytes:
        raise OptionError(
            f"{nbytes} bytes of {bits}-bit integers: rows have {needed} bytes, of 0 to {_MOST_BITS} bits each"
        )
