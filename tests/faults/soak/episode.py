"""What happens in an episode, as a function of its seed alone."""

from dataclasses import dataclass
from random import Random
from typing import TypeAlias

from tests.faults.soak.programs import (
    Drawn,
    Hook,
    averages,
    can_resize,
    can_swap,
    draw,
    draw_attached,
    steps_inside_backward,
)
from thinwire import Hierarchical

PRECISIONS = ("fp32", "fp32", "bf16 autocast", "fp16 autocast", "bf16 model")


@dataclass(frozen=True)
class Delay:
    """A rank that sleeps before a step."""

    step: int
    rank: int
    seconds: float


@dataclass(frozen=True)
class Kill:
    """A rank that dies at once: before a step's forward, in backward, after it, or anywhere, by a clock."""

    step: int
    rank: int
    place: str
    seconds: float


@dataclass(frozen=True)
class Interrupt:
    """Ctrl-C in a rank's backward, and the rank ends."""

    step: int
    rank: int


@dataclass(frozen=True)
class Resume:
    """All ranks save, end, and are started anew."""

    step: int


@dataclass(frozen=True)
class Resize:
    """All ranks save, end, and another number of ranks is started."""

    step: int
    world_size: int


@dataclass(frozen=True)
class Overflow:
    """A loss of inf or NaN on one rank, under a GradScaler."""

    step: int
    rank: int
    value: float


@dataclass(frozen=True)
class Swap:
    """Another program from this step on."""

    step: int
    program: Drawn


Event: TypeAlias = Delay | Kill | Interrupt | Resume | Resize | Overflow | Swap
KINDS: tuple[type, ...] = (Delay, Kill, Interrupt, Resume, Resize, Overflow, Swap)


@dataclass(frozen=True, kw_only=True)
class Episode:
    """A training, and what happens to it."""

    seed: int
    world_size: int
    program: Drawn
    events: tuple[Event, ...]
    steps: int
    save_every: int
    precision: str
    adam: bool
    scaled: bool
    clipped: bool
    unused: bool
    normed: bool
    accumulating: frozenset[int]
    bucket_mb: float
    sleepiness: float

    def program_at(self, step: int) -> Drawn:
        """The program with which a step begins, before it swaps."""
        swaps = [one.program for one in self.events if isinstance(one, Swap) and one.step < step]
        return swaps[-1] if swaps else self.program


_RESTARTS = (Kill, Interrupt, Resume, Resize)


def draw_episode(seed: int) -> Episode:
    """The same for the same seed, in any process."""
    rng = Random(seed)
    world_size, steps = rng.choice([1, 2, 2, 3, 4]), rng.randint(6, 12)
    program = draw(rng, world_size)
    events = _events(rng, world_size, steps, program)
    if isinstance(program, Hook) and any(isinstance(event, _RESTARTS) for event in events):
        # Like torch's, a hook's state names no loss scale, so a restart after an overflow is not exact.
        events = tuple(event for event in events if not isinstance(event, Overflow))
    programs = [program, *(event.program for event in events if isinstance(event, Swap))]
    inside = steps_inside_backward(program)
    precision = rng.choice(PRECISIONS)
    overflows = any(isinstance(event, Overflow) for event in events)
    if overflows and precision == "bf16 model":
        precision = "fp32"
    strikes = any(isinstance(event, Kill | Interrupt) for event in events)
    return Episode(
        seed=seed,
        world_size=world_size,
        program=program,
        events=events,
        steps=steps,
        save_every=rng.randint(1, 3),
        precision="fp32" if inside and precision == "fp16 autocast" else precision,
        adam=rng.random() < 0.5,
        scaled=overflows or (not inside and precision == "fp16 autocast"),
        clipped=not inside and rng.random() < 0.25,
        unused=not inside and rng.random() < 0.3,
        # DDP itself broadcasts buffers, and its errors name no rank. And a step that overflows has changed
        # BatchNorm's statistics in its forward.
        normed=not strikes and rng.random() < 0.3 and not overflows,
        accumulating=frozenset(step for step in range(steps) if rng.random() < 0.2),
        bucket_mb=0.01 if any(map(averages, programs)) else rng.choice([0.002, 0.01, 25]),
        sleepiness=rng.choice([0, 0.05, 0.2]),
    )


def _events(rng: Random, world_size: int, steps: int, program: Drawn) -> tuple[Event, ...]:
    """One to three, in order; none at the first step, and a last one left for others to notice a death."""
    events: list[Event] = []
    programs = [program]
    for step in sorted(rng.sample(range(1, steps - 1), rng.choice([1, 1, 2, 2, 3]))):
        event = _event(rng, step, world_size, programs, resized=any(isinstance(e, Resize) for e in events))
        if isinstance(event, Resize):
            world_size = event.world_size
        elif isinstance(event, Swap):
            programs.append(event.program)
        events.append(event)
    return tuple(events)


def _event(rng: Random, step: int, world_size: int, programs: list[Drawn], *, resized: bool) -> Event:
    rank = rng.randrange(world_size)
    sizes = [size for size in range(1, 5) if size != world_size]
    if any(isinstance(program, Hierarchical) for program in programs):
        sizes = [size for size in sizes if size > 1]
    choices: dict[type, float] = {Delay: 0.5, Kill: 1, Interrupt: 0.5, Resume: 1}
    if not resized and all(map(can_resize, programs)):
        choices[Resize] = 1
    if not steps_inside_backward(programs[-1]):
        choices[Overflow] = 1
    if can_swap(programs[-1]):
        choices[Swap] = 0.7
    (kind,) = rng.choices(list(choices), list(choices.values()))
    if kind is Delay:
        return Delay(step, rank, round(rng.uniform(0.05, 0.4), 2))
    if kind is Kill:
        place = rng.choice(["before", "backward", "after", "anywhere", "anywhere"])
        return Kill(step, rank, place, round(rng.uniform(0.001, 0.05), 3))
    if kind is Interrupt:
        return Interrupt(step, rank)
    if kind is Resume:
        return Resume(step)
    if kind is Resize:
        return Resize(step, rng.choice(sizes))
    if kind is Overflow:
        return Overflow(step, rank, rng.choice([float("inf"), float("nan")]))
    return Swap(step, draw_attached(rng, world_size))
