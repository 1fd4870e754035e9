"""The planner: predicted costs of candidates on a network, and the rate from which each no longer pays."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from thinwire.engine.order import LOOKAHEAD
from thinwire.plan.candidates import PLAIN_DDP, Candidate, ModelExchange, exchanges_of, outer_bytes
from thinwire.plan.compute import Measured
from thinwire.plan.cost import Chunk, Compute, Cost, averaged_cost, step_cost
from thinwire.plan.devices import DeviceSpeeds
from thinwire.plan.encode import EncodeTimes, Speeds
from thinwire.plan.gaps import Gap, Known
from thinwire.plan.network import Link, Network
from thinwire.plan.traffic import Handed, Layout, handed_over, plain_buckets, traffic

MODEL_ERROR = 0.1
"""The relative error of the cost model itself, part of every interval (benchmarks/plan.py, docs/plan.md)."""
_SLOWEST, _FASTEST = 1e5, 1e12
_HALVINGS = 24


@dataclass(frozen=True)
class Row:
    """The plan of one candidate.

    Attributes:
        candidate: The way to train.
        cost: Its predicted cost.
        low: The lower end of the step's interval, in seconds.
        high: The upper end.
        speed_up: Plain DDP's step over its own.
        memory: Bytes that it takes beyond plain DDP, at most.
        gap: The expected loss gap, or None if it is unknown.
        crossover: Bits per second up to which it is faster than plain DDP: 0 if it never is, infinite if it
            always is. None for plain DDP.
    """

    candidate: Candidate
    cost: Cost
    low: float
    high: float
    speed_up: float
    memory: int
    gap: Gap | None
    crossover: float | None


@dataclass
class Planner:
    """A predictor of costs for one model, with speeds of programs that are measured once.

    Attributes:
        measured: The model and its step without communication.
        step: The step for which costs are predicted. Warm-ups are over by then.
        speeds: The times of programs, measured here or predicted.
        itemsize: Bytes of a gradient's number.
    """

    measured: Measured
    step: int = 1000
    speeds: EncodeTimes = field(default_factory=Speeds)
    itemsize: int = 4
    _made: dict[tuple[str, int, int], tuple[Candidate, Any]] = field(default_factory=dict, repr=False)
    """Results by kind, candidate and ranks. The candidate is kept alive, so that its id is not reused."""

    @property
    def compute(self) -> Compute:
        """The step without communication."""
        return self.measured.compute

    def cost(self, candidate: Candidate, network: Network) -> Cost:
        """Return the predicted cost of a step."""
        network = network.on_busy_hosts(self.compute.cores)
        if candidate.averaging is None:
            return step_cost(self._chunks(candidate, network.ranks), self.compute, network)
        exchanges = self._model_chunks(candidate, network.ranks)
        size = self.itemsize * sum(shape.numel() for shape in self.measured.shapes.values())
        return averaged_cost(exchanges, candidate.period, self.compute, network, size)

    def memory(self, candidate: Candidate, ranks: int) -> int:
        """Return the bytes that a candidate takes beyond plain DDP.

        These are the state of programs, its staged copy until the step is committed, the collectives in
        flight, and the anchors of averaged models.
        """
        config = candidate.averaging
        if candidate.argument is None:
            return 0
        found = [traffic(layout, ranks, self.step) for layout, _ in self.layouts(candidate, ranks)]
        # The engine's order keeps at most LOOKAHEAD + 1 buckets in flight. Take the largest.
        flying = sorted((layout.in_flight for layout in found), reverse=True)[: LOOKAHEAD + 1]
        anchors = 0 if config is None else outer_bytes(config, self.measured.shapes)
        return 2 * sum(layout.kept for layout in found) + sum(flying) + anchors

    def layouts(self, candidate: Candidate, ranks: int) -> list[tuple[Layout, int]]:
        """Return the layouts that a candidate exchanges in a period, each with its number of ranks."""
        if candidate.averaging is None:
            return [(handed.layout, ranks) for handed in self._handed(candidate)]
        exchanges = self._exchanges(candidate, ranks)
        return [(layout, exchange.ranks) for exchange in exchanges for layout in exchange.layouts]

    def rows(self, candidates: Sequence[Candidate], network: Network, known: Known) -> list[Row]:
        """Return the plan of each candidate, plain DDP first.

        Args:
            candidates: The ways to train that are compared with plain DDP.
            network: The network.
            known: Measured loss gaps.
        """
        return [
            replace(
                row,
                crossover=None if row.candidate.argument is None else self.crossover(row.candidate, network),
            )
            for row in self.quick_rows(candidates, network, known)
        ]

    def quick_rows(self, candidates: Sequence[Candidate], network: Network, known: Known) -> list[Row]:
        """Return the same rows without their crossovers, which take most of the time."""
        plain = self.cost(PLAIN_DDP, network)
        both = [(PLAIN_DDP, plain), *((candidate, self.cost(candidate, network)) for candidate in candidates)]
        return [self._row(candidate, cost, plain, network, known) for candidate, cost in both]

    def _row(self, candidate: Candidate, cost: Cost, plain: Cost, network: Network, known: Known) -> Row:
        width = self._half_width(cost, network)
        return Row(
            candidate,
            cost,
            max(cost.compute, cost.step - width) if cost.step > cost.compute else cost.step - width,
            cost.step + width,
            plain.step / cost.step,
            self.memory(candidate, network.ranks),
            known.gap(candidate.argument),
            None,
        )

    def _half_width(self, cost: Cost, network: Network) -> float:
        """Return half of a step's interval, from measured spreads and the error of the cost model."""
        parts = (
            self.compute.spread,
            cost.encode * self.speeds.spread(),
            cost.exposed * network.spread,
            cost.step * MODEL_ERROR,
        )
        return math.sqrt(sum(part**2 for part in parts))

    def crossover(self, candidate: Candidate, network: Network) -> float:
        """Return the rate of the slower direction up to which a candidate is faster than plain DDP.

        Both directions are scaled alike. Latency and hosts stay the same.
        """
        shape = network.link
        slower = min(shape.up, shape.down)

        def gain(rate: float) -> float:
            base = Link(up=1.0, down=1.0, latency=shape.latency, duplex=shape.duplex)
            relative = base if math.isinf(slower) else shape.scaled(1 / slower)
            there = replace(network, link=relative.scaled(rate))
            return self.cost(PLAIN_DDP, there).step - self.cost(candidate, there).step

        # A program that does not pay at 100 kbit/s never does, and one that pays at 1 Tbit/s always does.
        if gain(_SLOWEST) <= 0:
            return 0.0
        if gain(_FASTEST) > 0:
            return math.inf
        # Bisect on a logarithmic scale: the gain falls as the link gets faster.
        low, high = math.log(_SLOWEST), math.log(_FASTEST)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if gain(math.exp(middle)) > 0 else (low, middle)
        return math.exp(low)

    def _once(self, what: str, candidate: Candidate, ranks: int, make: Callable[[], Any]) -> Any:
        """Return the cached result of `make` for a candidate and a number of ranks.

        A crossover needs the costs on dozens of links, which differ only in times on the network.
        """
        key = (what, id(candidate), ranks)
        if key not in self._made:
            self._made[key] = (candidate, make())
        return self._made[key][1]

    def _handed(self, candidate: Candidate) -> list[Handed]:
        shapes, size = self.measured.shapes, self.itemsize
        sliced = not isinstance(self.speeds, DeviceSpeeds)

        def make() -> list[Handed]:
            if candidate.argument is None:
                return plain_buckets(shapes, candidate.bucket_mb, size)
            return handed_over(candidate.program, shapes, candidate.bucket_mb, size, sliced=sliced)

        made: list[Handed] = self._once("handed", candidate, 0, make)
        return made

    def _exchanges(self, candidate: Candidate, ranks: int) -> list[ModelExchange]:
        config = candidate.averaging
        assert config is not None
        made: list[ModelExchange] = self._once(
            "exchanges",
            candidate,
            ranks,
            lambda: exchanges_of(config, self.measured.shapes, ranks, candidate.period),
        )
        return made

    def _chunks(self, candidate: Candidate, ranks: int) -> list[Chunk]:
        """Return the chunks of a step that exchanges gradients."""
        made: list[Chunk] = self._once(
            "chunks",
            candidate,
            ranks,
            lambda: [self._chunk(handed, candidate, ranks) for handed in self._handed(candidate)],
        )
        return made

    def _model_chunks(self, candidate: Candidate, ranks: int) -> list[tuple[list[Chunk], int]]:
        """Return the chunks of a period's exchanges of models, and the steps that each may overlap with."""
        made: list[tuple[list[Chunk], int]] = self._once(
            "models",
            candidate,
            ranks,
            lambda: [
                ([self._model_chunk(layout, exchange.ranks) for layout in exchange.layouts], exchange.overlap)
                for exchange in self._exchanges(candidate, ranks)
            ],
        )
        return made

    def _chunk(self, handed: Handed, candidate: Candidate, ranks: int) -> Chunk:
        layout, arrivals = handed.layout, self.compute.arrivals
        arrival = arrivals[handed.parameters - 1] if arrivals else self.compute.backward
        transfers = traffic(layout, ranks, self.step).transfers
        if candidate.argument is None:  # DDP divides while it copies gradients into buckets
            encode: tuple[float, ...] = (0.0,) * (len(transfers) + 1)
        else:
            encode = self._encode(layout, ranks, len(transfers))
        return Chunk(arrival, self.itemsize * layout.numbers, encode, transfers)

    def _model_chunk(self, layout: Layout, ranks: int) -> Chunk:
        transfers = traffic(layout, ranks, self.step).transfers
        return Chunk(0.0, 4 * layout.numbers, self._encode(layout, ranks, len(transfers)), transfers)

    def _encode(self, layout: Layout, ranks: int, collectives: int) -> tuple[float, ...]:
        """Return the times of all stages. Collectives of a single rank are merged with the stage before."""
        seconds = self.speeds.seconds(layout, ranks, self.step)
        extra = len(seconds) - collectives - 1
        return seconds if extra <= 0 else (sum(seconds[: extra + 1]), *seconds[extra + 1 :])
