"""Many tensors in one flat buffer, so that one collective carries them all."""

from collections.abc import Iterable, Sequence

import torch


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Copy tensors of one dtype and device into one new flat tensor, in order.

    >>> pack([torch.tensor([[1, 2]]), torch.tensor(3)])
    tensor([1, 2, 3])
    """
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unpack(flat: torch.Tensor, shapes: Iterable[Sequence[int]]) -> list[torch.Tensor]:
    """Views of a flat tensor in the given shapes, in order; together they cover it exactly.

    >>> unpack(torch.arange(3), [(1, 2), ()])
    [tensor([[0, 1]]), tensor(2)]
    """
    sizes = [torch.Size(shape) for shape in shapes]
    pieces = flat.split([size.numel() for size in sizes])
    return [piece.view(size) for piece, size in zip(pieces, sizes, strict=True)]
