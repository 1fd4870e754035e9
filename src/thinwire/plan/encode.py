"""The time that a program spends on the host, from a micro-benchmark on this machine.

A layout runs on random numbers as rank 0, and each collective returns at once. The time before each
collective, and after the last, is one stage. Layouts that are too large, or too many, use the time of the
measured layout with the nearest size, in proportion to their numbers. Beyond a few ranks the time is
extrapolated linearly. The time of the measurement is limited, so that a plan takes seconds for thousands of
parameters and on a busy machine.
"""

import math
import statistics
import time
from dataclasses import dataclass, field
from typing import Protocol

import torch

from thinwire.engine.ops import Collectives
from thinwire.engine.simulate import rehearse
from thinwire.plan.traffic import Layout
from thinwire.programs.memory import Memory
from thinwire.programs.program import Outcome

_NUMBERS = 1 << 22
"""The most numbers of a layout that is measured."""
_PARAMETERS = 256
"""The most parameters of a layout that is measured."""
_ROUNDS, _FEWEST_ROUNDS = 9, 2
_MOST_SECONDS = 0.25
"""The time after which a measurement ends, and other layouts of a program are not measured."""
_MOST_RANKS, _FEW_RANKS = 8, 2
_SIGNIFICANT = 1.2
"""Two times must differ by this ratio not to be noise."""


def contention(cores: float) -> float:
    """Return how much longer encoding takes in training than in the micro-benchmark.

    In the micro-benchmark a program has a core to itself. In training, one more thread per rank is busy with
    the network and shares the rank's cores.

    >>> contention(1.0), contention(4.0)
    (2.0, 1.25)
    """
    return 1 + 1 / cores


class EncodeTimes(Protocol):
    """A source of programs' times: measured here (`Speeds`), or predicted (`thinwire.plan.devices`)."""

    def seconds(self, layout: Layout, ranks: int, step: int) -> tuple[float, ...]:
        """Return the time of each stage of a layout."""

    def spread(self) -> float:
        """Return the typical relative spread of the times."""


@dataclass(frozen=True)
class Speed:
    """Measured times of a layout, by stage. Stages are one more than collectives.

    Attributes:
        seconds: The fastest of some rounds.
        spread: The relative distance of the quartiles of their sum.
        numbers: The count of numbers that was measured.
        per_rank: Further seconds for each rank beyond the number that was measured.
    """

    seconds: tuple[float, ...]
    spread: float
    numbers: int
    per_rank: tuple[float, ...]

    def of(self, numbers: int, extra_ranks: int) -> tuple[float, ...]:
        """Return the times of another count of numbers, with `extra_ranks` more ranks."""
        scale = numbers / max(1, self.numbers)
        times = zip(self.seconds, self.per_rank, strict=True)
        return tuple(scale * seconds + extra_ranks * more for seconds, more in times)


@dataclass
class Speeds:
    """Times of layouts that were measured here.

    Attributes:
        budget: The count of numbers that may still be measured, for each program.
        factor: Multiplies all times, see `contention`.
    """

    budget: int = 2 * _NUMBERS
    factor: float = 1.0
    _known: dict[tuple[Layout, int], Speed] = field(default_factory=dict)
    _used: dict[str, int] = field(default_factory=dict)
    _spent: dict[str, float] = field(default_factory=dict)

    def seconds(self, layout: Layout, ranks: int, step: int) -> tuple[float, ...]:
        """Return the time of each stage of a layout."""
        found = self._speed(layout, min(ranks, _MOST_RANKS), step)
        extra = max(0, ranks - _MOST_RANKS)
        return tuple(self.factor * seconds for seconds in found.of(layout.numbers, extra))

    def spread(self) -> float:
        """Return the typical relative spread of the measured times."""
        found = [speed.spread for speed in self._known.values()]
        return statistics.median(found) if found else 0.0

    def _speed(self, layout: Layout, ranks: int, step: int) -> Speed:
        key = (layout, ranks)
        if key not in self._known:
            used, spent = self._used.get(layout.text, 0), self._spent.get(layout.text, 0.0)
            similar = [
                (known, speed)
                for (known, count), speed in self._known.items()
                if known.text == layout.text and count == ranks
            ]
            enough = used + layout.numbers > self.budget or spent > _MOST_SECONDS
            if similar and (enough or layout.numbers > _NUMBERS):
                # Time is about proportional to the count of numbers, so the nearest size is scaled.
                nearest = min(similar, key=lambda pair: abs(pair[0].numbers - layout.numbers))
                return nearest[1]
            started = time.perf_counter()
            self._known[key] = measure(layout, ranks, step)
            self._used[layout.text] = used + layout.numbers
            self._spent[layout.text] = spent + time.perf_counter() - started
        return self._known[key]


def measure(layout: Layout, ranks: int, step: int) -> Speed:
    """Measure the time of each stage of a layout on this machine.

    Args:
        layout: The layout. A large one is cut to some of its parameters, and a large parameter to some rows.
        ranks: The number of ranks.
        step: The step, for programs with a warm-up.
    """
    sample = _cut(layout)
    seconds, spread = _timed(sample, ranks, step)
    per_rank = tuple(0.0 for _ in seconds)
    if ranks == _MOST_RANKS:
        fewer, _ = _timed(sample, _FEW_RANKS, step)
        # A program that takes other stages among many ranks does so to keep its work constant, as TopK does.
        # Its times are not extrapolated.
        alike = len(fewer) == len(seconds)
        if alike and sum(seconds) > _SIGNIFICANT * sum(fewer):
            pairs = zip(seconds, fewer, strict=True)
            per_rank = tuple(max(0.0, (more - less) / (ranks - _FEW_RANKS)) for more, less in pairs)
    return Speed(seconds, spread, sample.numbers, per_rank)


def _cut(layout: Layout) -> Layout:
    """Return a layout of at most `_NUMBERS` numbers, with as many parameters and rows as fit.

    Of many parameters, some are taken at equal distances, so that sizes are mixed as in all of them.
    """
    shapes: list[torch.Size] = []
    left = _NUMBERS
    # Take parameters at equal distances, so that the sample mixes sizes as the layout does.
    places = range(0, len(layout.shapes), math.ceil(len(layout.shapes) / _PARAMETERS))
    for shape in (layout.shapes[place] for place in places):
        rest = shape.numel() // shape[0] if len(shape) else 1
        rows = min(shape[0], max(1, left // max(1, rest))) if len(shape) else 1
        shapes.append(torch.Size((rows, *shape[1:])) if len(shape) else shape)
        left -= shapes[-1].numel()
        if left <= 0:
            break
    were_exact = set(layout.exact)
    exact = tuple(number for number in range(len(shapes)) if places[number] in were_exact)
    return Layout(layout.text, tuple(shapes), exact, layout.program)


def _timed(layout: Layout, ranks: int, step: int) -> tuple[tuple[float, ...], float]:
    """Return the fastest time of each stage, and the relative distance of the rounds' quartiles."""
    memory, rounds = Memory(), list[list[float]]()
    numbers = torch.empty(layout.numbers, dtype=torch.float32, device="cpu").normal_(
        generator=torch.Generator().manual_seed(0)
    )
    begun = time.perf_counter()
    with torch.no_grad():
        for number in range(_ROUNDS + 1):
            if len(rounds) > _FEWEST_ROUNDS and time.perf_counter() - begun > _MOST_SECONDS:
                break
            staged, seconds = memory.staged(), list[float]()
            bucket = layout.bucket(numbers.clone(), ranks, step + number)
            for _ in rehearse(_clocked(layout.program(bucket, staged), seconds), 0, ranks):
                continue
            staged.commit()
            rounds.append(seconds)
    del rounds[0]  # it allocates memory, and its residuals are zero
    # Other processes only ever slow a round down, so the fastest one is the least disturbed.
    totals = sorted(map(sum, rounds))
    low, middle, high = statistics.quantiles(totals, n=4)
    spread = (high - low) / middle if middle else 0.0
    return tuple(map(min, zip(*rounds, strict=True))), spread


def _clocked(steps: Collectives[Outcome], seconds: list[float]) -> Collectives[Outcome]:
    """Run a program, and append the time of each stage."""
    received = None
    while True:
        started = time.perf_counter()
        try:
            op = steps.send(received)
        except StopIteration as stop:
            seconds.append(time.perf_counter() - started)
            outcome: Outcome = stop.value
            return outcome
        seconds.append(time.perf_counter() - started)
        received = yield op


def copy_rate() -> float:
    """Measure the bytes per second of a copy between tensors that are larger than caches."""
    source = torch.ones(_NUMBERS, dtype=torch.float32, device="cpu")
    target = torch.empty_like(source)
    seconds = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - started)
    return source.nbytes / min(seconds)
