"""A table that people can read: what every parameter goes by, and why."""

from collections.abc import Mapping

import torch

from thinwire.programs.program import short
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
