"""Simulation of N ranks' programs in one process, without a network.

It runs the same generators in the same order, with exact sums. It is for tests and research: a new program
can be tried on eight ranks in milliseconds. `rehearse` runs one rank of any number, on shapes alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from thinwire.engine.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Await,
    Broadcast,
    Collective,
    Collectives,
    Exchange,
    Reduce,
    ReduceScatter,
)
from thinwire.engine.order import Agenda
from thinwire.errors import ProgramError


def exchange(ops: Sequence[Collective | Await]) -> list[Any]:
    """Return the result on each rank when rank `r` issues `ops[r]`.

    Raises:
        ProgramError: Ranks issue different collectives, or one that is not valid.
    """
    waiting = [isinstance(op, Await) for op in ops]
    if all(waiting):
        return [op.future.wait() for op in ops if isinstance(op, Await)]
    if any(waiting):
        raise ProgramError(
            f"rank {waiting.index(True)} waits for a future where rank {waiting.index(False)} issues"
            f" {ops[waiting.index(False)]}: all ranks must yield the same collectives"
        )
    received: list[Any] = [None] * len(ops)
    for rank, op in enumerate(ops):
        if isinstance(op, Collective):
            place, _ = op.place(rank, len(ops))
            ranks = range(len(ops)) if op.ranks is None else op.ranks
            if place == 0:
                received_there = _exchange_among(ranks, ops)
                for peer, delivered in zip(ranks, received_there, strict=True):
                    received[peer] = delivered
            elif str(ops[ranks[0]]) != str(op):
                _exchange_among(ranks, ops)  # raises, and names the ranks that differ
    return received


def _exchange_among(ranks: Sequence[int], ops: Sequence[Collective | Await]) -> list[torch.Tensor]:
    first = ops[ranks[0]]
    for rank in ranks:
        if str(ops[rank]) != str(first):
            raise ProgramError(
                f"rank {ranks[0]} issues {first}, rank {rank} issues {ops[rank]}: a program may branch only"
                " on what every rank has (reduced values, shapes, configuration, the step)"
            )
    among = [op for op in (ops[rank] for rank in ranks) if isinstance(op, Collective)]
    if isinstance(among[0], Exchange):
        return _exchange_pieces([op for op in among if isinstance(op, Exchange)])
    among[0].check(len(among))
    return deliver(among[0], [op.tensor for op in among])


def _exchange_pieces(ops: Sequence[Exchange]) -> list[torch.Tensor]:
    for op in ops:
        op.check(len(ops))
    pieces = [op.tensor.split(op.sends) for op in ops]
    received = []
    for rank, op in enumerate(ops):
        sent = tuple(other.sends[rank] for other in ops)
        if sent != op.receives:
            raise ProgramError(f"rank {rank} is sent {sent} numbers, but expects {op.receives}")
        received.append(torch.cat([own[rank] for own in pieces]))
    return received


def deliver(op: Collective, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return a collective's result on each rank, given all ranks' tensors."""
    match op:
        case AllReduce():
            total = torch.stack(tensors).sum(0, dtype=op.tensor.dtype)
            return [tensor.copy_(total) for tensor in tensors]
        case AllGather():
            return [torch.stack(tensors) for _ in tensors]
        case AllToAll():
            return [torch.stack([tensor[rank] for tensor in tensors]) for rank in range(len(tensors))]
        case Exchange():
            return [tensor.clone() for tensor in tensors]  # a group of one
        case ReduceScatter():
            return list(torch.stack(tensors).sum(0, dtype=op.tensor.dtype))
        case Reduce(dst=dst):
            tensors[dst].copy_(torch.stack(tensors).sum(0, dtype=op.tensor.dtype))
            return tensors
        case Broadcast(src=src):
            source = tensors[src].clone()
            return [tensor.copy_(source) for tensor in tensors]
    raise ProgramError(f"{op} is not a supported collective: see thinwire.engine.ops")


@dataclass(frozen=True)
class Simulation:
    """The outcome of `simulate`.

    Attributes:
        results: The result of each bucket's program, as `results[rank][bucket]`.
        order: The (bucket, stage) turns that issued collectives.
    """

    results: list[list[Any]]
    order: list[tuple[int, int]]


def simulate(ranks: Sequence[Sequence[Collectives[Any]]]) -> Simulation:
    """Run all programs of one step to their ends.

    Args:
        ranks: The started programs, as `ranks[rank][bucket]`.

    Returns:
        Their results, and the order of collectives.

    Raises:
        ProgramError: Ranks diverged: they yielded different collectives, or a different number of them.

    >>> def mean(x, world_size):
    ...     total = yield AllReduce(x)
    ...     return total / world_size
    >>> simulate([[mean(torch.tensor([r]), 2)] for r in (1.0, 3.0)]).results
    [[tensor([2.])], [tensor([2.])]]
    """
    agenda = Agenda()
    for _ in ranks[0]:
        agenda.arrive()
    agenda.close()
    received: list[list[Any]] = [[None] * len(ranks[0]) for _ in ranks]
    order = []
    while (turn := agenda.next()) is not None:
        bucket, stage = turn
        outcomes = [
            _advance(programs[bucket], values[bucket])
            for programs, values in zip(ranks, received, strict=True)
        ]
        ops = [op for op, _ in outcomes if op is not None]
        if ops and len(ops) != len(outcomes):
            raise ProgramError(
                f"bucket {bucket}: some ranks end before stage {stage}, others do not. A program must yield"
                " the same collectives on every rank"
            )
        results = exchange(ops) if ops else [result for _, result in outcomes]
        for rank, result in enumerate(results):
            received[rank][bucket] = result
        if ops:
            order.append(turn)
            agenda.again(bucket, stage + 1)
    return Simulation(results=received, order=order)


def _advance(steps: Collectives[Any], value: Any) -> tuple[Collective | Await | None, Any]:
    try:
        return steps.send(value), None
    except StopIteration as stop:
        return None, stop.value


def rehearse(steps: Collectives[Any], rank: int, size: int) -> Iterator[Collective]:
    """Run one rank's program, and yield its collectives without exchanging anything.

    A collective delivers the same result as if all ranks sent this rank's tensor, except that sums are not
    computed. All ranks yield the same collectives, so one rank shows the bytes of any number of ranks. `meta`
    tensors, which have shapes and no values, need no memory.

    Args:
        steps: The started program.
        rank: The rank that it was started for.
        size: The number of ranks.

    Yields:
        The collectives, validated.

    Raises:
        ProgramError: A collective is not valid.

    >>> def mean(x, world_size):
    ...     total = yield AllReduce(x)
    ...     return total / world_size
    >>> [str(op) for op in rehearse(mean(torch.empty(5, device="meta"), 4096), 0, 4096)]
    ['AllReduce of 5 float32']
    """
    received: Any = None
    while True:
        op, _ = _advance(steps, received)
        if op is None:
            return
        if isinstance(op, Await):
            received = op.future.wait()
            continue
        op.check(op.place(rank, size)[1])
        yield op
        received = _delivered(op, *op.place(rank, size))


def _delivered(op: Collective, place: int, count: int) -> torch.Tensor:
    """Return a rank's result if all ranks send this rank's tensor, without computing sums."""
    match op:
        case AllGather():
            return op.tensor.expand(count, *op.tensor.shape).clone()
        case AllToAll():
            return op.tensor.clone()
        case Exchange():
            return op.tensor.new_zeros(sum(op.receives))
        case ReduceScatter():
            return op.tensor[place].clone()
    return op.tensor
