"""Programs that run another program among some of the ranks: one of each node, or a group."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch.nn import functional

from thinwire.codecs.checks import is_whole
from thinwire.engine.ops import AllGather, Collectives, ReduceScatter, among
from thinwire.engine.pack import unpack
from thinwire.errors import OptionError
from thinwire.programs.memory import Memory
from thinwire.programs.program import Bucket, Outcome, Program
from thinwire.programs.wrapper import Wrapper

_SCOPE = re.compile(r"slice (\d+) of (\d+): ")
"""The scope of a slice's state in the memory of programs."""
_ROWS_WORTH_KEEPING = 8
"""The least number of rows per rank for which padding to whole rows is cheap, so a matrix keeps its shape."""


@dataclass(frozen=True, repr=False)
class AcrossNodes(Wrapper):
    """An exact average within each node, where links are fast, and `program` between nodes.

        each rank of a node receives the node's mean of its share of every parameter    reduce-scatter
        ranks that hold the same share run the program, each with its peers on the other nodes
        every rank of the node receives the other shares                               all-gather

    A node sends as many bytes to other nodes as a single rank would, and its ranks divide the work. A share
    is a slice of a parameter's rows, so state belongs to parameters and survives a rebuild of buckets. Each
    rank keeps the state of its own share. On a single node nothing is compressed.

    Args:
        program: Program that runs between nodes.
        node_size: Ranks per node. Consecutive ranks form a node. None takes LOCAL_WORLD_SIZE, which torchrun
            sets.

    Raises:
        OptionError: `program` is not a program, or `node_size` is not a whole number of at least 1. `attach`
            raises it if `node_size` does not divide the number of ranks.

    Example::

        wire = thinwire.attach(ddp, thinwire.AcrossNodes(thinwire.Int8()))
    """

    node_size: int | None = None

    # The program's error and residuals are those of a slice of the node's mean, not of this rank's gradients.
    tracks_error = False
    folds_residuals = False
    takes_sparse = False

    def __post_init__(self) -> None:
        super().__post_init__()
        size: object = self.node_size
        if size is None:
            text = os.environ.get("LOCAL_WORLD_SIZE", "")
            size = int(text) if text.isdecimal() else None
        if not is_whole(size) or size < 1:
            raise OptionError(
                f"node_size={self.node_size!r} must be a whole number of ranks, at least 1"
                + (
                    ": LOCAL_WORLD_SIZE, which torchrun sets, is not in the environment; pass node_size="
                    if size is None
                    else ""
                )
            )
        object.__setattr__(self, "node_size", size)

    def feeds_back(self, shape: torch.Size) -> bool:
        """Return False: the program reads residuals of slices, in a scope of the memory."""
        return False

    def check(self, shapes: Mapping[str, torch.Size], world_size: int) -> None:
        """Raise OptionError unless `node_size` divides the number of ranks, and the program fits the nodes.

        Raises:
            OptionError: The last node would have fewer ranks than the others, or the program cannot run
                between the nodes.
        """
        self._check_nodes(world_size)
        # Rules are about whole parameters, and only one rank of each node runs the program with the others.
        self.program.check(shapes, world_size // (self.node_size or 1))

    def __call__(self, bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
        """Reduce-scatter within the node, run the program between nodes, and all-gather within the node."""
        self._check_nodes(bucket.world_size)  # a program may also run without `attach`
        size, node, place, neighbours, peers = self._place(bucket.rank, bucket.world_size)

        # Each rank receives its slice of the node's mean. Numbers are divided first, so that the sum cannot
        # overflow before the mean does.
        shares = Shares(bucket, size)
        own = yield ReduceScatter(shares.split(bucket.buffer.mul_(1 / size)), ranks=neighbours)
        # Ranks with the same place on their nodes average their slices by the program. All slices have one
        # padded shape, so that all ranks yield the same collectives. State is kept per slice.
        part = replace(
            bucket,
            buffer=own,
            shapes=shares.shapes,
            whole_shapes=bucket.whole_shapes or bucket.shapes,
            rank=node,
            world_size=len(peers),
        )
        outcome = yield from among(peers, self.program(part, memory.scoped(f"slice {place} of {size}")))
        # Each rank receives the other slices of the mean from its node. An overflow in any slice reaches all.
        rows = yield AllGather(outcome.mean, ranks=neighbours)
        mean = shares.join(rows, bucket.buffer)
        return Outcome(mean)

    def subgroups(self, rank: int, world_size: int) -> tuple[tuple[int, ...], ...]:
        """Return this rank's node, its peers on the other nodes, and the program's groups among these."""
        _, node, _, neighbours, peers = self._place(rank, world_size)
        return tuple(dict.fromkeys((neighbours, peers, *_within(peers, self.program, node))))

    def _place(self, rank: int, world_size: int) -> tuple[int, int, int, tuple[int, ...], tuple[int, ...]]:
        """Return the node's size, its number, the rank's place on it, its ranks, and that place's on all."""
        size = self.node_size
        assert size is not None, "set in __post_init__"
        node, place = divmod(rank, size)
        neighbours = tuple(range(node * size, (node + 1) * size))
        return size, node, place, neighbours, tuple(range(place, world_size, size))

    def _check_nodes(self, world_size: int) -> None:
        if world_size % (self.node_size or 1):
            raise OptionError(
                f"node_size={self.node_size} does not divide the {world_size} ranks: all nodes must have"
                " the same number of ranks"
            )


@dataclass(frozen=True, repr=False)
class Within(Wrapper):
    """A program that runs `program` among some ranks, this one included."""

    ranks: tuple[int, ...]

    def __call__(self, bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
        """Run the program with these ranks as the whole world."""
        inner = replace(bucket, rank=self.ranks.index(bucket.rank), world_size=len(self.ranks))
        return (yield from among(self.ranks, self.program(inner, memory)))

    def subgroups(self, rank: int, world_size: int) -> tuple[tuple[int, ...], ...]:
        """Return the ranks, and the groups that the program makes among them."""
        return tuple(dict.fromkeys((self.ranks, *_within(self.ranks, self.program, self.ranks.index(rank)))))


def _within(ranks: tuple[int, ...], program: Program, rank: int) -> Iterator[tuple[int, ...]]:
    """Yield the groups that a program makes among some ranks, numbered as these are."""
    for group in program.subgroups(rank, len(ranks)):
        yield tuple(ranks[member] for member in group)


class Shares:
    """The parameters of a bucket in equal slices, one per rank of a node, padded with zeros.

    A slice consists of whole rows if that needs little padding, so that matrices stay matrices. Otherwise the
    parameter is flattened first.
    """

    def __init__(self, bucket: Bucket, count: int) -> None:
        self._count = count
        self._views = [_as_rows(shape, count) for shape in bucket.shapes]
        self.shapes = tuple(_share(shape, count) for shape in bucket.shapes)

    def split(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return a matrix with one row per rank, which holds the slices of that rank."""
        padded = []
        for view, shape, share in zip(unpack(buffer, self._views), self._views, self.shapes, strict=True):
            missing = share[0] * self._count - shape[0]
            full = functional.pad(view, (0, 0) * (len(shape) - 1) + (0, missing)) if missing else view
            padded.append(full.reshape(self._count, -1))
        return torch.cat(padded, dim=1)

    def join(self, rows: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        """Write the slices of all ranks back to parameters in `into`, and return it."""
        widths = [share.numel() for share in self.shapes]
        for slices, view in zip(rows.split(widths, dim=1), unpack(into, self._views), strict=True):
            view.view(-1).copy_(slices.reshape(-1)[: view.numel()])
        return into


class SliceState(NamedTuple):
    """The numbers of a parameter that a slot of state belongs to.

    Attributes:
        key: The slot without the scope of the slice, such as "residual".
        start: The position of the slice's first number in the flat parameter.
        weight: The number of ranks whose mean the state belongs to. This rank's own gradient has a weight of
            1 / `weight` in it.
    """

    key: str
    start: int
    weight: int


def slice_state(slot: str, shape: torch.Size) -> SliceState:
    """Return the numbers of a parameter that a slot belongs to, with or without the scope of a slice.

    Args:
        slot: The slot with its scope, as `AcrossNodes` makes it.
        shape: The shape of the parameter.

    >>> slice_state("slice 1 of 2: residual", torch.Size((6,)))
    SliceState(key='residual', start=3, weight=2)
    """
    start, weight = 0, 1
    while (scope := _SCOPE.match(slot)) is not None:
        place, count = int(scope[1]), int(scope[2])
        shape = _share(shape, count)
        start, weight, slot = start + place * shape.numel(), weight * count, slot[scope.end() :]
    return SliceState(slot, start, weight)


def _share(shape: torch.Size, count: int) -> torch.Size:
    """Return the shape of a parameter's slice for one of `count` ranks."""
    rows = _as_rows(shape, count)
    return torch.Size((-(-rows[0] // count), *rows[1:]))


def _as_rows(shape: torch.Size, count: int) -> torch.Size:
    """Return the shape whose first dimension is sliced, either the parameter's own or a flat one."""
    worth = len(shape) > 1 and (shape[0] % count == 0 or shape[0] >= _ROWS_WORTH_KEEPING * count)
    return shape if worth else torch.Size((shape.numel(),))
