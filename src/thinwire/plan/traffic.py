"""The collectives of a program on a model, traced by running the program on meta tensors.

All ranks yield the same collectives, so rank 0 alone is traced, and each collective returns a tensor of the
right shape. This takes milliseconds and no memory, where `simulate` would need all ranks.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from thinwire.engine.ops import AllGather, AllReduce, Broadcast, Collective, Reduce
from thinwire.engine.simulate import rehearse
from thinwire.plan.network import Transfer
from thinwire.programs.allreduce import Exact
from thinwire.programs.description import describe
from thinwire.programs.memory import Memory
from thinwire.programs.program import Bucket, Program, Programs
from thinwire.programs.rules import exceptions_of
from thinwire.step.buckets import BucketPart, parts_of

FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20
"""DDP's default sizes of the first bucket and of the others."""
_FEW = 8
"""Up to this number of ranks a program is traced, even if it has an outline."""
_META = torch.device("meta")

Shapes = Mapping[str, torch.Size]
"""The shapes of parameters by name, in the order in which backward computes their gradients."""


@dataclass(frozen=True)
class Layout:
    """Gradients that one program averages together, without names, so that equal layers share a layout.

    Attributes:
        text: The program with all its options, by which layouts are compared.
        shapes: The shapes of the parameters.
        exact: The indices of the parameters whose mean must be exact.
        program: The program.
    """

    text: str
    shapes: tuple[torch.Size, ...]
    exact: tuple[int, ...]
    program: Program = field(compare=False)

    @classmethod
    def of(cls, program: Program, names: Sequence[str], shapes: Shapes, exact: Collection[str]) -> "Layout":
        """Return the layout of some parameters."""
        places = tuple(place for place, name in enumerate(names) if name in exact)
        return cls(describe(program), tuple(shapes[name] for name in names), places, program)

    @property
    def numbers(self) -> int:
        """The count of numbers."""
        return sum(shape.numel() for shape in self.shapes)

    def bucket(self, buffer: torch.Tensor, world_size: int, step: int) -> Bucket:
        """Return a bucket of rank 0 with this layout."""
        names = tuple(str(place) for place in range(len(self.shapes)))
        exact = frozenset(names[place] for place in self.exact)
        return Bucket(0, buffer, names, self.shapes, 0, world_size, step, exact=exact)


@dataclass(frozen=True)
class Traffic:
    """The collectives and memory of a program, for one layout and number of ranks.

    Attributes:
        transfers: Its collectives.
        kept: Bytes that it keeps between steps.
        in_flight: Bytes of the collectives' tensors, sent and received.
    """

    transfers: tuple[Transfer, ...]
    kept: int
    in_flight: int


@dataclass(frozen=True)
class Handed:
    """A layout in the order in which DDP hands gradients over.

    Attributes:
        layout: The layout.
        parameters: The number of gradients that are computed when it is handed over.
    """

    layout: Layout
    parameters: int


def buckets_of(shapes: Shapes, bucket_mb: float | None, itemsize: int = 4) -> list[tuple[str, ...]]:
    """Return the parameters of DDP's buckets, as after its first backward.

    Args:
        shapes: The shapes in the order of gradients.
        bucket_mb: `bucket_cap_mb` of DDP. None for its default, with a small first bucket.
        itemsize: Bytes of a number.

    >>> sizes = {"a": torch.Size((1 << 18,)), "b": torch.Size((1 << 10,)), "c": torch.Size((1 << 20,))}
    >>> buckets_of(sizes, None)
    [('a',), ('b', 'c')]
    """
    most = BUCKET if bucket_mb is None else int(bucket_mb * (1 << 20))
    limit = min(FIRST_BUCKET, most) if bucket_mb is None else most
    buckets: list[tuple[str, ...]] = []
    names: list[str] = []
    size = 0
    for name, shape in shapes.items():
        names.append(name)
        size += itemsize * shape.numel()
        # DDP closes a bucket with the parameter that reaches the limit, so buckets exceed it.
        if size >= limit:
            buckets.append(tuple(names))
            names, size, limit = [], 0, most
    return [*buckets, tuple(names)] if names else buckets


def handed_over(
    program: Program,
    shapes: Shapes,
    bucket_mb: float | None = None,
    itemsize: int = 4,
    *,
    sliced: bool = True,
) -> list[Handed]:
    """Return the parts that `attach` exchanges of DDP's buckets, in the order in which programs start.

    Args:
        program: The program. Vectors are exact if it declares so.
        shapes: The shapes in the order of gradients.
        bucket_mb: As for `buckets_of`.
        itemsize: Bytes of a number.
        sliced: Whether buckets are divided into slices, as on a CPU.
    """
    exceptions = exceptions_of((), program, shapes)
    exact = frozenset(name for name, chosen in exceptions.items() if isinstance(chosen, Exact))
    programs = Programs(program, exceptions, exact, sliced)
    nbytes = {name: itemsize * shape.numel() for name, shape in shapes.items()}
    found: list[Handed] = []
    deferred: list[str] = []
    computed = 0
    for names in buckets_of(shapes, bucket_mb, itemsize):
        computed += len(names)
        for part in parts_of(names, nbytes, programs):
            if part.deferred:
                deferred += part.names
            else:
                pieces = part.sliced(nbytes) if sliced else [part]
                found += [Handed(_layout(piece, shapes), computed) for piece in pieces]
    # Exact vectors wait for the end of the step, and share one all-reduce.
    if deferred:
        found.append(Handed(_layout(BucketPart(Exact(), tuple(deferred)), shapes), computed))
    return found


def plain_buckets(shapes: Shapes, bucket_mb: float | None = None, itemsize: int = 4) -> list[Handed]:
    """Return the buckets of plain DDP, which are all-reduced whole."""
    found: list[Handed] = []
    computed = 0
    for names in buckets_of(shapes, bucket_mb, itemsize):
        computed += len(names)
        found.append(Handed(_layout(BucketPart(Exact(), names), shapes), computed))
    return found


def _layout(part: BucketPart, shapes: Shapes) -> Layout:
    return Layout.of(part.program, part.averaged, shapes, part.exact)


@lru_cache(maxsize=4096)
def traffic(layout: Layout, ranks: int, step: int, dtype: torch.dtype = torch.float32) -> Traffic:
    """Return the collectives of a layout, traced by running its program on meta tensors.

    Args:
        layout: The gradients and their program.
        ranks: The number of ranks.
        step: The step, for programs with a warm-up.
        dtype: The type of gradients.
    """
    memory = Memory()
    bucket = layout.bucket(torch.empty(layout.numbers, dtype=dtype, device=_META), ranks, step)
    with torch.no_grad():
        ops = list(_collectives(layout.program, bucket, memory))
    if ranks > _FEW and not memory.state_dict():
        kept = traffic(layout, 2, step, dtype).kept  # an outline does not write to memory
    else:
        kept = sum(tensor.nbytes for slots in memory.state_dict().values() for tensor in slots.values())
    transfers = tuple(_transfer(op, ranks) for op in ops if op.place(0, ranks)[1] > 1)
    return Traffic(transfers, kept, sum(op.nbytes + _received(op, ranks) for op in ops))


def _collectives(program: Program, bucket: Bucket, memory: Memory) -> Iterator[Collective]:
    """Yield a program's collectives, from its outline where tracing time grows with the ranks."""
    outline = program.outline(bucket) if bucket.world_size > _FEW else None
    yield from outline or rehearse(program(bucket, memory), bucket.rank, bucket.world_size)


def _received(op: Collective, ranks: int) -> int:
    """Return the bytes of a collective's result, or 0 if it works in place."""
    if isinstance(op, AllGather):
        return op.nbytes * op.place(0, ranks)[1]
    return 0 if isinstance(op, AllReduce | Reduce | Broadcast) else op.nbytes


def _transfer(op: Collective, ranks: int) -> Transfer:
    place, count = op.place(0, ranks)
    local = op.ranks is not None and list(op.ranks) == list(range(op.ranks[0], op.ranks[-1] + 1))
    sent, width = op.bytes_sent(place, count), op.tensor.element_size()
    return Transfer(type(op).__name__, sent, count, local and count < ranks, width)
