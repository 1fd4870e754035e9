"""Print the bits, registers and spills of every kernel: `python -m tests.kernels.triton.bits [kind ...]`.

The PTX of each kernel runs in the evaluator on exchanges of numbers at the edges of float32, and is compared
with the torch codecs. The last rows are of kernels compiled with fused multiply-adds, which must differ.
"""

import sys
from collections.abc import Iterator

import torch

from tests.kernels.triton.compiled import AMD, KERNELS, NVIDIA, running_on
from tests.kernels.triton.exchange import KINDS, Exchange, Run

ROW = "{:14}{:6}{:8}{:>10}{:>11}{:>11}{:>8}"


def exchanges(kind: str) -> Iterator[Exchange]:
    """Yield exchanges of all dtypes, more and less aligned rows, several ranks, short and narrow blocks."""
    narrow, half = 64 if kind in ("sign", "int2") else 136, torch.bfloat16
    yield Exchange(kind=kind, world=3, rank=1, blocks=32)
    yield Exchange(kind=kind, world=8, rank=0, keep=1.0, alias=True, fill=16, blocks=32)
    yield Exchange(kind=kind, world=5, rank=4, keep=None, alias=True)
    yield Exchange(kind=kind, world=2, rank=0, width=narrow, dtype=half, exact_dtype=half)
    yield Exchange(kind=kind, world=3, rank=2, dtype=torch.float16, exact_dtype=torch.float16)
    yield Exchange(kind=kind, world=2, rank=1, width=1024, blocks=4, hard=False)


def table(kind: str, arch: str, *, fusion: bool = False) -> list[tuple[str, str, str, int, int, int, int]]:
    """Return kernel, kind, architecture, numbers compared and differing, most registers and spills."""
    compared, differing = dict.fromkeys(KERNELS, 0), dict.fromkeys(KERNELS, 0)
    registers, spills = dict.fromkeys(KERNELS, 0), dict.fromkeys(KERNELS, 0)
    for exchange in exchanges(kind):
        run = Run(exchange, checked=arch in NVIDIA)
        with running_on(arch, run, fusion=fusion) as binaries:
            tally = run.all()
        for name, binary in binaries.found.items():
            registers[name] = max(registers[name], binary.registers)
            spills[name] = max(spills[name], binary.spills)
            if arch in NVIDIA:
                compared[name] += tally.compared[name]
                differing[name] += tally.differing[name]
    return [
        (name, kind, arch, compared[name], differing[name], registers[name], spills[name]) for name in KERNELS
    ]


def main(kinds: list[str]) -> int:
    """Print the table, and return 1 if a number differs, a register is spilled, or a fused kernel passes."""
    wrong = 0
    print(ROW.format("kernel", "kind", "arch", "compared", "differing", "registers", "spills"))
    for kind in kinds:
        for arch in NVIDIA + AMD:
            for row in table(kind, arch):
                print(ROW.format(*row), flush=True)
                wrong += row[4] + row[6]
    print("with fused multiply-adds, which must differ:")
    for arch in NVIDIA:
        row = table("int8", arch, fusion=True)[0]
        print(ROW.format(*row), flush=True)
        wrong += row[4] == 0
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(KINDS)))
