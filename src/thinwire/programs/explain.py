"""A readable table of the program that each parameter uses, and why."""

from collections.abc import Mapping

import torch

from thinwire.programs.description import short
from thinwire.programs.program import preferred_bytes
from thinwire.programs.rules import Choice


def explain(runs: object, table: Mapping[str, Choice], shapes: Mapping[str, torch.Size]) -> str:
    """Return a table with one row per parameter, and each program's share of all numbers.

    Args:
        runs: Program or schedule that was attached.
        table: Choice of each parameter, from `rules.choose`.
        shapes: Shapes of the parameters by name.

    Returns:
        Lines of text.
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


def explain_buckets(program: object, bucket_bytes: int, gradient_bytes: int) -> str:
    """Return DDP's bucket size, and a smaller one if a program would then send gradients earlier.

    DDP passes a bucket to its hook when all its gradients are computed. thinwire slices large buckets, but
    cannot send a slice before that.

    Args:
        program: Program for gradients.
        bucket_bytes: The size of DDP's buckets.
        gradient_bytes: The size of all gradients.

    Returns:
        A line of text.
    """
    said = f"DDP hands gradients over in buckets of {_megabytes(bucket_bytes)} MB"
    wanted = preferred_bytes(program)
    if wanted is None or min(bucket_bytes, gradient_bytes) < 2 * wanted:
        return f"{said}."
    return (
        f"{said}. In smaller ones they are sent earlier in backward:"
        f" DistributedDataParallel(..., bucket_cap_mb={_megabytes(wanted)})."
    )


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.3g}"
