"""Compile kernels for GPUs that this machine does not have, and run their PTX in the evaluator.

`running_on` replaces the kernels of `twoshot`, so that `launch` compiles them as it would on a GPU, with the
same specialisation on the values of its arguments, and then runs them on the tensors of an exchange.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.kernels.triton.exchange import Run
from tests.kernels.triton.ptx import Machine, Memory
from thinwire.kernels.triton import topk, twoshot

KERNELS = ("encode", "mean_encode", "decode", "gather_exact", "mean_exact", "scatter_exact")
SPARSE_KERNELS = (*KERNELS, "mean_decode")
NVIDIA = ("sm_80", "sm_90", "sm_100")
AMD = ("gfx942",)

_AMD_USAGE = ("vgpr_count", "private_segment_fixed_size", "vgpr_spill_count", "sgpr_spill_count")
_POINTERS = {torch.int64: "*i64", torch.uint8: "*u8", torch.int32: "*i32"}


@dataclass(frozen=True)
class Binary:
    """A compiled kernel. `machine` runs it, if it is for an NVIDIA GPU.

    `spills` are those to memory. AMD spills scalar registers to lanes of vector registers.
    """

    registers: int
    spills: int
    machine: Machine | None
    scalar_spills: int = 0


@dataclass
class Binaries:
    """The kernels that an exchange launched."""

    arch: str
    fusion: bool = False
    found: dict[str, Binary] = field(default_factory=dict)
    launches: list[str] = field(default_factory=list)


class Evaluated:
    """A kernel that is compiled and evaluated when it is launched."""

    def __init__(self, kernel: Any, run: Run, binaries: Binaries) -> None:
        self._kernel, self._run, self._binaries = kernel, run, binaries

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        def launched(*arguments: Any, **options: Any) -> None:
            binary, passed = self._compiled(arguments, options)
            self._binaries.found[self._kernel.__name__] = binary
            self._binaries.launches.append(self._kernel.__name__)
            if binary.machine is None:
                return
            memory = Memory()
            scratch = dict(zip(self._kernel.arg_names, arguments, strict=False)).get("scratch")
            for tensor in [*self._run.kept, *([] if scratch is None else [scratch])]:
                memory.add(tensor.data_ptr(), tensor.reshape(-1).view(torch.uint8).numpy())
            binary.machine.run(grid, memory, passed)

        return launched

    def _compiled(
        self, arguments: Sequence[Any], options: dict[str, Any]
    ) -> tuple[Binary, list[int | float]]:
        """Return the kernel, specialised as Triton's launcher does, and the arguments that are left."""
        constants = {name: value for name, value in options.items() if name.isupper()}
        signature: dict[str, str] = dict.fromkeys(constants, "constexpr")
        attributes, passed = {}, []
        for number, (parameter, value) in enumerate(zip(self._kernel.params, arguments, strict=False)):
            plain = value.data_ptr() if isinstance(value, torch.Tensor) else value
            if isinstance(value, torch.Tensor):
                signature[parameter.name] = _POINTERS[value.dtype]
            else:
                signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(plain, int) and not parameter.do_not_specialize:
                if plain == 1:
                    signature[parameter.name], constants[parameter.name] = "constexpr", 1
                    continue
                if plain % 16 == 0:
                    attributes[(number,)] = [["tt.divisibility", 16]]
            passed.append(plain)
        signature = {name: signature[name] for name in self._kernel.arg_names}
        source = ASTSource(self._kernel, signature, constexprs=constants, attrs=attributes)
        settings = {
            "num_warps": options.get("num_warps", 4),
            "enable_fp_fusion": self._binaries.fusion or options["enable_fp_fusion"],
        }
        built = triton.compile(source, target=_target(self._binaries.arch), options=settings)
        return _inspected(built, self._binaries.arch), passed


def _target(arch: str) -> GPUTarget:
    if arch in NVIDIA:
        return GPUTarget("cuda", int(arch[3:]), 32)
    return GPUTarget("hip", arch, 64)


def _inspected(built: Any, arch: str) -> Binary:
    """Return what the compiler says about a kernel."""
    if arch in AMD:
        text = built.asm["amdgcn"]
        found = {name: re.findall(rf"\.{name}:\s*(\d+)", text) for name in _AMD_USAGE}
        assert all(len(counts) == 1 for counts in found.values()), "the compiler does not say what it spilled"
        registers, memory, vectors, scalars = (int(counts[0]) for counts in found.values())
        return Binary(registers, memory + vectors, None, scalars)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        said = subprocess.run(
            [tool, "-res-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    usage = {name: int(count) for name, count in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said)}
    # Registers are spilled to local memory, which nothing else here uses.
    return Binary(usage["REG"], usage["STACK"] + usage["LOCAL"], Machine(built.asm["ptx"]))


@contextmanager
def running_on(arch: str, run: Run, *, fusion: bool = False) -> Iterator[Binaries]:
    """Let `launch` compile for this architecture. AMD kernels are compiled, and not run."""
    binaries = Binaries(arch, fusion)
    with ExitStack() as stack:
        for module, names in ((twoshot, KERNELS), (topk, ("encode", "mean_encode", "decode", "mean_decode"))):
            for name in names:
                kernel = Evaluated(getattr(module, name), run, binaries)
                stack.enter_context(mock.patch.object(module, name, kernel))
        yield binaries
