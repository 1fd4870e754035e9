"""The shadow device with one defect, named by PLANTED, so that the doctor's own test can see it found."""

import os
import sys
from collections.abc import Callable
from typing import Any

import torch

import thinwire  # noqa: F401 - all modules that a defect may be planted in
from tests.shadow import device
from thinwire.engine.streams import SideStream

device.load()


def _race() -> None:
    """Programs do not wait for backward's gradients."""
    SideStream.after = lambda self, event: None  # type: ignore[method-assign]


def _bits() -> None:
    """The device divides by a number as CUDA does: by multiplying with its reciprocal."""

    def divided(x: torch.Tensor, by: float) -> torch.Tensor:
        return x.div_(by) if x.device.type == "cpu" else x.mul_(torch.tensor(1.0 / by, device=x.device))

    ours = [module for name, module in sys.modules.items() if name.startswith("thinwire.")]
    users = [module for module in ours if hasattr(module, "divide_in_place")]
    assert len(users) > 2, "nothing that divides has been imported"
    for module in users:
        module.divide_in_place = divided  # type: ignore[attr-defined]


def _read() -> None:
    """Every bucket reads a value on the host."""
    marked = SideStream.mark

    def mark(self: SideStream) -> Any:
        if self.separate:
            torch.ones((), device=self.device).item()
        return marked(self)

    SideStream.mark = mark  # type: ignore[method-assign]


def _stuck() -> None:
    """The network swallows every collective, and no time limit of thinwire's sees it."""
    from thinwire.engine.comm.pending import Issued

    device.hang("thinwire", after=4)
    Issued.landed = lambda self: True  # type: ignore[method-assign]


_DEFECTS: dict[str, Callable[[], None]] = {"race": _race, "bits": _bits, "read": _read, "stuck": _stuck}
if planted := os.environ.get("PLANTED"):
    _DEFECTS[planted]()
