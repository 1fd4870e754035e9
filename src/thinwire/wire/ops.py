"""The collectives a program may yield.

Each is a frozen description; the engine hands its tensors to torch.distributed and sends the result back
into the program. Sums are plain sums: divide by the world size yourself, and where it is safest.

With `ranks=` a collective is among those ranks only; W is their number, and `dst`, `src` and rows count
within them. All ranks take the same turn, each with a collective among ranks that it belongs to.

| yield              | every rank receives                                  | bytes sent by a rank      |
|--------------------|------------------------------------------------------|---------------------------|
| `AllReduce(t)`     | the sum, in `t` itself                               | 2 (W-1)/W of `t`          |
| `AllGather(t)`     | all ranks' `t`, stacked: shape `(W, *t.shape)`       | (W-1) times `t`           |
| `AllToAll(t)`      | row `r` of rank `s`'s `t` as row `s`, on rank `r`    | (W-1)/W of `t`            |
| `Exchange(t, ...)` | as `AllToAll`, of pieces that differ in length       | all but its own piece     |
| `ReduceScatter(t)` | the sum over ranks of row `rank` of `t`              | (W-1)/W of `t`            |
| `Reduce(t, dst)`   | `t`; on rank `dst` it holds the sum, else undefined  | `t` (dst: (W-1)/W of it)  |
| `Broadcast(t, src)`| rank `src`'s `t`, in `t` itself                      | `t` per child in the tree |
| `Await(future)`    | the future's value; no communication of ours         | 0                         |
"""

from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

import torch

from thinwire.errors import ProgramError


@dataclass(frozen=True, eq=False)
class Collective(ABC):
    """What all collectives have: one contiguous tensor, and the ranks it is among (None: all)."""

    tensor: torch.Tensor
    ranks: tuple[int, ...] | None = field(default=None, kw_only=True)

    def __str__(self) -> str:
        shape = "x".join(map(str, self.tensor.shape)) or "scalar"
        among = "" if self.ranks is None else f" among ranks {', '.join(map(str, self.ranks))}"
        return f"{type(self).__name__} of {shape} {str(self.tensor.dtype).removeprefix('torch.')}{among}"

    def place(self, rank: int, size: int) -> tuple[int, int]:
        """A rank of the whole group as a rank among those that take part, and their number."""
        ranks = range(size) if self.ranks is None else self.ranks
        if rank not in ranks or list(ranks) != sorted({*ranks} & {*range(size)}):
            raise ProgramError(
                f"rank {rank} issues {self}: ranks must be rising numbers from 0 to {size - 1}, this rank"
                " among them"
            )
        return ranks.index(rank), len(ranks)

    @property
    def nbytes(self) -> int:
        """Size of the tensor handed in."""
        return self.tensor.numel() * self.tensor.element_size()

    @abstractmethod
    def bytes_sent(self, rank: int, size: int) -> int:
        """Bytes that this rank puts on the network for it, headers aside."""

    def check(self, size: int) -> None:
        """Refuse what no backend could carry, before any rank has sent a byte."""
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
    """Row `r` goes to rank `r`; the rows received are stacked by sender."""


@dataclass(frozen=True, eq=False)
class Exchange(Collective):
    """The next `sends[r]` numbers of a flat tensor go to rank `r`; pieces received stand in order of senders.

    Every rank knows what it gets: `receives[s]` numbers from rank `s`.
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
                f"{self} sends {self.sends} and receives {self.receives}: give one number per rank, {size}"
                f" here, and a flat tensor of all that is sent, not one of shape {tuple(self.tensor.shape)}"
            )


class ReduceScatter(_InRows):
    """Each rank receives the sum of its own row."""


@dataclass(frozen=True, eq=False)
class Reduce(Collective):
    """Sum over all ranks, in place on rank `dst` only; elsewhere the tensor is scratch afterwards."""

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
    """Waits for a future that somebody else completes, without holding up the static order.

    The future must not depend on a later collective of this engine.
    """

    future: "torch.futures.Future[Any]"

    def __str__(self) -> str:
        return "a future"


Result = TypeVar("Result")
Steps: TypeAlias = Generator[Collective | Await, Any, Result]
"""A program under way: yields collectives, receives what they deliver, returns its result."""


def among(ranks: tuple[int, ...], steps: Steps[Result]) -> Steps[Result]:
    """A program's collectives, each among these ranks only: what it takes for rank `i` is `ranks[i]`."""
    received = None
    while True:
        try:
            op = steps.send(received)
        except StopIteration as stop:
            result: Result = stop.value
            return result
        if isinstance(op, Collective):
            op = replace(op, ranks=tuple(ranks[rank] for rank in op.ranks or range(len(ranks))))
        received = yield op


def _check_rank(name: str, value: int, size: int) -> None:
    if not 0 <= value < size:
        raise ProgramError(f"{name}={value} is not a rank of this group: it has 0 to {size - 1}")
