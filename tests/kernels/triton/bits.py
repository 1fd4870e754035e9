"""Print the bits, registers and spills of every kernel: `python -m tests.kernels.triton.bits [kind ...]`.

The PTX of each kernel runs in the evaluator on exchanges of numbers at the edges of float32, and is compared
with the torch codecs. The last rows are of kernels compiled with fused multiply-adds, which must differ.
"""

import sys
from collections.abc import Iterator

import torch

from tests.kernels.triton.compiled import AMD, KERNELS, NVIDIA, SPARSE_KERNELS, running_on
from tests.kernels.triton.exchange import KINDS, Exchange, Run
from tests.kernels.triton.exchange_topk import VALUES, SparseExchange, SparseRun

SPARSE = tuple(f"top-{values}" for values in VALUES)
"""The encodings of the largest numbers, by the form of their values."""
ROW = "{:14}{:10}{:8}{:>10}{:>11}{:>11}{:>8}"


def exchanges(kind: str) -> Iterator[Exchange]:
    """Yield exchanges of all dtypes, more and less aligned rows, several ranks, short and narrow blocks."""
    if kind in SPARSE:
        yield from _sparse_exchanges(kind.removeprefix("top-"))
        return
    narrow, half = 64 if kind in ("sign", "int2") else 136, torch.bfloat16
    yield Exchange(kind=kind, world=3, rank=1, blocks=32)
    yield Exchange(kind=kind, world=8, rank=0, keep=1.0, alias=True, fill=16, blocks=32)
    yield Exchange(kind=kind, world=5, rank=4, keep=None, alias=True)
    yield Exchange(kind=kind, world=2, rank=0, width=narrow, dtype=half, exact_dtype=half)
    yield Exchange(kind=kind, world=3, rank=2, dtype=torch.float16, exact_dtype=torch.float16)
    yield Exchange(kind=kind, world=2, rank=1, width=1024, blocks=4, hard=False)


def _sparse_exchanges(values: str) -> Iterator[SparseExchange]:
    """Yield exchanges as above, with the ratios of `TopK` and `SparseLoCo`, and uneven ones."""
    half = torch.bfloat16
    yield SparseExchange(kind=values, world=3, rank=1, blocks=32)
    yield SparseExchange(kind=values, world=8, rank=0, keep=1.0, alias=True, fill=16, blocks=32, ratio=0.2)
    yield SparseExchange(kind=values, world=5, rank=4, keep=None, alias=True, width=136)
    yield SparseExchange(kind=values, world=2, rank=0, width=64, dtype=half, exact_dtype=half, ratio=0.05)
    yield SparseExchange(kind=values, world=3, rank=2, width=1000, blocks=4, dtype=torch.float16, ratio=0.01)
    yield SparseExchange(kind=values, world=3, rank=1, width=4096, blocks=4)
    yield SparseExchange(kind=values, world=3, rank=0, width=4096, blocks=14, ratio=0.25)


def run_of(exchange: Exchange, arch: str) -> Run:
    """Return the run of an exchange. Kernels of AMD are compiled, and not run."""
    sparse = isinstance(exchange, SparseExchange)
    return (SparseRun if sparse else Run)(exchange, checked=arch in NVIDIA)


def spilling(kernel: str, kind: str) -> bool:
    """Return whether a kernel is known to spill a few registers: blocks of 4096 that keep a quarter."""
    return kind in SPARSE and kernel in ("mean_encode", "mean_decode")


def table(kind: str, arch: str, *, fusion: bool = False) -> list[tuple[str, str, str, int, int, int, int]]:
    """Return kernel, kind, architecture, numbers compared and differing, most registers and spills."""
    kernels = SPARSE_KERNELS if kind in SPARSE else KERNELS
    compared, differing = dict.fromkeys(kernels, 0), dict.fromkeys(kernels, 0)
    registers, spills = dict.fromkeys(kernels, 0), dict.fromkeys(kernels, 0)
    for exchange in exchanges(kind):
        run = run_of(exchange, arch)
        with running_on(arch, run, fusion=fusion) as binaries:
            tally = run.all()
        for name, binary in binaries.found.items():
            registers[name] = max(registers[name], binary.registers)
            spills[name] = max(spills[name], binary.spills)
            if arch in NVIDIA:
                compared[name] += tally.compared[name]
                differing[name] += tally.differing[name]
    return [
        (name, kind, arch, compared[name], differing[name], registers[name], spills[name]) for name in kernels
    ]


def main(kinds: list[str]) -> int:
    """Print the table, and return 1 if a number differs, a register is spilled, or a fused kernel passes."""
    wrong = 0
    print(ROW.format("kernel", "kind", "arch", "compared", "differing", "registers", "spills"))
    for kind in kinds:
        for arch in NVIDIA + AMD:
            for row in table(kind, arch):
                print(ROW.format(*row), flush=True)
                wrong += row[4] + (0 if spilling(row[0], kind) else row[6])
    print("with fused multiply-adds, which must differ:")
    for arch in NVIDIA:
        row = table("int8", arch, fusion=True)[0]
        print(ROW.format(*row), flush=True)
        wrong += row[4] == 0
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or [*KINDS, *SPARSE]))
