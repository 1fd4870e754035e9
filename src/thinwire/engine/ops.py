"""The collectives a program may yield.

Each is a frozen description. The engine hands its tensor to torch.distributed and sends the result back into
the program. Sums are plain sums: divide by the world size yourself, where it is safest.

With `ranks=` a collective is among those ranks only. W is then their number, and `dst`, `src` and rows are
places among them. All ranks take the same turn, each with a collective among ranks that it belongs to.

| yield              | every rank receives                                  | bytes sent by a rank      |
|--------------------|------------------------------------------------------|---------------------------|
| `AllReduce(t)`     | the sum, in `t` itself                               | 2 (W-1)/W of `t`          |
| `AllGather(t)`     | all ranks' `t`, stacked: shape `(W, *t.shape)`       | (W-1) times `t`           |
| `AllToAll(t)`      | row `r` of rank `s`'s `t` as row `s`, on rank `r`    | (W-1)/W of `t`            |
| `Exchange(t, ...)` | as `AllToAll`, of pieces that differ in length       | all but its own piece     |
| `ReduceScatter(t)` | the sum over ranks of row `rank` of `t`              | (W-1)/W of `t`            |
| `Reduce(t, dst)`   | `t`; on rank `dst` it holds the sum, else undefined  | `t` (dst: (W-1)/W of it)  |
| `Broadcast(t, src)`| rank `src`'s `t`, in `t` itself                      | `t` per child in the tree |
| `Await(future)`    | the future's value; thinwire sends nothing           | 0                         |
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

import torch

from thinwire.errors import ProgramError


@dataclass(frozen=True, eq=False)
class Collective(ABC):
    """The base of all collectives: one contiguous tensor, and the ranks that take part (None: all).

    Attributes:
        tensor: This rank's contribution.
        ranks: The ranks that take part. None for all.
        in_order: Whether the program resumes only in its turn of the static order. If False, the engine may
            resume it as soon as the result is available, before or after the programs of other buckets, and
            in a different order on each rank. Only a program that shares no state between buckets may set
            False.
    """

    tensor: torch.Tensor
    ranks: tuple[int, ...] | None = field(default=None, kw_only=True)
    in_order: bool = field(default=True, kw_only=True)

    def __str__(self) -> str:
        shape = "x".join(map(str, self.tensor.shape)) or "scalar"
        among = "" if self.ranks is None else f" among ranks {', '.join(map(str, self.ranks))}"
        return f"{type(self).__name__} of {shape} {str(self.tensor.dtype).removeprefix('torch.')}{among}"

    def place(self, rank: int, size: int) -> tuple[int, int]:
        """Return a rank's place among the ranks that take part, and their number.

        Args:
            rank: A rank of the whole group.
            size: The number of ranks of the whole group.

        Raises:
            ProgramError: `ranks` is not a rising list of the group's ranks that contains `rank`.
        """
        ranks = range(size) if self.ranks is None else self.ranks
        if rank not in ranks or list(ranks) != sorted({*ranks} & {*range(size)}):
            raise ProgramError(
                f"rank {rank} issues {self}: ranks must be ascending numbers from 0 to {size - 1}, including"
                " this rank"
            )
        return ranks.index(rank), len(ranks)

    @property
    def nbytes(self) -> int:
        """The size of the tensor in bytes."""
        return self.tensor.numel() * self.tensor.element_size()

    @abstractmethod
    def bytes_sent(self, rank: int, size: int) -> int:
        """Return the bytes that a rank puts on the network, without headers.

        Args:
            rank: The rank's place among the ranks that take part.
            size: Their number.
        """

    def check(self, size: int) -> None:
        """Validate the collective before any rank sends a byte.

        Args:
            size: The number of ranks that take part.

        Raises:
            ProgramError: No backend could run it.
        """
        if not self.tensor.is_contiguous():
            raise ProgramError(
                f"{self} has strides {self.tensor.stride()}: collectives take contiguous tensors;"
                " yield t.contiguous()"
            )


class _InRows(Collective):
    """A collective whose tensor has one row per rank."""

    def bytes_sent(self, rank: int, size: int) -> int:
        return self.nbytes * (size - 1) // size

    def check(self, size: int) -> None:
        super().check(size)
        if self.tensor.dim() == 0 or self.tensor.shape[0] != size:
            raise ProgramError(
                f"{self} must have one row per rank, {size} here:"
                " reshape it to (world_size, ...), padding if needed"
            )


class AllReduce(Collective):
    """Sum over all ranks, in place."""

    def bytes_sent(self, rank: int, size: int) -> int:
        return 2 * self.nbytes * (size - 1) // size


class AllGather(Collective):
    """Every rank's tensor, stacked along a new first dimension."""

    def bytes_sent(self, rank: int, size: int) -> int:
        return self.nbytes * (size - 1)


class AllToAll(_InRows):
    """Row `r` sent to rank `r`, and the rows received stacked by sender."""


@dataclass(frozen=True, eq=False)
class Exchange(Collective):
    """An all-to-all of pieces of a flat tensor, which may differ in length.

    Rank `r` gets the next `sends[r]` numbers. The pieces received are joined in the order of their senders,
    with `receives[s]` numbers from rank `s`.
    """

    sends: tuple[int, ...]
    receives: tuple[int, ...]

    def __str__(self) -> str:
        among = "" if self.ranks is None else f" among ranks {', '.join(map(str, self.ranks))}"
        return f"Exchange of {str(self.tensor.dtype).removeprefix('torch.')}{among}"

    def bytes_sent(self, rank: int, size: int) -> int:
        return (sum(self.sends) - self.sends[rank]) * self.tensor.element_size()

    def check(self, size: int) -> None:
        super().check(size)
        flat = self.tensor.dim() == 1 and self.tensor.numel() == sum(self.sends)
        if not flat or len(self.sends) != size or len(self.receives) != size:
            raise ProgramError(
                f"{self} sends {self.sends} and receives {self.receives}: pass one number per rank, {size}"
                f" here, and a flat tensor with all pieces, not one of shape {tuple(self.tensor.shape)}"
            )


class ReduceScatter(_InRows):
    """Sum over all ranks, of which each rank receives its own row."""


@dataclass(frozen=True, eq=False)
class Reduce(Collective):
    """Sum over all ranks, in place on rank `dst` only. Elsewhere the tensor is undefined afterwards."""

    dst: int

    def bytes_sent(self, rank: int, size: int) -> int:
        return self.nbytes * (size - 1) // size if rank == self.dst else self.nbytes

    def check(self, size: int) -> None:
        super().check(size)
        _check_rank("dst", self.dst, size)


@dataclass(frozen=True, eq=False)
class Broadcast(Collective):
    """Rank `src`'s tensor, in place on every rank."""

    src: int

    def bytes_sent(self, rank: int, size: int) -> int:
        # Gloo sends down a binomial tree rooted at `src`: a rank forwards once per child.
        place = (rank - self.src) % size
        reaches = [1 << bit for bit in range((size - 1).bit_length())]
        children = sum(place % (2 * reach) == 0 and place + reach < size for reach in reaches)
        return self.nbytes * children

    def check(self, size: int) -> None:
        super().check(size)
        _check_rank("src", self.src, size)


@dataclass(frozen=True, eq=False)
class Await:
    """A wait for a future that is completed outside the engine.

    It takes a turn in the static order like a collective. The future must not depend on a later collective of
    this engine.
    """

    future: "torch.futures.Future[Any]"

    def __str__(self) -> str:
        return "a future"


Result = TypeVar("Result")
Collectives: TypeAlias = Generator[Collective | Await, Any, Result]
"""A running program, which yields collectives, receives their results, and returns its own."""


def among(ranks: tuple[int, ...], steps: Collectives[Result]) -> Collectives[Result]:
    """Run a program among some of the ranks only.

    Args:
        ranks: The ranks that take part. The program's rank `i` is `ranks[i]`.
        steps: The program, written for a group of `len(ranks)` ranks.

    Returns:
        A program that yields the same collectives with `ranks=`, and returns the same result.
    """

    def narrowed(op: Collective) -> Collective:
        return replace(op, ranks=tuple(ranks[rank] for rank in op.ranks or range(len(ranks))))

    return mapped(steps, narrowed)


def mapped(steps: Collectives[Result], change: Callable[[Collective], Collective]) -> Collectives[Result]:
    """Run a program with `change(op)` in place of each of its collectives."""
    received = None
    while True:
        try:
            op = steps.send(received)
        except StopIteration as stop:
            result: Result = stop.value
            return result
        received = yield change(op) if isinstance(op, Collective) else op


def _check_rank(name: str, value: int, size: int) -> None:
    if not 0 <= value < size:
        raise ProgramError(f"{name}={value} is not a rank of this group: it has 0 to {size - 1}")
