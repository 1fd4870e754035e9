"""The positions of the largest magnitudes of each row."""

import torch

from thinwire.errors import OptionError
from thinwire.kernels.library import native
from thinwire.kernels.tensors import addressable


def supported(x: torch.Tensor) -> bool:
    """Return whether native code is in use and `x` is a plain contiguous float32 tensor on the CPU."""
    return addressable([x])


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
    library = native()
    if library is None or not supported(x) or x.dim() != 2 or not 1 <= kept <= x.shape[1]:
        raise OptionError(
            f"largest() of {tuple(x.shape)} {x.dtype} with kept={kept}: pass a matrix for which `supported`"
            " is true, and kept from 1 to the number of its columns"
        )
    places = torch.empty(x.shape[0], kept, dtype=torch.int64, device="cpu")
    library.tw_largest(x.data_ptr(), x.shape[0], x.shape[1], kept, places.data_ptr())
    return places
