"""The nouns of a program: what it is given, what it may keep, what it returns.

    def __call__(self, bucket, memory):
        total = yield AllReduce(bucket.buffer / bucket.world_size)
        return Outcome(mean=total)

A program must yield the same collectives on every rank: branch on shapes, configuration, the step and
reduced values, never on local data.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from thinwire.errors import OptionError, ProgramError
from thinwire.programs.memory import Memory
from thinwire.wire.ops import Steps
from thinwire.wire.pack import unpack


@dataclass(frozen=True, eq=False)
class Bucket:
    """One rank's gradients of some parameters, flat, still to be averaged.

    Attributes:
        index: DDP's number for it; buckets may be rebuilt, so never name state by it.
        buffer: The gradients, one after another. A program may overwrite it.
        names: The parameters' names in the model.
        shapes: Their shapes, in the same order; complex ones end in a dimension of 2, real and imaginary.
        rank: This rank, in the group that is averaged over.
        world_size: The size of that group.
        step: Counts the steps that communicated, from 0.
        track_error: Whether the outcome shall say what was not sent.
    """

    index: int
    buffer: torch.Tensor
    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    rank: int
    world_size: int
    step: int
    track_error: bool = False

    def views(self) -> dict[str, torch.Tensor]:
        """The gradients by parameter name: views of the buffer."""
        return dict(zip(self.names, unpack(self.buffer, self.shapes), strict=True))

    def __str__(self) -> str:
        shown = ", ".join(self.names[:2])
        more = f" and {len(self.names) - 2} more" if len(self.names) > 2 else ""
        return f"bucket {self.index} ({shown}{more})"


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a program returns.

    Attributes:
        mean: The averaged gradients, like the bucket's buffer; the buffer itself where possible.
        error: This rank's input less what of it went into the mean, for whoever feeds it back; asked for
            by `bucket.track_error`. Over all ranks, mean(inputs) = mean + mean(errors).
        finite: Whether the mean is known to be finite, or not to be; None where nobody has looked yet.
    """

    mean: torch.Tensor
    error: torch.Tensor | None = None
    finite: bool | None = None


class Program(Protocol):
    """Averages one bucket, start to finish."""

    def __call__(self, bucket: Bucket, memory: Memory) -> Steps[Outcome]:
        """Yield collectives, receive their results, return the outcome."""


def describe(program: object) -> str:
    """A program and its options as text: equal on all ranks just where the programs are equal.

    Frozen dataclasses have it from their repr; of functions the address is left out.
    """
    text = re.sub(r"<function (\S+) at 0x[0-9a-fA-F]+>", r"\1", repr(program))
    if re.search(r" at 0x[0-9a-fA-F]+", text):
        raise OptionError(
            f"program={text} does not show its options, so ranks cannot compare them: make its class a frozen"
            " dataclass, or give it a __repr__ that shows them"
        )
    return text


def short(thing: object) -> str:
    """A program with those of its options that are not the default.

    >>> from thinwire import Int4
    >>> short(Int4())
    'ErrorFeedback(TwoShot(Quantize(bits=4, block=64)))'
    """
    if not dataclasses.is_dataclass(thing) or isinstance(thing, type):
        return describe(thing)
    options = []
    for one in dataclasses.fields(thing):
        value, made = getattr(thing, one.name), one.default_factory
        default = one.default if made is dataclasses.MISSING else made()
        if one.repr and (default is dataclasses.MISSING or value != default):
            options.append(short(value) if dataclasses.is_dataclass(value) else f"{one.name}={short(value)}")
    return f"{type(thing).__name__}({', '.join(options)})"


def require_program(program: object, option: str = "program") -> None:
    """Refuse what is no program."""
    if not callable(program) or isinstance(program, type):
        raise OptionError(
            f"{option}={program!r} is not a program: give an instance, such as thinwire.Int8(); codecs become"
            " programs by TwoShot(codec)"
        )


def check_fit(program: object, shapes: Mapping[str, torch.Size], world_size: int) -> None:
    """Let a program, and those it is made of, look at model and group before anything is sent.

    A program that minds has a method `check(shapes, world_size)` that raises OptionError.
    """
    check = getattr(program, "check", None)
    if callable(check):
        check(shapes, world_size)
    if isinstance(program, list | tuple):
        parts = list(program)
    else:
        known = dataclasses.fields(program) if dataclasses.is_dataclass(program) else ()
        parts = [getattr(program, one.name) for one in known]
    for part in parts:
        check_fit(part, shapes, world_size)


def outcome_of(program: Program, bucket: Bucket, memory: Memory) -> Steps[Outcome]:
    """The program, with its outcome held against what the bucket needs."""
    expected = (bucket.buffer.shape, bucket.buffer.dtype, bucket.buffer.device)
    outcome = yield from program(bucket, memory)
    if not isinstance(outcome, Outcome):
        raise ProgramError(
            f"{describe(program)} returned a {type(outcome).__name__} for {bucket}: return Outcome(mean)"
        )
    got = (outcome.mean.shape, outcome.mean.dtype, outcome.mean.device)
    if got != expected:
        raise ProgramError(
            f"{describe(program)} returned a mean of {_sort(*got)} for {bucket}: it must be like the"
            f" bucket's buffer, {_sort(*expected)}"
        )
    return outcome


def mean_of(steps: Steps[Outcome]) -> Steps[torch.Tensor]:
    """A program's mean alone."""
    return (yield from steps).mean


NO_EXCEPTIONS: Mapping[str, Program] = {}
"""All parameters go by one program."""


def by_program(
    names: Iterable[str], program: Program, exceptions: Mapping[str, Program]
) -> list[tuple[Program, tuple[str, ...]]]:
    """Who goes with which program, in order of their first names; programs are told apart by identity."""
    members: dict[int, tuple[Program, list[str]]] = {}
    for name in names:
        chosen = exceptions.get(name, program)
        members.setdefault(id(chosen), (chosen, []))[1].append(name)
    return [(chosen, tuple(own)) for chosen, own in members.values()]


def _sort(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> str:
    return f"shape {tuple(shape)}, {dtype}, on {device}"
