"""Which program a parameter goes by: chosen by its name or its size."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeAlias

import torch

from thinwire.errors import OptionError
from thinwire.programs.allreduce import Exact
from thinwire.programs.program import Program, describe, require_program


@dataclass(frozen=True, kw_only=True)
class Size:
    """Chooses parameters by the count of their numbers, in the place of a pattern.

    Example::

        rules = [(thinwire.Size(below=4096), thinwire.Exact())]
    """

    below: int | None = None
    at_least: int = 0

    def __post_init__(self) -> None:
        limits = [one for one in (self.below, self.at_least) if one is not None]
        if not any(limits) or not all(isinstance(one, int) and one >= 0 for one in limits):
            raise OptionError(f"{self!r}: give below=, at_least= or both, counts of numbers such as 4096")

    def __str__(self) -> str:
        low = f"at least {self.at_least}" if self.at_least else ""
        high = "" if self.below is None else f"below {self.below}"
        return f"{low}{' and ' if low and high else ''}{high} numbers"


@dataclass(frozen=True)
class Vectors:
    """Chooses tensors of at most one dimension: biases, norms, scales."""

    def __str__(self) -> str:
        return "1-D tensors are exact unless a rule says otherwise"


Selector: TypeAlias = str | Size | Vectors
Rules: TypeAlias = Sequence[tuple[Selector, Program]]
"""Pairs of a pattern (`*` is anything, `?` one character) or a `Size`, and a program; the first that fits
holds."""


def checked_rules(rules: object) -> tuple[tuple[Selector, Program], ...]:
    """The rules; OptionError where they are none."""
    pairs = isinstance(rules, list | tuple) and all(
        isinstance(rule, list | tuple) and len(rule) == 2 and isinstance(rule[0], str | Size | Vectors)
        for rule in rules
    )
    if not pairs or not isinstance(rules, list | tuple):
        raise OptionError(
            f"rules={rules!r} must be pairs of a pattern or a Size and a program, such as"
            ' [("*.bias", thinwire.Exact())]'
        )
    for selector, program in rules:
        require_program(program, f"the program for {selector!r}")
    return tuple((selector, program) for selector, program in rules)


def fits(selector: Selector, name: str, shape: Sequence[int]) -> bool:
    """Whether a parameter is chosen."""
    if isinstance(selector, str):
        return fnmatchcase(name, selector)
    if isinstance(selector, Vectors):
        return len(shape) <= 1
    count = torch.Size(shape).numel()
    return selector.at_least <= count and (selector.below is None or count < selector.below)


def rule_of(rules: Rules, name: str, shape: Sequence[int]) -> int:
    """The number of the first rule that fits; as many as there are, if none does."""
    fitting = (number for number, (selector, _) in enumerate(rules) if fits(selector, name, shape))
    return next(fitting, len(rules))


def check_used(rules: Rules, shapes: Mapping[str, Sequence[int]]) -> None:
    """Refuse rules that no parameter follows: most likely a name is misspelt."""
    taken = {rule_of(rules, name, shape) for name, shape in shapes.items()}
    for number, (selector, _) in enumerate(rules):
        if number in taken:
            continue
        fitting = [name for name, shape in shapes.items() if fits(selector, name, shape)]
        cause = (
            f"earlier rules take all it fits ({_some(fitting)}): put it before them"
            if fitting
            else f"it fits no parameter of this model, which has {_some(list(shapes))}"
        )
        raise OptionError(f"the rule for {selector!r} is never used: {cause}")


@dataclass(frozen=True)
class Choice:
    """What a parameter goes by, and why."""

    program: Program
    because: str


def choose(rules: Rules, program: Program, shapes: Mapping[str, Sequence[int]]) -> dict[str, Choice]:
    """Every parameter's program: by the rules, then by dimension, else `program` itself.

    Programs that are equal are one object, so that their parameters travel together.
    """
    all_rules: list[tuple[Selector, Program]] = list(rules)
    if spares_vectors(program):
        all_rules.append((Vectors(), Exact()))
    known: dict[str, Program] = {describe(program): program}
    table = {}
    for name, shape in shapes.items():
        number = rule_of(all_rules, name, shape)
        selector, chosen = all_rules[number] if number < len(all_rules) else ("", program)
        because = f"rule {selector!r}" if isinstance(selector, str) and selector else str(selector)
        table[name] = Choice(known.setdefault(describe(chosen), chosen), because)
    return table


def exceptions_of(rules: Rules, program: Program, shapes: Mapping[str, Sequence[int]]) -> dict[str, Program]:
    """Parameters that do not go by `program`, and by what they do."""
    table = choose(rules, program, shapes)
    return {name: choice.program for name, choice in table.items() if choice.program is not program}


def spares_vectors(program: object) -> bool:
    """Whether a program would rather leave vectors to the exact mean: it is lossy, and they are few numbers.

    A program says so itself, by `spares_vectors`, or is made of one that does.
    """
    own = getattr(program, "spares_vectors", None)
    if own is not None:
        return bool(own)
    return spares_vectors(program.program) if hasattr(program, "program") else False


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
