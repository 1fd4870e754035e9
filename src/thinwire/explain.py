"""A table that people can read: what every parameter goes by, and why."""

import dataclasses
from collections.abc import Mapping

import torch

from thinwire.programs.program import describe
from thinwire.programs.rules import Choice


def explain(runs: object, table: Mapping[str, Choice], shapes: Mapping[str, torch.Size]) -> str:
    """Lines of text: a row for each parameter, then each program's share of the numbers."""
    rows = [("parameter", "shape", "program", "because")]
    for name, choice in table.items():
        shape = " x ".join(map(str, shapes[name])) or "one number"
        rows.append((name, shape, short(choice.program), choice.because or "what was attached"))
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
