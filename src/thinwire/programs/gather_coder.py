"""The encoding of a whole bucket, as `Gathered` sends it: one row of bytes from each rank to all.

encode   this rank's numbers, in one row
decode   the mean of all ranks' rows
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from thinwire.codecs.codec import Codec, numbers_of
from thinwire.codecs.rounding import divide_in_place
from thinwire.engine.foreach import add_all, copy_all
from thinwire.engine.pack import Layout
from thinwire.programs.coding import own_codecs
from thinwire.programs.program import Bucket, Outcome


class GatherCoder(ABC):
    """One exchange of a bucket. Call its methods once each, in their order."""

    @abstractmethod
    def encode(self) -> torch.Tensor:
        """Add residuals, encode, and return one row of bytes."""

    @abstractmethod
    def decode(self, received: torch.Tensor) -> Outcome:
        """Return the mean, and the error unless it was written to the new residuals.

        Args:
            received: A matrix of bytes with one row per rank, the same on all ranks.
        """


class WholeBucket:
    """A bucket's numbers in one flat tensor: gradients plus residuals, and later their error.

    Blocks of numbers may span parameters, so residuals are added and copied around the encoding.

    Attributes:
        numbers: The flat gradients, which residuals are added to in place.
        tracked: Whether the error is needed.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._buffer, self._residuals = bucket.buffer, bucket.residuals
        self.numbers = numbers_of(bucket.buffer)
        self.tracked = bucket.track_error or bucket.residuals is not None
        pairs = 2 if bucket.buffer.is_complex() else 1
        self._lengths = [pairs * shape.numel() for shape in bucket.shapes]

    def add_residuals(self) -> None:
        """Add the residuals of the step before to the numbers."""
        if self._residuals is not None:
            add_all(self._pieces(), _present(self._residuals.old), self._residuals.keep)

    def outcome(self, mean: torch.Tensor, finite: torch.Tensor | None = None) -> Outcome:
        """Return the outcome. The numbers are the error by now, if it is tracked."""
        folded = self._residuals is not None
        return Outcome(mean, self._buffer if self.tracked and not folded else None, finite)

    def room_for_mean(self) -> torch.Tensor:
        """Return a tensor for the mean. Call it after the error was written to the numbers."""
        if self._residuals is not None:
            copy_all(_present(self._residuals.new), self._pieces())
            return self._buffer
        return torch.empty_like(self._buffer) if self.tracked else self._buffer

    def _pieces(self) -> list[torch.Tensor]:
        return list(self.numbers.split(self._lengths))


def _present(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Return residuals, of which a program without exact parameters has one for each parameter."""
    return [tensor for tensor in tensors if tensor is not None]


class JoinedGatherCoder(GatherCoder):
    """A coder for any codec.

    Args:
        codec: The codec.
        bucket: The gradients.
    """

    def __init__(self, codec: Codec, bucket: Bucket) -> None:
        self._codecs, self._rank = own_codecs(codec, bucket), bucket.rank
        self._whole = WholeBucket(bucket)

    def encode(self) -> torch.Tensor:
        """Encode the numbers of all parameters together."""
        self._whole.add_residuals()
        self._encoded = self._codecs[self._rank].encode(self._whole.numbers)
        self._layout = Layout.of(self._encoded)
        return self._layout.write(self._encoded, self._layout.rows(1)[0])

    def decode(self, received: torch.Tensor) -> Outcome:
        """Sum the decoded gradients in the order of ranks, at least in float32."""
        numbers = self._whole.numbers
        total = torch.zeros_like(numbers, dtype=torch.promote_types(numbers.dtype, torch.float32))
        for codec, row in zip(self._codecs, received, strict=True):
            codec.add(self._layout.read(row), total)
        if self._whole.tracked:
            # error <- gradient - decode(encode(gradient)), in the bucket's own memory.
            self._codecs[self._rank].add(self._encoded, numbers, -1)
        mean = self._whole.room_for_mean()
        numbers_of(mean).copy_(divide_in_place(total, len(received)))
        return self._whole.outcome(mean)
