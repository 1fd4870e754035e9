"""Every program on fake CUDA tensors: devices, dtypes, roundings, and the kernels that a bucket launches."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch

import thinwire
from tests.fake_cuda.device import FakeCuda, fake_cuda, unavailable
from tests.programs.test_no_host_reads import CASES, SHAPES
from thinwire import AllReduce, Bucket, Collectives, Memory, Outcome
from thinwire.ddp_comm_hooks.powerSGD_hook import StateMemory, TorchPowerSGD
from thinwire.engine.ops import AllGather, AllToAll, Await, Collective, Exchange, ReduceScatter
from thinwire.kernels.triton import launch, launch_topk
from thinwire.monitors.replicas import fingerprints, gather_fingerprints
from thinwire.programs import gathered, triton_coder
from thinwire.programs.program import ProgramFunction
from thinwire.programs.wrapper import as_program

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

LARGE = {"weight": (1024, 1024), "conv": (256, 128, 3, 3), "bias": (1024,)}
"""A bucket in which every rank has pieces. With 64 ranks, most have none of those in `SHAPES`."""
BUDGETS: dict[str, tuple[int, int, float]] = {
    "AcrossNodes(Int8(), node_size=2) of AcrossNodes": (39, 41, 4.1),
    "AcrossNodes(PowerSGD(rank=2, min_compression=1, warmup=0), node_size=2) of AcrossNodes": (51, 51, 3.8),
    "BF16() of BF16": (2, 2, 1.5),
    "ErrorFeedback(TwoShot(Quantize(affine=True))) of ErrorFeedback": (53, 56, 4.3),
    "ErrorFeedback(Reduced(RandomEntries(ratio=0.25))) of ErrorFeedback": (64, 64, 5.2),
    "Exact() of Exact": (1, 1, 1.0),
    "FP16() of FP16": (2, 2, 1.5),
    "FP8() of FP8": (31, 34, 4.3),
    "FP8(variant='e5m2') of FP8": (31, 34, 4.3),
    "Gathered(LargestEntries(ratio=0.1)) of Gathered": (41, 101, 4.5),
    "Gathered(Half()) of Gathered": (10, 22, 5.0),
    "Int2() of Int2": (85, 87, 6.6),
    "Int4() of Int4": (40, 42, 4.5),
    "Int4(stochastic=True) of Int4": (100, 377, 5.9),
    "Int8() of Int8": (31, 34, 4.3),
    "Int8(error_feedback=False) of Int8": (23, 26, 3.3),
    "Partition((('bias', Exact()),), Int4()) of Partition": (46, 48, 6.5),
    "PowerSGD(rank=2, min_compression=1) of PowerSGD": (76, 80, 4.5),
    "PowerSGD(rank=2, min_compression=1, warmup=0) of PowerSGD": (43, 43, 2.8),
    "PowerSGD(rank=2, min_compression=1, residual='sent', factor_dtype='bf16', warmup=0) of PowerSGD": (
        56,
        56,
        2.8,
    ),
    "PowerSGD(rank=2, min_compression=1, factor_dtype='int8', warmup=0) of PowerSGD": (87, 92, 2.8),
    "PowerSGD(rank=1, min_compression=1, flatten=True, warmup=0) of PowerSGD": (27, 27, 2.0),
    "PowerSGD(rank=1, min_compression=1, warm_start=False, warmup=0) of PowerSGD": (66, 66, 2.0),
    "RandomK(ratio=0.25) of RandomK": (64, 64, 5.2),
    "Reduced(Half()) of Reduced": (3, 3, 1.5),
    "Reduced(Cast(torch.float16)) of Reduced": (2, 2, 1.5),
    "Sign() of Sign": (43, 45, 4.3),
    "SparseMean(LargestEntries(ratio=0.1, values='int4')) of SparseMean": (70, 139, 4.4),
    "TopK(ratio=0.25) of TopK": (90, 171, 6.8),
    "TopK(ratio=0.25, values='bf16') of TopK": (48, 87, 7.0),
    "TwoShot(Float8()) of TwoShot": (21, 24, 2.6),
    "TwoShot(Half()) of TwoShot": (16, 59, 3.2),
    "Warmup(Int8(), steps=1) of Warmup": (31, 34, 4.3),
    "Audited": (70, 73, 5.6),
    "ZeRO's reduction, exact": (8, 5, 3.2),
    "ZeRO's reduction, a codec": (16, 19, 3.0),
    "ZeRO's reduction, error feedback": (39, 49, 6.5),
    "ZeRO's reduction, PowerSGD": (47, 46, 3.0),
    "powerSGD_hook": (43, 43, 2.8),
    "batched_powerSGD_hook": (32, 32, 3.0),
}
"""What a bucket of `LARGE` may take at most: launches with 2 and with 8 ranks, and the peak of memory with 2.

The peak is in sizes of the bucket, and contains it and its residuals, once. A real step has a second copy of
these, for rolling back.
"""

QUICK = {
    "Int8() of Int8",
    "TwoShot(Half()) of TwoShot",
    "Sign() of Sign",
    "PowerSGD(rank=2, min_compression=1, warmup=0) of PowerSGD",
}
"""The programs that `make test` runs with many ranks and in half precision."""
LEARNS_FROM_TORCH = ("powerSGD_hook", "batched_powerSGD_hook")
"""Hooks that draw Q on the CPU in their first step and copy it, as torch's do, to give the same numbers."""


def received(op: Collective, bucket: Bucket) -> torch.Tensor:
    """A collective's result, without its values."""
    place, count = op.place(bucket.rank, bucket.world_size)
    op.check(count)
    assert op.tensor.device.type == "cuda", f"{op} is on {op.tensor.device}"
    match op:
        case AllGather():
            return op.tensor.new_empty((count, *op.tensor.shape))
        case AllToAll():
            return torch.empty_like(op.tensor)
        case Exchange():
            return op.tensor.new_empty(sum(op.receives))
        case ReduceScatter():
            return torch.empty_like(op.tensor[place])
    return op.tensor


@dataclass
class Run:
    """One rank's buckets, one per step, on fake CUDA tensors."""

    program: ProgramFunction
    world: int
    dtype: torch.dtype = torch.float32
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: SHAPES)
    rank: int = -1
    step: int = 0
    launches: int = 0
    memory_used: float = 0.0
    """The peak of the last step, in sizes of the bucket."""

    def __post_init__(self) -> None:
        own = self.program
        self.memory = StateMemory(own.state) if isinstance(own, TorchPowerSGD) else Memory()

    def bucket(self) -> Bucket:
        shapes = tuple(map(torch.Size, self.shapes.values()))
        numbers = torch.empty(sum(shape.numel() for shape in shapes), dtype=self.dtype, device="cuda")
        return Bucket(0, numbers, tuple(self.shapes), shapes, self.rank % self.world, self.world, self.step)

    def run(self, *, watched: bool = True) -> Outcome:
        """Take one step, and count what it launches."""
        bucket, mode = self.bucket(), FakeCuda()
        steps: Any = as_program(self.program)(bucket, self.memory)
        result: Any = None
        while True:
            try:
                if watched:
                    with mode:
                        op = steps.send(result)
                else:
                    op = steps.send(result)
            except StopIteration as stop:
                self.step, self.launches = self.step + 1, mode.launches
                self.memory_used = mode.peak / bucket.buffer.nbytes
                outcome: Outcome = stop.value
                return outcome
            result = op.future.wait() if isinstance(op, Await) else received(op, bucket)


def check(
    name: str,
    ranks: int,
    dtype: torch.dtype = torch.float32,
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    steps: int = 2,
    rank: int = -1,
) -> Run:
    """Run a program's steps, on the last rank by default."""
    with fake_cuda():
        nodes = "AcrossNodes" in name  # at least two of them
        run = Run(CASES[name](), max(ranks, 4) if nodes else ranks, dtype, shapes, rank)
        for step in range(steps + name.startswith("Warmup")):  # whose first step is exact
            outcome = run.run(watched=step > 0 or name not in LEARNS_FROM_TORCH)
            assert (outcome.mean.device.type, outcome.mean.dtype) == ("cuda", dtype)
    return run


def check_triton(name: str, ranks: int) -> Run:
    """Run a program's steps as with Triton, and count its kernels in place of launching them.

    Fake tensors have no memory for kernels, so launches are counted where they would be made.
    """
    launched: list[str] = []
    exact = ("gather_exact", "mean_exact", "scatter_exact")
    kernels: tuple[str, ...] = ("encode", "mean_encode", "decode", *exact)
    if name.startswith("TopK") and ranks == 2:  # `Gathered`
        kernels = ("encode", "mean_decode")
    table = torch.empty(1, 3)
    tables = triton_coder._Tables(table, table, table, ())
    with pytest.MonkeyPatch.context() as patch:
        for module, its in (
            (launch, ("encode", "mean_encode", "decode", *exact)),
            (launch_topk, ("encode", "mean_encode", "decode", "mean_decode")),
        ):
            for kernel in its:
                patch.setattr(module, kernel, lambda *args, kernel=kernel: launched.append(kernel))
        patch.setattr(
            triton_coder, "_uploaded", lambda table, device: torch.empty(table.shape, device="cuda")
        )
        patch.setattr(triton_coder, "_addresses", lambda *args: table)
        patch.setattr(triton_coder, "_tables", lambda *args: tables)
        patch.setattr(triton_coder, "_stream", lambda device: 0)
        patch.setattr(torch.Tensor, "data_ptr", lambda tensor: 0)
        patch.setattr(triton_coder, "runs", lambda codec, width, bucket: True)
        patch.setattr(gathered, "gathers", lambda codec, bucket: True)
        run = check(name, ranks, shapes=LARGE, steps=2)
    assert sorted(launched) == sorted(2 * kernels)
    run.launches += len(kernels)
    return run


def marked(quick: set[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in CASES]


def test_every_program_has_a_budget() -> None:
    assert list(BUDGETS) == list(CASES)


@pytest.mark.parametrize("name", CASES)
def test_launches_and_memory_stay_in_their_budget(name: str) -> None:
    run = check(name, 2, shapes=LARGE)
    assert run.launches <= BUDGETS[name][0]
    assert round(run.memory_used, 1) <= BUDGETS[name][2]


@pytest.mark.parametrize("name", marked(QUICK))
def test_launches_stay_in_their_budget_with_more_ranks(name: str) -> None:
    assert check(name, 8, shapes=LARGE).launches <= BUDGETS[name][1]


@pytest.mark.parametrize(
    ("name", "launches"), {"Int8": 40, "FP8": 40, "Int4": 48, "Sign": 51, "Int2": 93}.items()
)
def test_launches_stay_in_their_budget_with_512_ranks(name: str, launches: int) -> None:
    # The first rank has a full chunk, rank 477 a padded one in blocks of 256, and the last one has none.
    for rank in (0, 477, 511):
        assert check(f"{name}() of {name}", 512, shapes=LARGE, rank=rank).launches <= launches


@pytest.mark.parametrize("factor_dtype", [None, "bf16"])
@pytest.mark.parametrize("rank", [1, 2, 4, 8])
def test_powersgd_takes_60_launches_at_most_for_any_number_of_equal_matrices(
    rank: int, factor_dtype: Literal["bf16"] | None
) -> None:
    def run_on(names: list[str]) -> Run:
        shapes = {name: (768, 1024) if "weight" in name else (1024,) for name in names}
        with fake_cuda():
            program = thinwire.PowerSGD(rank=rank, factor_dtype=factor_dtype, warmup=0)
            run = Run(program, 8, shapes=shapes)
            for _ in range(2):
                run.run()
        return run

    def layers(count: int) -> list[str]:
        return [f"{kind} {number}" for number in range(count) for kind in ("weight", "bias")]

    counts = {run_on(layers(count)).launches for count in (1, 2, 12)}
    assert len(counts) == 1
    # Matrices at unequal distances are copied to a stack.
    assert max(counts) < run_on([*layers(3), "weight 3", "weight 4"]).launches <= 60


@pytest.mark.parametrize("name", marked(QUICK))
def test_a_program_stays_on_the_device_with_many_ranks(name: str) -> None:
    check(name, 64)


@pytest.mark.parametrize("name", marked(QUICK))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_program_stays_on_the_device_in_half_precision(name: str, dtype: torch.dtype) -> None:
    check(name, 2, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_program_stays_on_the_device_in_half_precision_with_many_ranks(
    name: str, dtype: torch.dtype
) -> None:
    check(name, 64, dtype)


def test_replicas_are_compared_on_the_device() -> None:
    with fake_cuda():
        tensors = [torch.empty(3, 4, device="cuda"), torch.empty(5, dtype=torch.bfloat16, device="cuda")]
        with FakeCuda():
            op = next(gather_fingerprints(fingerprints(tensors), active=True))
    assert isinstance(op, AllGather)
    assert op.tensor.device.type == "cuda"


# Without these the tests above would show nothing.

OFFENCES: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "a hidden CPU tensor": (lambda x: torch.zeros(3), "hidden CPU tensor"),
    "a copy to the host": (lambda x: x.cpu(), "copy to the host"),
    "a list of values": (lambda x: x.tolist(), "copy to the host|meta tensor|data-dependent|_local_scalar"),
    "a copy of numbers from the host": (lambda x: x + torch.tensor([1.0, 2.0], device="cuda"), "CPU tensor"),
    "a read": (lambda x: x.sum().item(), "data-dependent|_local_scalar_dense"),
    "a branch": (lambda x: bool(x.isfinite().all()), "data-dependent|_local_scalar_dense|is_nonzero"),
    "another device": (lambda x: x + torch.zeros(2, device="cpu"), "CPU tensor|two different devices"),
    "a division by a number": (lambda x: x / 127, "multiplies by the reciprocal"),
    "a division by a scalar of the host": (lambda x: x.div_(torch.tensor(127.0)), "the reciprocal|CPU"),
    "a division into a tensor": (lambda x: torch.div(x, 3, out=torch.empty_like(x)), "reciprocal"),
    "a fused sum": (lambda x: x.add_(x, alpha=0.5), "fused multiply-add"),
    "a fused difference": (lambda x: torch.sub(x, x, alpha=3), "fused multiply-add"),
}


@pytest.mark.parametrize("name", OFFENCES)
def test_an_offence_is_seen(name: str) -> None:
    offence, message = OFFENCES[name]

    def program(bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
        mean = yield AllReduce(bucket.buffer)
        offence(mean[:2])
        return Outcome(mean)

    with fake_cuda(), pytest.raises(Exception, match=message):
        Run(program, 2).run()


def test_launches_are_counted() -> None:
    def program(bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
        x = bucket.buffer.view(2, -1)[0]  # a view
        x = torch.empty_like(x).copy_(x) * 2
        mean = yield AllReduce(bucket.buffer)
        mean[:0].add_(1)  # nothing to launch
        return Outcome(mean.add_(x.sum()))

    with fake_cuda():
        run = Run(program, 2)
        run.run()
    assert run.launches == 4
    assert run.memory_used == 2, "the bucket, and two halves of it"


def test_a_custom_codec_encodes_on_the_device_where_a_rank_has_no_pieces() -> None:
    """It was given a CPU tensor there, so that its encoding could not be sent."""
    with fake_cuda():
        codec = CASES["TwoShot(Half()) of TwoShot"]()
        run = Run(thinwire.ErrorFeedback(codec), 64)
        for _ in range(2):
            run.run()
    assert run.step == 2


FUSED = ("Int8()", "Int4()", "Int2()", "FP8()", "FP8(variant='e5m2')", "Sign()", "TopK(ratio=0.25)")
"""The programs with Triton kernels."""


@pytest.mark.parametrize("ranks", [2, 8, 512])
@pytest.mark.parametrize("name", FUSED)
def test_triton_takes_eight_launches_and_no_copy_of_the_numbers(name: str, ranks: int) -> None:
    run = check_triton(f"{name} of {name.partition('(')[0]}", ranks)
    assert run.launches <= 8
    # The bucket, its residual and the new one, and at 8 bits three quarters of a bucket for rows of bytes.
    assert run.memory_used <= 3.8
