"""Many tensors in one flat buffer, so that one collective carries them all."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from thinwire.errors import ProgramError

BATCH = 1 << 25
"""The most bytes in one broadcast. It is large compared with a round trip and small compared with a model."""


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Copy tensors of one dtype and device into one new flat tensor, in order.

    >>> pack([torch.tensor([[1, 2]]), torch.tensor(3)])
    tensor([1, 2, 3])
    """
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unpack(flat: torch.Tensor, shapes: Iterable[Sequence[int]]) -> list[torch.Tensor]:
    """Return views of a flat tensor in the given shapes, in order. Together they must cover it exactly.

    >>> unpack(torch.arange(3), [(1, 2), ()])
    [tensor([[0, 1]]), tensor(2)]
    """
    sizes = [torch.Size(shape) for shape in shapes]
    pieces = flat.split([size.numel() for size in sizes])
    return [piece.view(size) for piece, size in zip(pieces, sizes, strict=True)]


def real_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the tensor as real numbers, complex ones as pairs in a last dimension of 2.

    >>> real_numbers(torch.tensor([1 + 2j]))
    tensor([[1., 2.]])
    """
    plain = tensor.detach()
    return torch.view_as_real(plain) if plain.is_complex() else plain


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, which shares its memory, and any other tensor as it is."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else tensor.detach().to_local()  # type: ignore[attr-defined]


_ALIGNED = 8
"""Alignment, in bytes, of every tensor in a row of bytes, so that it can be read in place."""


@dataclass(frozen=True)
class Layout:
    """The layout of tensors of different dtypes in one row of bytes.

    >>> parts = (torch.tensor([0.5]), torch.tensor([[1, 2]], dtype=torch.uint8))
    >>> layout = Layout.of(parts)
    >>> layout.read(layout.write(parts, layout.rows(1)[0]))
    (tensor([0.5000]), tensor([[1, 2]], dtype=torch.uint8))
    """

    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[torch.Size, ...]
    device: torch.device

    @classmethod
    def of(cls, parts: Sequence[torch.Tensor]) -> "Layout":
        """Return the layout of tensors with these dtypes and shapes."""
        return cls(tuple(part.dtype for part in parts), tuple(part.shape for part in parts), parts[0].device)

    @property
    def nbytes(self) -> int:
        """The length of a row in bytes."""
        return sum(end for _, end in self._places()[-1:])

    @property
    def offsets(self) -> tuple[int, ...]:
        """The first byte of each tensor in a row."""
        return tuple(start for start, _ in self._places())

    def rows(self, count: int) -> torch.Tensor:
        """Return `count` rows of zeros."""
        return torch.zeros(count, self.nbytes, dtype=torch.uint8, device=self.device)

    def write(self, parts: Sequence[torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        """Copy the tensors into a row.

        Args:
            parts: Tensors with the dtypes and shapes of this layout.
            row: One of `rows`.

        Returns:
            `row`.

        Raises:
            ProgramError: The tensors have another layout.
        """
        if Layout.of(parts) != self:
            raise changed_layout(self, Layout.of(parts))
        for place, part in zip(self.read(row), parts, strict=True):
            place.copy_(part)
        return row

    def read(self, row: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the tensors of a row, sharing its memory. Those of many rows have one dimension more."""
        several = row.shape[:-1]
        return tuple(
            row[..., start : start + shape.numel() * dtype.itemsize].view(dtype).view(*several, *shape)
            if shape.numel()
            else row.new_empty((*several, *shape), dtype=dtype)
            for (start, _), dtype, shape in zip(self._places(), self.dtypes, self.shapes, strict=True)
        )

    def _places(self) -> list[tuple[int, int]]:
        """Return the start and end of every tensor, with its padding."""
        places, end = [], 0
        for dtype, shape in zip(self.dtypes, self.shapes, strict=True):
            size = -(-shape.numel() * dtype.itemsize // _ALIGNED) * _ALIGNED
            places.append((end, end + size))
            end += size
        return places

    def __str__(self) -> str:
        kinds = zip(self.dtypes, self.shapes, strict=True)
        return " + ".join(f"{tuple(shape)} {str(dtype).removeprefix('torch.')}" for dtype, shape in kinds)


def changed_layout(expected: Layout, found: Layout) -> ProgramError:
    """Return the error for a codec whose encoding depends on values, or is on another device."""
    if found.device != expected.device:
        return ProgramError(
            f"a codec encoded numbers on {expected.device} to tensors on {found.device}: make them on the"
            " device of the numbers, as x.new_empty(...) does"
        )
    return ProgramError(
        f"a codec's encoding changed from {expected} to {found}: shapes and dtypes may depend on the number"
        " of values, but not on the values"
    )


def batches(tensors: Sequence[torch.Tensor], limit: int = BATCH) -> list[list[int]]:
    """Return the indices of tensors that share a broadcast, of one dtype and device and up to `limit` bytes.

    >>> batches([torch.ones(3), torch.ones(2, dtype=torch.int64), torch.ones(4), torch.ones(1)], limit=28)
    [[0, 2], [1], [3]]
    """
    made: list[list[int]] = []
    latest: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for number, tensor in enumerate(tensors):
        kind = tensor.dtype, tensor.device
        nbytes = tensor.numel() * tensor.element_size()
        batch, filled = latest.get(kind, ([], 0))
        if not batch or filled + nbytes > limit:
            batch, filled = [], 0
            made.append(batch)
        batch.append(number)
        latest[kind] = batch, filled + nbytes
    return made
