"""Exact within a node, where links are fast; compressed between nodes, where they are slow."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch.nn import functional

from thinwire.errors import OptionError
from thinwire.programs.memory import Memory
from thinwire.programs.program import Bucket, Outcome, Program, require_program
from thinwire.wire.ops import AllGather, ReduceScatter, Steps, among
from thinwire.wire.pack import unpack

_ROWS_WORTH_KEEPING = 8


@dataclass(frozen=True)
class AcrossNodes:
    """Averages exactly within each node, and runs `program` between nodes.

        each rank of a node receives the node's mean of its share of every parameter    reduce-scatter
        ranks that hold the same share run the program, each with its peers on the other nodes
        every rank of the node receives the other shares                               all-gather

    What a node sends to others is what one rank would send on its own, and its ranks share the work. A share
    is a slice of a parameter's rows, so state belongs to parameters, however buckets are laid out; a rank
    keeps that of its own share.

    Args:
        program: What runs between the nodes.
        node_size: Ranks in a node, consecutive ones. None: what torchrun says, LOCAL_WORLD_SIZE.

    Example::

        wire = thinwire.attach(ddp, thinwire.AcrossNodes(thinwire.Int8()))
    """

    program: Program
    node_size: int | None = None

    tracks_error: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_program(self.program)
        size: object = self.node_size
        if size is None:
            text = os.environ.get("LOCAL_WORLD_SIZE", "")
            size = int(text) if text.isdecimal() else None
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise OptionError(
                f"node_size={self.node_size!r} must be a whole number of ranks, at least 1"
                + (
                    ": LOCAL_WORLD_SIZE, which torchrun sets, is not there to take it from"
                    if size is None
                    else ""
                )
            )
        object.__setattr__(self, "node_size", size)

    def check(self, shapes: Mapping[str, torch.Size], world_size: int) -> None:
        """Refuse groups that are no whole number of nodes."""
        if world_size % (self.node_size or 1):
            raise OptionError(
                f"node_size={self.node_size} does not divide the {world_size} ranks: nodes are of one size"
            )

    def __call__(self, bucket: Bucket, memory: Memory) -> Steps[Outcome]:
        """Reduce-scatter in the node, the program between nodes, all-gather in the node."""
        size = self.node_size
        assert size is not None, "set in __post_init__"
        self.check({}, bucket.world_size)
        node, place = divmod(bucket.rank, size)
        neighbours = tuple(range(node * size, (node + 1) * size))
        peers = tuple(range(place, bucket.world_size, size))

        shares = Shares(bucket, size)
        own = yield ReduceScatter(shares.split(bucket.buffer.mul_(1 / size)), ranks=neighbours)
        part = replace(
            bucket,
            buffer=own,
            shapes=shares.shapes,
            rank=node,
            world_size=len(peers),
        )
        outcome = yield from among(peers, self.program(part, memory.scoped(f"slice {place} of {size}")))
        rows = yield AllGather(outcome.mean, ranks=neighbours)
        mean = shares.join(rows, bucket.buffer)
        return Outcome(mean)


class Shares:
    """Every parameter of a bucket in as many slices as a node has ranks, all alike, padded with zeros.

    Slices of rows where that pads little, so that matrices stay matrices; otherwise of single numbers.
    """

    def __init__(self, bucket: Bucket, count: int) -> None:
        self._count = count
        self._whole = bucket.shapes
        self._views = [_as_rows(shape, count) for shape in bucket.shapes]
        self.shapes = tuple(torch.Size((-(-shape[0] // count), *shape[1:])) for shape in self._views)

    def split(self, buffer: torch.Tensor) -> torch.Tensor:
        """A row for every rank: its slices, one after another."""
        padded = []
        for view, shape, share in zip(unpack(buffer, self._views), self._views, self.shapes, strict=True):
            missing = share[0] * self._count - shape[0]
            full = functional.pad(view, (0, 0) * (len(shape) - 1) + (0, missing)) if missing else view
            padded.append(full.reshape(self._count, -1))
        return torch.cat(padded, dim=1)

    def join(self, rows: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        """The parameters again, from all ranks' slices."""
        widths = [share.numel() for share in self.shapes]
        for slices, view in zip(rows.split(widths, dim=1), unpack(into, self._views), strict=True):
            view.view(-1).copy_(slices.reshape(-1)[: view.numel()])
        return into


def _as_rows(shape: torch.Size, count: int) -> torch.Size:
    """The shape whose first dimension is sliced: the parameter's own, or flat."""
    worth = len(shape) > 1 and (shape[0] % count == 0 or shape[0] >= _ROWS_WORTH_KEEPING * count)
    return shape if worth else torch.Size((shape.numel(),))
