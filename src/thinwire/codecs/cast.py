"""Fewer bits a number, nothing else: a cast to fp16 or bf16."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from thinwire.codecs.codec import Codec, Parts, numbers_of, room_of
from thinwire.errors import OptionError

_CARRIERS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Cast(Codec):
    """Casts to `dtype` and back; complex numbers travel as pairs.

    Encodings add up, so they may be all-reduced. inf and NaN stay what they are; a finite number beyond
    the dtype's range becomes inf.

    >>> codec = Cast(torch.bfloat16)
    >>> codec.decode(codec.encode(torch.tensor([1.001])), into=torch.empty(1))
    tensor([1.])
    """

    additive: ClassVar[bool] = True

    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.dtype not in _CARRIERS:
            raise OptionError(
                f"dtype={self.dtype} is not one that gradients are cast to for the wire: take"
                f" {', '.join(map(str, _CARRIERS))}"
            )

    @property
    def wire_bits(self) -> float:
        """The dtype's own."""
        return self.dtype.itemsize * 8

    def encode(self, x: torch.Tensor) -> Parts:
        """One part: `x` in `dtype`; never `x` itself, so that it may be reduced in place."""
        return (numbers_of(x).to(self.dtype, copy=True),)

    def decode(self, parts: Parts, into: torch.Tensor) -> torch.Tensor:
        """Write the numbers into `into`, in its dtype, and return it."""
        (part,) = parts
        room_of(into).copy_(part)
        return into
