"""The protocol of coders, which encode numbers of several tensors directly into rows of bytes.

A coder applies a codec to a list of pieces, each a flat slice of one parameter. The sum with a residual, the
encoding and the new residual are computed together, while the numbers are in the cache.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from thinwire.codecs.codec import Codec, Parts
from thinwire.engine.pack import Layout

Tensors = list[torch.Tensor]


@dataclass(frozen=True, eq=False)
class CoderInput:
    """Numbers to encode, in pieces: value + keep * residual."""

    values: Tensors
    residuals: Tensors | None = None
    keep: float = 1.0

    @property
    def dtype(self) -> torch.dtype:
        """The dtype to compute in, at least float32."""
        return torch.promote_types(self.values[0].dtype, torch.float32)


class Coder(ABC):
    """A codec applied to pieces. Parts are views of a row of bytes."""

    codec: Codec
    block: int
    """Numbers of one parameter that are encoded together."""

    @abstractmethod
    def layout(self, lengths: tuple[int, ...], device: torch.device) -> Layout:
        """Return the dtypes and shapes of the parts of an encoding of pieces with these lengths."""

    @abstractmethod
    def encode(self, given: CoderInput, errors: Tensors | None, parts: Parts) -> None:
        """Encode the numbers into `parts`, and write the error of the encoding to `errors`.

        Args:
            given: The numbers.
            errors: Receive the input minus the decoded encoding. They may share memory with `given`. None
                writes nothing.
            parts: Receive the encoding.
        """

    @abstractmethod
    def encode_mean(
        self,
        given: CoderInput,
        received: "Sequence[tuple[Coder, Parts]]",
        rank: int,
        errors: Tensors | None,
        parts: Parts,
    ) -> None:
        """Encode the mean of the given numbers and the received ones, and write its error times their number.

        Args:
            given: The numbers of this rank.
            received: The encodings of the other ranks, in order, with the coder of each.
            rank: This rank, whose numbers are added at their place in the order of ranks.
            errors: As for `encode`, times the number of ranks.
            parts: Receive the encoded mean.
        """

    @abstractmethod
    def decode(self, parts: Parts, into: Tensors) -> None:
        """Decode to pieces.

        Args:
            parts: An encoding.
            into: The pieces to overwrite. Numbers are converted to their dtype.
        """

    def finite(self, parts: Parts) -> torch.Tensor | None:
        """Return whether all encoded numbers are finite.

        Args:
            parts: An encoding.

        Returns:
            A scalar bool tensor, or None if only the decoded numbers show it.
        """
        return self.codec.finite(parts)


def scatter(flat: torch.Tensor, into: Tensors) -> None:
    """Copy consecutive numbers of a flat tensor to pieces, in the dtype of each."""
    for piece, numbers in zip(into, flat.split([piece.numel() for piece in into]), strict=True):
        piece.copy_(numbers)
