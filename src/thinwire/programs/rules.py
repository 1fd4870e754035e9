"""Rules that choose each parameter's program by its name or size, and the table that explains the choices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeAlias

import torch

from thinwire.errors import OptionError
from thinwire.programs.allreduce import Exact
from thinwire.programs.description import same_program, short
from thinwire.programs.parameter_names import first_names
from thinwire.programs.program import Program, ProgramFunction
from thinwire.programs.wrapper import as_program


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
        limits = [limit for limit in (self.below, self.at_least) if limit is not None]
        if not any(limits) or not all(isinstance(limit, int) and limit >= 0 for limit in limits):
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
Rules: TypeAlias = Sequence[tuple[Selector, ProgramFunction]]
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
    return tuple(
        (selector, as_program(program, f"the program for {selector!r}")) for selector, program in rules
    )


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


def parameters_by_rule(rules: Rules, shapes: Mapping[str, torch.Size]) -> dict[int, dict[str, torch.Size]]:
    """Return the shapes of the parameters that use each rule, by its index as in `rule_of`."""
    members: dict[int, dict[str, torch.Size]] = {}
    for name, shape in shapes.items():
        members.setdefault(rule_of(rules, name, shape), {})[name] = shape
    return members


def check_used(rules: Rules, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise OptionError for a rule that no parameter uses, most likely because of a misspelt name."""
    taken = {rule_of(rules, name, shape) for name, shape in shapes.items()}
    for number, (selector, _) in enumerate(rules):
        if number in taken:
            continue
        fitting = [name for name, shape in shapes.items() if fits(selector, name, shape)]
        cause = (
            f"earlier rules fit all its parameters ({first_names(fitting)}); move it before them"
            if fitting
            else f"it fits no parameter of this model, which has {first_names(list(shapes))}"
        )
        raise OptionError(f"the rule for {selector!r} is never used: {cause}")


@dataclass(frozen=True)
class Choice:
    """The program that a parameter uses, and why."""

    program: Program
    because: str


def choose(rules: Rules, program: Program, shapes: Mapping[str, Sequence[int]]) -> dict[str, Choice]:
    """Return each parameter's program and the reason for it.

    The first rule that fits decides. If none does, vectors are exact if `program` has the trait
    `exact_vectors`, and all other parameters use `program`. Equal programs become one object, so that their
    parameters share buckets.

    Args:
        rules: Rules, in order of precedence.
        program: Program of parameters that no rule fits.
        shapes: Shapes of the parameters by name.

    Returns:
        Choices by parameter name.
    """
    all_rules = list(checked_rules(rules))
    if program.exact_vectors:
        all_rules.append((Vectors(), Exact()))
    known = [program]
    table = {}
    for name, shape in shapes.items():
        number = rule_of(all_rules, name, shape)
        selector, chosen = all_rules[number] if number < len(all_rules) else ("", program)
        because = f"rule {selector!r}" if isinstance(selector, str) and selector else str(selector)
        first = next((other for other in known if same_program(other, chosen)), chosen)
        if first is chosen:
            known.append(chosen)
        table[name] = Choice(first, because)
    return table


def exceptions_of(rules: Rules, program: Program, shapes: Mapping[str, Sequence[int]]) -> dict[str, Program]:
    """Return the programs of those parameters that do not use `program`, by name."""
    table = choose(rules, program, shapes)
    return {name: choice.program for name, choice in table.items() if choice.program is not program}


def explain(runs: object, table: Mapping[str, Choice], shapes: Mapping[str, torch.Size]) -> str:
    """Return a table with one row per parameter, and each program's share of all numbers.

    Args:
        runs: Program or schedule that was attached.
        table: Choice of each parameter, from `rules.choose`.
        shapes: Shapes of the parameters by name.
    """
    rows = [("parameter", "shape", "program", "because")]
    for name, choice in table.items():
        shape = " x ".join(map(str, shapes[name])) or "scalar"
        rows.append((name, shape, short(choice.program), choice.because or "given to attach"))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in rows]
    total = sum(shape.numel() for shape in shapes.values())
    shares: dict[str, list[int]] = {}
    for name, choice in table.items():
        shares.setdefault(short(choice.program), []).append(shapes[name].numel())
    summary = [
        f"{program}: {len(counts)} of {len(table)} parameters, {sum(counts) / max(total, 1):.2%} of numbers"
        for program, counts in shares.items()
    ]
    head = [] if short(runs) in shares else [short(runs), ""]
    return "\n".join([*head, *(line.rstrip() for line in lines), "", *summary])


def explain_buckets(program: Program, bucket_bytes: int, gradient_bytes: int) -> str:
    """Return DDP's bucket size, and a smaller one if a program would then send gradients earlier.

    DDP passes a bucket to its hook when all its gradients are computed. thinwire slices large buckets, but
    cannot send a slice before that.
    """
    said = f"DDP hands gradients over in buckets of {_megabytes(bucket_bytes)} MB"
    wanted = program.preferred_bytes
    if wanted is None or min(bucket_bytes, gradient_bytes) < 2 * wanted:
        return f"{said}."
    return (
        f"{said}. In smaller ones they are sent earlier in backward:"
        f" DistributedDataParallel(..., bucket_cap_mb={_megabytes(wanted)})."
    )


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.3g}"
