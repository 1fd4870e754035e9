"""The reduce-scatter of encoded numbers, as ZeRO and FSDP exchange gradients.

    each rank    encodes its numbers of every other rank's share, and sends them to that rank, the owner
    each owner   decodes what it received, in the order of ranks, and adds it to its own numbers

An owner's numbers of its own share are not sent, so they are not rounded.
"""

from collections.abc import Callable, Sequence

import torch

from thinwire.codecs.codec import Codec, Parts, numbers_of
from thinwire.engine.ops import AllToAll, Collectives, Exchange
from thinwire.engine.pack import Layout
from thinwire.programs.coder import CoderInput
from thinwire.programs.coding import coder_of


class Rows:
    """The rows of bytes that ranks exchange, one for each owner's share.

    Owners receive exactly the bytes of their shares, which may differ much.

    Args:
        layouts: The layout of each owner's row.
    """

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self._layouts = layouts
        self.lengths = [layout.nbytes for layout in layouts]
        """The bytes of each owner's row."""

    def empty(self, count: int) -> torch.Tensor:
        """Return uninitialised memory. Padding is sent but never read."""
        return torch.empty(count, dtype=torch.uint8, device=self._layouts[0].device)

    def read(self, row: torch.Tensor, owner: int) -> Parts:
        """Return the parts of an owner's row, as views of it."""
        return self._layouts[owner].read(row)


def to_owners(rows: Rows, rank: int, write: Callable[[int, Parts], None]) -> Collectives[dict[int, Parts]]:
    """Send every other owner its row, and return the rows of this rank's own share.

    Args:
        rows: The form of the rows.
        rank: This rank.
        write: A function that encodes this rank's numbers of an owner's share into the parts of its row.

    Returns:
        The parts that the other ranks sent, by sender, in the order of ranks.
    """
    lengths = rows.lengths
    others = [owner for owner in range(len(lengths)) if owner != rank]
    own = lengths[rank]
    # Rows of one length are a plain all-to-all. This rank's own row has a place in it that is neither written
    # nor read. Rows that differ need an exchange of given lengths, in which its own is empty.
    if min(lengths) == max(lengths):
        sent = rows.empty(len(lengths) * own).view(len(lengths), own)
        by_owner = list(sent)
    else:
        sends = [0 if owner == rank else length for owner, length in enumerate(lengths)]
        sent = rows.empty(sum(sends))
        by_owner = list(sent.split(sends))
    for owner in others:
        if lengths[owner]:
            write(owner, rows.read(by_owner[owner], owner))
    if sent.dim() == 2:
        received = yield AllToAll(sent)
        by_sender = received.unbind()
    else:
        receives = [0 if sender == rank else own for sender in range(len(lengths))]
        received = yield Exchange(sent, sends=tuple(sends), receives=tuple(receives))
        by_sender = received.split(receives)
    return {sender: rows.read(by_sender[sender], rank) for sender in others}


def reduce_scatter(
    codecs: Sequence[Codec], rank: int, pieces: Sequence[torch.Tensor], *, track_error: bool = False
) -> Collectives[torch.Tensor]:
    """Return the sum over ranks of this rank's own piece.

    Args:
        codecs: The codec of each rank. They differ by their seeds alone.
        rank: This rank.
        pieces: This rank's numbers of each owner's share, in a flat tensor each.
        track_error: Whether to replace the other owners' pieces by the errors of their encodings.

    Returns:
        The sum, in at least float32.

    >>> from thinwire.codecs.cast import Cast
    >>> from thinwire.engine.simulate import simulate
    >>> codecs, pieces = [Cast(torch.bfloat16)] * 2, [[torch.tensor([1.0]), torch.tensor([2.0, 3.0])]] * 2
    >>> simulate([[reduce_scatter(codecs, rank, pieces[rank])] for rank in range(2)]).results
    [[tensor([2.])], [tensor([4., 6.])]]
    """
    numbers = [numbers_of(piece) for piece in pieces]
    lengths, device = [piece.numel() for piece in numbers], pieces[rank].device
    coders = [coder_of(codecs[rank], length) for length in lengths]
    layouts = [
        coder.layout((length,), device) if length else Layout((), (), device)
        for coder, length in zip(coders, lengths, strict=True)
    ]

    def write(owner: int, parts: Parts) -> None:
        own = [numbers[owner]]
        coders[owner].encode(CoderInput(own), own if track_error else None, parts)

    received = yield from to_owners(Rows(layouts), rank, write)
    total = pieces[rank].to(torch.promote_types(pieces[rank].dtype, torch.float32), copy=True)
    for sender, parts in received.items() if lengths[rank] else ():
        codecs[sender].add(parts, total)
    return total
