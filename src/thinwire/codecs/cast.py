"""A codec that casts to fp16 or bf16."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from thinwire.codecs.codec import Codec, Parts, flat_output, numbers_of
from thinwire.errors import OptionError

_CARRIERS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Cast(Codec):
    """A cast to `dtype` and back. Complex numbers are sent as pairs of real ones.

    Encodings can be summed, so `Reduced` can all-reduce them. Infinite and NaN numbers are preserved. A
    finite number beyond the dtype's range becomes infinite.

    Args:
        dtype: `torch.float16`, `torch.bfloat16` or `torch.float32`.

    Raises:
        OptionError: `dtype` is none of these.

    >>> codec = Cast(torch.bfloat16)
    >>> codec.decode(codec.encode(torch.tensor([1.001])), into=torch.empty(1))
    tensor([1.])
    """

    additive: ClassVar[bool] = True

    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.dtype not in _CARRIERS:
            raise OptionError(
                f"dtype={self.dtype} is not supported: use one of {', '.join(map(str, _CARRIERS))}"
            )

    @property
    def wire_bits(self) -> float:
        """Bits of `dtype`."""
        return self.dtype.itemsize * 8

    def encode(self, x: torch.Tensor) -> Parts:
        """Return one part, a copy of `x` in `dtype`, which may be reduced in place."""
        return (numbers_of(x).to(self.dtype, copy=True),)

    def decode(self, parts: Parts, into: torch.Tensor) -> torch.Tensor:
        """Write the numbers to `into`, in its dtype, and return it."""
        (part,) = parts
        flat_output(into).copy_(part)
        return into
