"""Rules that choose each parameter's program by its name or size."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeAlias

import torch

from thinwire.errors import OptionError
from thinwire.programs.allreduce import Exact
from thinwire.programs.description import same_program
from thinwire.programs.program import Program, require_program


@dataclass(frozen=True, kw_only=True)
class Size:
    """A condition on the number of a parameter's elements, for use in a rule in place of a pattern.

    Args:
        below: Fits parameters with fewer numbers than this. None sets no limit.
        at_least: Fits parameters with this many numbers or more.

    Raises:
        OptionError: Neither limit is given, or one is not a whole number of at least 0.

    Example::

        rules = [(thinwire.Size(below=4096), thinwire.Exact())]
        wire = thinwire.attach(ddp, thinwire.Int8(), rules=rules)
    """

    below: int | None = None
    at_least: int = 0

    def __post_init__(self) -> None:
        limits = [one for one in (self.below, self.at_least) if one is not None]
        if not any(limits) or not all(isinstance(one, int) and one >= 0 for one in limits):
            raise OptionError(f"{self!r}: pass below=, at_least= or both, as whole numbers such as 4096")

    def __str__(self) -> str:
        low = f"at least {self.at_least}" if self.at_least else ""
        high = "" if self.below is None else f"below {self.below}"
        return f"{low}{' and ' if low and high else ''}{high} numbers"


@dataclass(frozen=True)
class Vectors:
    """A condition that fits tensors of at most one dimension, such as biases, norms and scales."""

    def __str__(self) -> str:
        return "1-D tensors are exact unless a rule says otherwise"


Selector: TypeAlias = str | Size | Vectors
Rules: TypeAlias = Sequence[tuple[Selector, Program]]
"""Pairs of a pattern or a `Size`, and a program. The first rule that fits a parameter chooses its program.

In a pattern `*` matches anything and `?` one character.
"""


def checked_rules(rules: object) -> tuple[tuple[Selector, Program], ...]:
    """Return the rules as a tuple. Raise OptionError unless they are pairs of a selector and a program."""
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
    """Return whether a selector fits a parameter."""
    if isinstance(selector, str):
        return fnmatchcase(name, selector)
    if isinstance(selector, Vectors):
        return len(shape) <= 1
    count = torch.Size(shape).numel()
    return selector.at_least <= count and (selector.below is None or count < selector.below)


def rule_of(rules: Rules, name: str, shape: Sequence[int]) -> int:
    """Return the index of the first rule that fits, or the number of rules if none does."""
    fitting = (number for number, (selector, _) in enumerate(rules) if fits(selector, name, shape))
    return next(fitting, len(rules))


def check_used(rules: Rules, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise OptionError for a rule that no parameter uses, most likely because of a misspelt name."""
    taken = {rule_of(rules, name, shape) for name, shape in shapes.items()}
    for number, (selector, _) in enumerate(rules):
        if number in taken:
            continue
        fitting = [name for name, shape in shapes.items() if fits(selector, name, shape)]
        cause = (
            f"earlier rules fit all its parameters ({_some(fitting)}); move it before them"
            if fitting
            else f"it fits no parameter of this model, which has {_some(list(shapes))}"
        )
        raise OptionError(f"the rule for {selector!r} is never used: {cause}")


@dataclass(frozen=True)
class Choice:
    """The program that a parameter uses, and why."""

    program: Program
    because: str


def choose(rules: Rules, program: Program, shapes: Mapping[str, Sequence[int]]) -> dict[str, Choice]:
    """Return each parameter's program and the reason for it.

    The first rule that fits decides. If none does, vectors are exact if `program` spares them (see
    `exact_vectors`), and all other parameters use `program`. Equal programs become one object, so that their
    parameters share buckets.

    Args:
        rules: Rules, in order of precedence.
        program: Program of parameters that no rule fits.
        shapes: Shapes of the parameters by name.

    Returns:
        Choices by parameter name.
    """
    all_rules: list[tuple[Selector, Program]] = list(rules)
    if exact_vectors(program):
        all_rules.append((Vectors(), Exact()))
    known = [program]
    table = {}
    for name, shape in shapes.items():
        number = rule_of(all_rules, name, shape)
        selector, chosen = all_rules[number] if number < len(all_rules) else ("", program)
        because = f"rule {selector!r}" if isinstance(selector, str) and selector else str(selector)
        first = next((one for one in known if same_program(one, chosen)), chosen)
        if first is chosen:
            known.append(chosen)
        table[name] = Choice(first, because)
    return table


def exceptions_of(rules: Rules, program: Program, shapes: Mapping[str, Sequence[int]]) -> dict[str, Program]:
    """Return the programs of those parameters that do not use `program`, by name."""
    table = choose(rules, program, shapes)
    return {name: choice.program for name, choice in table.items() if choice.program is not program}


def exact_vectors(program: object) -> bool:
    """Return whether vectors are averaged exactly, because the program is lossy and vectors are small.

    A program declares it with an attribute `exact_vectors`. A wrapper inherits that of its `program`.
    """
    own = getattr(program, "exact_vectors", None)
    if own is not None:
        return bool(own)
    return exact_vectors(program.program) if hasattr(program, "program") else False


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
