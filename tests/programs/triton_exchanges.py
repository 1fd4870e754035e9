"""Whole exchanges in Triton's interpreter: `python -m tests.programs.triton_exchanges all`.

Triton decides when a kernel is defined whether it is interpreted, so this runs in a process of its own. It
trains two steps on simulated ranks with `TritonCoder` and with `OwnersCoder`, and prints, by case, how many
numbers were compared and how many differ.
"""

import json
import os
import sys
import warnings
from collections.abc import Callable
from itertools import chain
from typing import Any
from unittest import mock

import torch

if __name__ == "__main__":  # a process that only collects tests must not hand it down to its ranks
    os.environ["TRITON_INTERPRET"] = "1"

from tests.simulated import normal
from thinwire import (
    Codec,
    ErrorFeedback,
    Float8,
    Gathered,
    LargestEntries,
    Program,
    Quantize,
    SignBits,
    TwoMagnitudes,
    TwoShot,
)
from thinwire.programs import gathered, twoshot
from thinwire.programs.coding import coders_of
from thinwire.programs.division import Division
from thinwire.programs.triton_coder import TritonCoder, TritonGatherCoder
from thinwire.testing import SimulatedRanks

CODECS = {
    "int8": Quantize(block=32),
    "int4": Quantize(bits=4, block=32),
    "int2": TwoMagnitudes(block=32),
    "e4m3": Float8(block=32),
    "e5m2": Float8(variant="e5m2", block=32),
    "sign": SignBits(block=32),
}
SPARSE_CODECS = {
    "top-int2": LargestEntries(ratio=0.2, block=128, values="int2"),
    "top-bf16": LargestEntries(ratio=0.1, block=256),
}
PROGRAMS: dict[str, Callable[[Codec], Program]] = {"two-shot": TwoShot, "gathered": Gathered}
SHAPES = {"a": (5, 9), "b": (16, 4), "c": (7,), "d": (3,), "e": (32, 32)}
WORLDS = (2, 3, 8)
WAYS: dict[str, Callable[[Program], Program]] = {
    "plain": lambda program: program,
    "fed back": ErrorFeedback,
    "decayed": lambda program: ErrorFeedback(program, keep=0.5),
}


def by_triton(codec: Any, bucket: Any) -> TritonCoder:
    width = coders_of(codec, bucket)[0].block
    return TritonCoder(bucket, codec, width, Division.of(bucket, width))


def numbers(program: Program, world: int, exact: set[str], dtype: torch.dtype) -> torch.Tensor:
    """The means, flags and residuals of two steps, the second with an infinity."""
    ranks = SimulatedRanks(program, SHAPES, world, exact)
    length = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    found: list[torch.Tensor] = []
    for step in range(3):
        gradients = [one.to(dtype) for one in normal(step, world, length)]
        if step == 2:
            gradients[-1][17] = torch.inf
        for outcome in ranks.step(gradients):
            found.append(outcome.mean.double())
            # Without a flag the step checks the mean.
            finite = outcome.mean.isfinite().all() if outcome.finite is None else outcome.finite
            found.append(finite.double().view(1))
        found += [
            slot.double().flatten()
            for memory in ranks.memories
            for slot in chain(*(slots.values() for slots in memory.state_dict().values()))
        ]
    return torch.cat(found).nan_to_num(7, 7, 7)


def compare(name: str, world: int, way: str, dtype: torch.dtype) -> tuple[int, int]:
    kind, _, codec = name.rpartition(" ")
    sent = PROGRAMS[kind or "two-shot"](SPARSE_CODECS[codec] if kind else CODECS[codec])
    program, exact = WAYS[way](sent), {"c", "d"} if sent.carries_exact else set[str]()
    wanted = numbers(program, world, exact, dtype)
    with (
        mock.patch.object(twoshot, "bucket_coder_of", by_triton),
        mock.patch.object(gathered, "gather_coder_of", TritonGatherCoder),
    ):
        found = numbers(program, world, exact, dtype)
    assert len(wanted) == len(found)
    return len(wanted), int((wanted != found).sum())


Case = tuple[str, int, str, torch.dtype]
QUICK: list[Case] = [
    *((name, 3, "fed back", torch.float32) for name in CODECS),
    ("int8", 2, "plain", torch.bfloat16),
    ("two-shot top-int2", 3, "fed back", torch.float32),
    ("gathered top-bf16", 2, "plain", torch.bfloat16),
]
ALL: list[Case] = [
    *(
        (name, world, way, dtype)
        for name in CODECS
        for world, way, dtype in (
            *((world, "fed back", torch.float32) for world in WORLDS),
            (2, "decayed", torch.float32),
            (2, "plain", torch.float32),
            (2, "plain", torch.bfloat16),
            (2, "fed back", torch.bfloat16),
        )
    ),
    *(
        (f"{kind} {name}", world, way, dtype)
        for kind in PROGRAMS
        for name in SPARSE_CODECS
        for world, way, dtype in (
            (3, "fed back", torch.float32),
            (2, "plain", torch.bfloat16),
            (2, "decayed", torch.bfloat16),
        )
    ),
]

if __name__ == "__main__":
    warnings.simplefilter("ignore")  # numpy's, about overflows
    cases = ALL if "all" in sys.argv else QUICK
    json.dump({" ".join(map(str, case)): compare(*case) for case in cases}, sys.stdout)
