"""Memory of the device stays in its budget."""

import torch

from tests.harness import run_ranks
from tests.shadow.device import SHADOW
from tests.shadow.memory import measured

BUDGETS = {
    "Exact": (0.1, 0.1),
    "BF16": (0.1, 2.2),
    "Int8": (4.1, 11.8),
    "Int8, no feedback": (0.1, 3.8),
    "TopK": (4.1, 10.2),
    "PowerSGD": (4.1, 9.1),
    "Int8, Triton": (4.2, 10.6),
    "Int8, no feedback, Triton": (0.2, 2.6),
}
"""Bytes a parameter beyond plain DDP: between steps, and at the peak of backward."""


def counted(rank: int, world_size: int) -> list[int]:
    memory = torch.get_device_module("shadow")
    before, found = memory.memory_allocated(), []
    kept = torch.zeros(256, device="shadow")
    memory.reset_peak_memory_stats()
    found.append(memory.max_memory_allocated() - before)
    del kept
    torch.zeros(512, device="shadow")
    found += [memory.memory_allocated() - before, memory.max_memory_allocated() - before]
    return found


def test_the_allocator_counts_current_and_peak_bytes() -> None:
    assert run_ranks(counted, 1, backend=SHADOW)[0] == [1024, 0, 2048]


def test_programs_stay_in_their_memory_budget() -> None:
    for found in run_ranks(measured, 2, ["DDP", *BUDGETS], backend=SHADOW):
        for name, (between, peak) in BUDGETS.items():
            used = found[name].beyond(found["DDP"])
            assert used.between <= between, name
            assert used.peak <= peak, name
