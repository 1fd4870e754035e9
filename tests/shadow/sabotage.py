"""Precautions of the engine, removed one at a time: the shadow device must report each as races.

`python -m tests.shadow.sabotage` prints the table of docs/accelerators.md.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.harness import end_warm_ranks, run_ranks
from tests.shadow import device
from tests.shadow.device import SHADOW
from tests.shadow.matrix import trained
from thinwire.engine.comm.pending import Issued
from thinwire.engine.futures import Result
from thinwire.engine.streams import SideStream, Writers

SET_UPS = (
    "Int8",
    "rules",
    "rules, bf16",
    "Join",
    "DiLoCo, overlap",
    "ZeRO",
    "FSDP2",
)


def _nothing(self: object, *args: object) -> None:
    pass


def _no_devices(patch: pytest.MonkeyPatch) -> None:
    init = Result.__init__

    def without(self: Result, device: torch.device, awaited: Any = None) -> None:
        init(self, torch.device("cpu"), awaited)

    patch.setattr(Result, "__init__", without)


def _no_waits(patch: pytest.MonkeyPatch) -> None:
    def complete(self: Any) -> None:
        self._ended = True

    patch.setattr(Issued, "complete", complete)


CUTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "nothing": lambda patch: None,
    "programs wait for the gradients of their bucket (`SideStream.after`)": (
        lambda patch: patch.setattr(SideStream, "after", _nothing)
    ),
    "a bucket's memory is kept for its program (`SideStream.keep`)": (
        lambda patch: patch.setattr(SideStream, "keep", _nothing)
    ),
    "the end of a step waits for the programs (`SideStream.join`)": (
        lambda patch: patch.setattr(SideStream, "join", _nothing)
    ),
    "a bucket in parts waits for all of them (`Writers.join`)": (
        lambda patch: patch.setattr(Writers, "join", _nothing)
    ),
    "futures know their device (`Result`)": _no_devices,
    "programs wait for their collectives (`Issued.complete`)": _no_waits,
}


def races(rank: int, world_size: int, cut: str, name: str) -> tuple[int, str]:
    """Train a set-up without a precaution; return the number of races, and the first of them."""
    device.reset()
    with pytest.MonkeyPatch.context() as patch:
        CUTS[cut](patch)
        trained(name, "shadow", rank)
        return device.counts().get("races", 0), next(iter(device.races()), "")


def table() -> list[list[str]]:
    rows = []
    for cut in CUTS:
        row = [cut]
        for name in SET_UPS:
            try:
                found = run_ranks(races, 2, cut, name, backend=SHADOW)
                row.append(str(sum(count for count, _ in found)))
                print(cut, name, found[0][1])
            except AssertionError as error:
                row.append(str(error).strip().splitlines()[-1][:200])
        rows.append(row)
        print(row, flush=True)
    return rows


if __name__ == "__main__":
    table()
    end_warm_ranks()
