"""No program looks at a value on the host: on an accelerator each look would stop backward."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import thinwire
from thinwire import Bucket, Collectives, Memory, Outcome, Program
from thinwire.amp.loss_scale import Units
from thinwire.codecs.codec import Parts
from thinwire.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from thinwire.ddp_comm_hooks.powerSGD_hook import program as torch_powersgd
from thinwire.engine.simulate import simulate
from thinwire.monitors.audit import Audited, Findings
from thinwire.monitors.replicas import fingerprints, gather_fingerprints
from thinwire.programs.finite import finite
from thinwire.programs.wrapper import as_program
from thinwire.strategies.zero.exchanges import Pieces, reduce_to_owners
from thinwire.testing.ranks import SimulatedRanks

SHAPES = {"weight": (24, 16), "conv": (8, 4, 3, 3), "bias": (16,)}
LENGTH = sum(torch.Size(shape).numel() for shape in SHAPES.values())
RANKS = 2


@dataclass(frozen=True)
class Half(thinwire.Codec):
    """A codec of a third party."""

    additive = True
    wire_bits = 16

    def encode(self, x: torch.Tensor) -> Parts:
        return (x.flatten().to(torch.float16, copy=True),)

    def decode(self, parts: Parts, into: torch.Tensor) -> torch.Tensor:
        return into.copy_(parts[0].view_as(into))


def to_owners(program: Program) -> Program:
    """As ZeRO runs a program: every rank gets the means of its own parameters."""
    owners = {name: place % RANKS for place, name in enumerate(SHAPES)}

    def run(bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
        mean = yield from reduce_to_owners(program, bucket, Pieces.of(bucket, owners), memory)
        return Outcome(bucket.buffer, finite=finite(mean))

    return as_program(run)


def _given(program: Program) -> Program:
    return program


PUBLIC: dict[str, list[Program]] = {
    "AcrossNodes": [
        thinwire.AcrossNodes(thinwire.Int8(), node_size=2),
        thinwire.AcrossNodes(thinwire.PowerSGD(rank=2, min_compression=1, warmup=0), node_size=2),
    ],
    "BF16": [thinwire.BF16()],
    "ErrorFeedback": [
        thinwire.ErrorFeedback(thinwire.TwoShot(thinwire.Quantize(bits=8, affine=True))),
        thinwire.ErrorFeedback(thinwire.Reduced(thinwire.RandomEntries(ratio=0.25))),
    ],
    "Exact": [thinwire.Exact()],
    "FP16": [thinwire.FP16()],
    "FP8": [thinwire.FP8(), thinwire.FP8("e5m2")],
    "Gathered": [thinwire.Gathered(thinwire.LargestEntries(ratio=0.1)), thinwire.Gathered(Half())],
    "Int2": [thinwire.Int2()],
    "Int4": [thinwire.Int4(), thinwire.Int4(stochastic=True)],
    "Int8": [thinwire.Int8(), thinwire.Int8(error_feedback=False)],
    "Partition": [thinwire.Partition([("bias", thinwire.Exact())], default=thinwire.Int4())],
    "PowerSGD": [
        thinwire.PowerSGD(rank=2, min_compression=1),
        thinwire.PowerSGD(rank=2, min_compression=1, warmup=0),
        thinwire.PowerSGD(rank=2, min_compression=1, factor_dtype="bf16", residual="sent", warmup=0),
        thinwire.PowerSGD(rank=2, min_compression=1, factor_dtype="int8", warmup=0),
        thinwire.PowerSGD(rank=1, min_compression=1, flatten=True, warmup=0),
        thinwire.PowerSGD(rank=1, min_compression=1, warm_start=False, warmup=0),
    ],
    "RandomK": [thinwire.RandomK(0.25)],
    "Reduced": [thinwire.Reduced(Half()), thinwire.Reduced(thinwire.Cast(torch.float16))],
    "Sign": [thinwire.Sign()],
    "SparseMean": [thinwire.SparseMean(thinwire.LargestEntries(ratio=0.1, values="int4"))],
    "TopK": [thinwire.TopK(0.25), thinwire.TopK(0.25, values="bf16")],
    "TwoShot": [thinwire.TwoShot(thinwire.Float8()), thinwire.TwoShot(Half())],
    "Warmup": [thinwire.Warmup(thinwire.Int8(), steps=1)],
}
INTERNAL: dict[str, Callable[[], Program]] = {
    "Audited": lambda: Audited(thinwire.Int8(), Findings()),
    "ZeRO's reduction, exact": lambda: to_owners(thinwire.Exact()),
    "ZeRO's reduction, a codec": lambda: to_owners(thinwire.TwoShot(thinwire.Quantize())),
    "ZeRO's reduction, error feedback": lambda: to_owners(thinwire.Int8()),
    "ZeRO's reduction, PowerSGD": lambda: to_owners(thinwire.PowerSGD(rank=2, min_compression=1, warmup=0)),
    "powerSGD_hook": lambda: torch_powersgd(_state(), flatten=False),
    "batched_powerSGD_hook": lambda: torch_powersgd(_state(), flatten=True),
}
CASES: dict[str, Callable[[], Program]] = {
    **{f"{one!r} of {name}": partial(_given, one) for name, own in PUBLIC.items() for one in own},
    **INTERNAL,
}


def _state() -> PowerSGDState:
    return PowerSGDState(None, matrix_approximation_rank=2, min_compression_rate=1)


def public_programs() -> Iterator[str]:
    """Names that make programs: classes called with a bucket and a memory, functions that return one."""
    for name in thinwire.__all__:
        thing: Any = getattr(thinwire, name)
        if inspect.isclass(thing) and thing is not Program and "__call__" in vars(thing):
            if list(inspect.signature(thing.__call__).parameters)[1:] == ["bucket", "memory"]:
                yield name
        elif inspect.isfunction(thing) and inspect.signature(thing).return_annotation is Program:
            yield name


class Fake(SimulatedRanks):
    def holds(self, outcome: Any) -> bool:
        return True  # the step reads it once, after backward


def test_every_public_program_is_tested_here() -> None:
    assert sorted(public_programs()) == sorted(PUBLIC)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_a_program_runs_where_reading_a_value_raises(name: str, dtype: torch.dtype) -> None:
    with FakeTensorMode():
        count = 2 * RANKS if "AcrossNodes" in name else RANKS
        ranks = Fake(CASES[name](), SHAPES, count)
        for step in range(3):
            for memory in ranks.memories:  # a GradScaler's scale, as each step converts residuals to it
                memory.convert(Units((torch.tensor(2.0**step),)))
            ranks.step([torch.randn(LENGTH, dtype=torch.float32).to(dtype) for _ in range(count)])
    assert ranks.steps == 3


def test_fingerprints_are_gathered_where_reading_a_value_raises() -> None:
    with FakeTensorMode():
        own = [fingerprints([torch.randn(3, 4), torch.randn(5)]) for _ in range(RANKS)]
        rows = simulate([[gather_fingerprints(one, active=True)] for one in own]).results
    assert [row[0].shape for row in rows] == [(RANKS, 3)] * RANKS


def test_reading_a_value_does_raise() -> None:
    """Without it the tests above would show nothing."""

    def reading(bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
        mean = yield thinwire.AllReduce(bucket.buffer)
        return Outcome(mean if mean.isfinite().all() else bucket.buffer)

    with FakeTensorMode(), pytest.raises(Exception, match=r"is_nonzero|_local_scalar_dense|data-dependent"):
        Fake(reading, SHAPES, count=2).step([torch.randn(LENGTH) for _ in range(2)])
