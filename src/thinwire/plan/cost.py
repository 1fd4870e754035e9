"""The cost of a step: a recursion over its turns. Pure functions, without torch.

A step hands over chunks of gradients while backward runs. Each chunk has stages that end in a collective, and
a last one that does not. All ranks take turns in the engine's static order (`thinwire.engine.order`). For
the turn of stage s of chunk c, after the turn before it,

    begin(c, s) = max(host free, arrival(c) if s = 0, else done(c, s-1))
    host free   = begin(c, s) + encode(c, s)
    link free   = max(link free, host free) + occupied(c, s)
    done(c, s)  = link free + latency(c, s)

and a step takes

    max(backward's end, host free, all done) + optimizer + stragglers

Encoding on backward's own thread delays backward, and with it the chunks that have not arrived. Where ranks
have fewer than two cores each, so do encoding on other threads and the processor time of collectives. On a
GPU all encoding delays backward, which uses the same device. Stragglers are the expected lead of the slowest
of W ranks over the mean, spread * sqrt(2 ln W), for a normal distribution. Every rank waits for the slowest
one at each exchange. `occupied` and `latency` are those of `thinwire.plan.network`.

A closed formula, the maximum of computing and bytes / bandwidth, would ignore that most gradients of a small
model arrive with DDP's last bucket, and that a stage waits for the one before. The recursion uses the
engine's own order, and takes a millisecond.

Averaged models exchange nothing in most steps. The cost of a step is the mean over a period, in which the
slowest rank's lead has averaged out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.engine.order import order
from thinwire.plan.network import Network, Transfer

_ENOUGH_CORES = 2.0
"""Cores per rank with which the network's threads take no time from backward's."""


@dataclass(frozen=True, kw_only=True)
class Compute:
    """The time of a step without communication on one host.

    Attributes:
        begin: Seconds from the start of a step to the start of backward.
        arrivals: Seconds from the start of a step to each parameter's gradient, in rising order.
        backward: Seconds from the start of a step to the end of backward.
        optimizer: Seconds of the optimizer's step.
        copy_rate: Bytes per second of a copy in memory.
        spread: Standard deviation of a step's seconds on one host.
        cores: Processor cores for each rank. Below 2, encoding delays backward on any thread.
        shared: Whether all encoding runs on backward's own device, so that it delays backward on any thread.
    """

    begin: float
    arrivals: tuple[float, ...]
    backward: float
    optimizer: float = 0.0
    copy_rate: float = 8e9
    spread: float = 0.0
    cores: float = 2.0
    shared: bool = False

    @property
    def step(self) -> float:
        """Seconds of a step without communication."""
        return self.backward + self.optimizer


@dataclass(frozen=True)
class Chunk:
    """Gradients that one program averages together.

    Attributes:
        arrival: Seconds from the start of a step until they are computed.
        nbytes: Their size.
        encode: Seconds on the host before each collective, and after the last.
        transfers: The collectives, one fewer than `encode`.
    """

    arrival: float
    nbytes: int
    encode: tuple[float, ...]
    transfers: tuple[Transfer, ...]


@dataclass(frozen=True)
class Cost:
    """The cost of a step on one rank. Times are in seconds.

    Attributes:
        step: The whole step.
        compute: The step without communication.
        encode: Time in the program.
        copies: Time to copy gradients into buckets and back.
        wire: Time with a collective in flight.
        exposed: Time between the end of backward and the last result.
        latency: The part of `wire` in which no bytes are on the link.
        stragglers: Time that the slowest rank keeps the others waiting.
        bytes: Bytes that a rank sends.
        collectives: The number of collectives.
    """

    step: float
    compute: float
    encode: float = 0.0
    copies: float = 0.0
    wire: float = 0.0
    exposed: float = 0.0
    latency: float = 0.0
    stragglers: float = 0.0
    bytes: float = 0.0
    collectives: float = 0.0

    @property
    def utilisation(self) -> float:
        """The share of a step that is computing."""
        return self.compute / self.step


def step_cost(chunks: Sequence[Chunk], compute: Compute, network: Network) -> Cost:
    """Return the cost of a step that exchanges gradients.

    Args:
        chunks: The gradients in the order in which they are handed over.
        compute: The step without communication.
        network: The network.
    """
    copies = 2 * sum(chunk.nbytes for chunk in chunks) / compute.copy_rate
    ended, results, waits = _run(chunks, compute, network)
    exposed = max(0.0, results - ended)
    stragglers = lead(compute.spread, network.ranks)
    sent = [transfer for chunk in chunks for transfer in chunk.transfers]
    return Cost(
        step=ended + exposed + copies + compute.optimizer + stragglers,
        compute=compute.step,
        encode=sum(sum(chunk.encode) for chunk in chunks),
        copies=copies,
        wire=sum(map(network.occupied, sent)) + waits,
        exposed=exposed,
        latency=waits,
        stragglers=stragglers,
        bytes=sum(transfer.sent for transfer in sent),
        collectives=len(sent),
    )


def exchange_seconds(chunks: Sequence[Chunk], network: Network) -> float:
    """Return the time of an exchange of models, whose chunks are all ready at its start."""
    return _run(chunks, Compute(begin=0.0, arrivals=(), backward=0.0), network)[1]


def averaged_cost(
    exchanges: Sequence[tuple[Sequence[Chunk], int]],
    period: int,
    compute: Compute,
    network: Network,
    gradient_bytes: int = 0,
) -> Cost:
    """Return the mean cost of a step where models are averaged.

    Args:
        exchanges: The exchanges of one period: the chunks, and the steps that each may overlap with.
        period: The number of steps in a period.
        compute: A step without communication.
        network: The network.
        gradient_bytes: The size of all gradients, which DDP copies into buckets and back in every step.
    """
    chunks = [chunk for own, _ in exchanges for chunk in own]
    exposed = 0.0
    for own, overlap in exchanges:
        exposed += max(0.0, exchange_seconds(own, network) - overlap * compute.step)
    packed = sum(chunk.nbytes for chunk in chunks) / period
    copies = 2 * (gradient_bytes + packed) / compute.copy_rate
    # Ranks wait for each other once a period. Deviations of `period` steps add up to sqrt(period) of one
    # step's, so the share of a step is 1 / sqrt(period).
    stragglers = lead(compute.spread, network.ranks) / math.sqrt(period)
    sent = [transfer for chunk in chunks for transfer in chunk.transfers]
    wire = sum(map(network.occupied, sent)) + sum(map(network.latency, sent))
    return Cost(
        step=compute.step + exposed / period + copies + stragglers,
        compute=compute.step,
        encode=sum(sum(chunk.encode) for chunk in chunks) / period,
        copies=copies,
        wire=wire / period,
        exposed=exposed / period,
        latency=sum(map(network.latency, sent)) / period,
        stragglers=stragglers,
        bytes=sum(transfer.sent for transfer in sent) / period,
        collectives=len(sent) / period,
    )


def lead(spread: float, ranks: int) -> float:
    """Return the expected lead of the slowest of `ranks` over the mean, for a normal distribution.

    >>> lead(1.0, 1), round(lead(1.0, 64), 2)
    (0.0, 2.88)
    """
    return spread * math.sqrt(2 * math.log(ranks))


def _run(chunks: Sequence[Chunk], compute: Compute, network: Network) -> tuple[float, float, float]:
    """Take all turns in the engine's order.

    Returns:
        The end of backward, the time of the last result, and the latency during which the link is idle.
    """
    ended, delay = compute.backward, 0.0
    host = link = results = idle = 0.0
    done = [0.0] * len(chunks)
    crowded = compute.cores < _ENOUGH_CORES
    for number, stage in order([len(chunk.encode) for chunk in chunks]):
        chunk = chunks[number]
        # begin(c, s) = max(host free, arrival(c) if s = 0, else done(c, s-1))
        begin = max(host, done[number] if stage else chunk.arrival + delay)
        work = chunk.encode[stage]
        # Stage 0 runs inside DDP's hook, on backward's own thread. Later stages run on the wire thread, which
        # delays backward only where it has no core, or where both use one GPU.
        if begin < ended + delay and (stage == 0 or crowded or compute.shared):
            delay += work
        # host free = begin(c, s) + encode(c, s)
        host = begin + work
        results = max(results, host)
        if stage < len(chunk.transfers):
            transfer = chunk.transfers[stage]
            if crowded and host < ended + delay:
                delay += network.processor(transfer)
            waits = network.latency(transfer)
            # The latency of one collective is hidden while the link still sends the bytes of others.
            idle += max(0.0, min(waits, host + waits - link)) if host > link else 0.0
            # link free = max(link free, host free) + occupied(c, s); done(c, s) = link free + latency(c, s)
            link = max(link, host) + network.occupied(transfer)
            done[number] = link + waits
            results = max(results, done[number])
    return ended + delay, results, idle
