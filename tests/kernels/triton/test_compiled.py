"""The kernels compiled for GPUs: bits by the PTX evaluator, registers, spills and launches.

`python -m tests.kernels.triton.bits` prints the whole table.
"""

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton, which the dev extra installs on Linux with x86-64")

import triton

from tests.kernels.triton import bits
from tests.kernels.triton.compiled import AMD, KERNELS, NVIDIA, SPARSE_KERNELS, Binaries, running_on
from tests.kernels.triton.exchange import KINDS, Exchange, Run, Tally
from tests.kernels.triton.exchange_topk import VALUES, SparseExchange
from tests.kernels.triton.ptx import RaceError
from thinwire.kernels.triton import launch, topk


def evaluated(exchange: Exchange, arch: str, *, fusion: bool = False) -> tuple[Tally, Binaries]:
    run = bits.run_of(exchange, arch)
    with running_on(arch, run, fusion=fusion) as binaries:
        return run.all(), binaries


@pytest.mark.parametrize(
    ("kind", "arch"), [*((kind, "sm_90") for kind in KINDS), ("int8", "sm_80"), ("sign", "sm_100")]
)
def test_compiled_kernels_give_the_bits_of_the_torch_codec(kind: str, arch: str) -> None:
    tally, binaries = evaluated(Exchange(kind=kind, world=5, rank=3), arch)
    assert tally.differing == dict.fromkeys(KERNELS, 0)
    assert {name: binary.spills for name, binary in binaries.found.items()} == dict.fromkeys(KERNELS, 0)


@pytest.mark.parametrize("values", VALUES)
def test_compiled_kernels_of_the_largest_numbers_give_the_bits_of_the_torch_codec(values: str) -> None:
    tally, binaries = evaluated(SparseExchange(kind=values, world=5, rank=3), "sm_90")
    assert tally.differing == dict.fromkeys(SPARSE_KERNELS, 0)
    spills = {name: binary.spills for name, binary in binaries.found.items()}
    assert spills == dict.fromkeys(SPARSE_KERNELS, 0)


def test_a_missing_barrier_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    source = topk.decode.src.replace("tl.debug_barrier()", "pass")
    assert source != topk.decode.src
    kernel = triton.JITFunction(topk.decode.fn)
    kernel._unsafe_update_src(source)
    monkeypatch.setattr(topk, "decode", kernel)
    with pytest.raises(RaceError):
        evaluated(SparseExchange(kind="bf16", width=64), "sm_80")


def test_a_fused_multiply_add_is_found() -> None:
    exact, _ = evaluated(Exchange(kind="int8"), "sm_80")
    fused, _ = evaluated(Exchange(kind="int8"), "sm_80", fusion=True)
    assert exact.differing["encode"] == 0
    assert fused.differing["encode"] > 0


@pytest.mark.parametrize("kind", ["int8", "sign"])
def test_kernels_compile_for_amd_without_spills(kind: str) -> None:
    _, binaries = evaluated(Exchange(kind=kind), "gfx942")
    assert {name: binary.spills for name, binary in binaries.found.items()} == dict.fromkeys(KERNELS, 0)
    assert not any(binary.scalar_spills for binary in binaries.found.values())


def test_kernels_of_the_largest_numbers_compile_for_amd_without_spills_to_memory() -> None:
    _, binaries = evaluated(SparseExchange(kind="int2"), "gfx942")
    spills = {name: binary.spills for name, binary in binaries.found.items()}
    assert spills == dict.fromkeys(SPARSE_KERNELS, 0)


def test_the_sums_of_512_ranks_fit_in_registers() -> None:
    exchange = Exchange(kind="int8")
    run = Run(exchange, checked=False)
    row = torch.zeros(exchange.geometry().row_bytes, dtype=torch.uint8)
    with running_on("gfx942", run) as amd:  # compiled, not run: the machine has no 512 rows
        launch.mean_encode(
            exchange.geometry(), run.table, run.table, torch.float32, run.table, 0.9, run.table,
            row, 0, launch.MOST_RANKS, row,
        )  # fmt: skip
    assert amd.found["mean_encode"].spills == 0


@pytest.mark.slow
@pytest.mark.parametrize("arch", NVIDIA + AMD)
@pytest.mark.parametrize("kind", [*KINDS, *bits.SPARSE])
def test_every_kernel_on_every_architecture(kind: str, arch: str) -> None:
    for name, _, _, compared, differing, registers, spills in bits.table(kind, arch):
        assert differing == 0, name
        assert spills == 0 or bits.spilling(name, kind), name
        # A thread has twice as many numbers in the kernels of the largest ones.
        assert registers <= (255 if kind in bits.SPARSE else 128), name
        assert compared > 0 or arch in AMD
