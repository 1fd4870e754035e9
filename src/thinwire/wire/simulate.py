"""N ranks' programs in one process, no network: the same generators, the same order, exact sums.

For tests and for research: a new program can be tried on eight ranks in milliseconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from thinwire.errors import ProgramError
from thinwire.wire.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Await,
    Broadcast,
    Collective,
    Exchange,
    Reduce,
    ReduceScatter,
    Steps,
)
from thinwire.wire.schedule import Agenda


def exchange(ops: Sequence[Collective | Await]) -> list[Any]:
    """What each rank receives when rank `r` issues `ops[r]`."""
    waiting = [isinstance(op, Await) for op in ops]
    if all(waiting):
        return [op.future.wait() for op in ops if isinstance(op, Await)]
    if any(waiting):
        raise ProgramError(
            f"rank {waiting.index(True)} waits for a future where rank {waiting.index(False)} issues"
            f" {ops[waiting.index(False)]}: every rank must yield the same"
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
                _exchange_among(ranks, ops)  # says who differs
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
            raise ProgramError(f"rank {rank} is sent {sent} numbers, but means to receive {op.receives}")
        received.append(torch.cat([own[rank] for own in pieces]))
    return received


def deliver(op: Collective, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The semantics of each collective, on all ranks' tensors at once."""
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
    raise ProgramError(f"{op} is not a collective that thinwire knows: see thinwire.wire.ops")


@dataclass(frozen=True)
class Simulation:
    """What came of it: `results[rank][bucket]`, and the (bucket, stage) turns that carried collectives."""

    results: list[list[Any]]
    order: list[tuple[int, int]]


def simulate(ranks: Sequence[Sequence[Steps[Any]]]) -> Simulation:
    """Run `ranks[rank][bucket]`, all started programs of one step, to their ends.

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
            raise ProgramError(f"bucket {bucket}: some ranks end before stage {stage}, others do not")
        results = exchange(ops) if ops else [result for _, result in outcomes]
        for rank, result in enumerate(results):
            received[rank][bucket] = result
        if ops:
            order.append(turn)
            agenda.again(bucket, stage + 1)
    return Simulation(results=received, order=order)


def _advance(steps: Steps[Any], value: Any) -> tuple[Collective | Await | None, Any]:
    try:
        return steps.send(value), None
    except StopIteration as stop:
        return None, stop.value
