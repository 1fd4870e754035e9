"""Memory of the device, by program: bytes a parameter beyond plain DDP.

`python -m tests.shadow.memory` prints the table of docs/accelerators.md. The shadow device cannot run
Triton's kernels. They allocate nothing, so for the memory of that path they are replaced by functions that do
nothing.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.harness import end_warm_ranks, quiet, run_ranks
from tests.shadow.device import SHADOW
from thinwire.kernels.triton import launch
from thinwire.programs import triton_coder

WIDTH = 512
LAYERS = 6
STEPS = 4
"""DDP lays out its buckets anew after the first step, and the last step is measured."""

PROGRAMS: dict[str, Any] = {
    "DDP": None,
    "Exact": thinwire.Exact(),
    "BF16": thinwire.BF16(),
    "Int8": thinwire.Int8(),
    "Int8, no feedback": thinwire.TwoShot(thinwire.Quantize(bits=8)),
    "Int4": thinwire.Int4(),
    "FP8": thinwire.FP8(),
    "Sign": thinwire.Sign(),
    "TopK": thinwire.TopK(0.01),
    "PowerSGD": thinwire.PowerSGD(rank=4, warmup=0),
    "ZeRO": thinwire.ZeRO(),
    "ZeRO, Int8": thinwire.ZeRO(thinwire.Int8()),
}

FUSED = ("Int8", "Int8, no feedback", "Int4", "FP8", "Sign")
"""The programs that are measured with Triton's kernels too."""
TRITON = ", Triton"
"""The end of their names."""


class Used(NamedTuple):
    """Bytes a parameter that are allocated on the device."""

    between: float
    """After the optimizer's step and `zero_grad`."""
    peak: float
    """At the peak of backward."""

    def beyond(self, other: "Used") -> "Used":
        """Return the difference from another measurement."""
        return Used(self.between - other.between, self.peak - other.peak)


def measured(rank: int, world_size: int, names: list[str]) -> dict[str, Used]:
    """Train with each program, and measure the last step."""
    found = {}
    with quiet():
        for name in names:
            plain = name.removesuffix(TRITON)
            with nullcontext() if name == plain else _without_kernels():
                found[name] = _used(PROGRAMS[plain])
    return found


@contextmanager
def _without_kernels() -> Iterator[None]:
    """Take the path of Triton's kernels, and launch none of them."""
    with pytest.MonkeyPatch.context() as patch:
        for kernel in ("encode", "mean_encode", "decode", "gather_exact", "mean_exact", "scatter_exact"):
            patch.setattr(launch, kernel, lambda *args: None)
        patch.setattr(triton_coder, "runs", lambda codec, width, bucket: codec.kernel is not None)
        patch.setattr(triton_coder, "_uploaded", lambda table, device: table.to(device))
        yield


def _used(program: Any) -> Used:
    memory = torch.get_device_module("shadow")
    gc.collect()
    before = memory.memory_allocated()
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    ddp = DDP(nn.Sequential(*layers).to("shadow"), bucket_cap_mb=1)
    optimizer = torch.optim.Adam(ddp.parameters(), foreach=False)
    wire = None if program is None else thinwire.attach(ddp, program, optimizer=optimizer)
    peak = 0
    for _ in range(STEPS):
        loss = ddp(torch.ones(2, WIDTH, device="shadow")).square().mean()
        memory.reset_peak_memory_stats()
        loss.backward()
        peak = memory.max_memory_allocated() - before
        optimizer.step()
        optimizer.zero_grad()
    del loss
    gc.collect()
    between = memory.memory_allocated() - before
    if wire is not None:
        wire.finalize()
    numbers = sum(parameter.numel() for parameter in ddp.parameters())
    return Used(between / numbers, peak / numbers)


def table() -> str:
    """Return the measurements of rank 0 as a table in Markdown."""
    names = [*PROGRAMS, *(f"{name}{TRITON}" for name in FUSED)]
    found = run_ranks(measured, 2, names, backend=SHADOW)[0]
    lines = [
        "| program | between steps | at the peak of backward |",
        "|---|---|---|",
        f"| DDP, with Adam | {found['DDP'].between:.1f} | {found['DDP'].peak:.1f} |",
    ]
    for name, used in found.items():
        if name != "DDP":
            more = used.beyond(found["DDP"])
            lines.append(f"| {name} | {more.between:+.1f} | {more.peak:+.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())  # noqa: T201
    end_warm_ranks()
