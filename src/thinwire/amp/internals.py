"""The private members of GradScaler, in one place. `private` reads them, see `thinwire.version`.

| name | purpose | since |
|---|---|---|
| `GradScaler._scale` | the scale as a tensor; `get_scale()` would make the host wait | 2.6 |
| `GradScaler._growth_tracker`, `_get_growth_tracker` | steps since the scale last changed | 2.6 |
| `GradScaler._per_optimizer_states` | whether it has unscaled gradients, and found infinities | 2.6 |
| `Optimizer._step_supports_amp_scaling` | whether it calls `step` even with infinities | 2.6 |

Since: the oldest inspected version that has it. All are in 2.6, 2.9, 2.13 and 2.15.
"""

from typing import Any

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

from thinwire.version import private

SUPPORTS_SCALING = "_step_supports_amp_scaling"
"""The attribute of an optimizer that a GradScaler reads at the beginning of each step."""


def scale_tensor(scaler: GradScaler) -> torch.Tensor | None:
    """Return a scaler's own scale, which its `update` changes in place; None before its first use."""
    scale: torch.Tensor | None = private(scaler, "_scale")
    return scale


def steps_since_change(scaler: GradScaler) -> int:
    """Return the number of steps since the scale last changed. The host waits for it."""
    return int(private(scaler, "_get_growth_tracker")())


def forget_steps_since_change(scaler: GradScaler) -> None:
    """Count the steps since the scale last changed from 0 again."""
    tracker = private(scaler, "_growth_tracker")
    if tracker is not None:
        tracker.fill_(0)


def progress_of(scaler: GradScaler, optimizer: Optimizer) -> dict[str, Any] | None:
    """Return a scaler's record of an optimizer's gradients since its last update, if there is one.

    Returns:
        A dictionary with `stage` and `found_inf_per_device`.
    """
    found: dict[str, Any] | None = private(scaler, "_per_optimizer_states").get(id(optimizer))
    return found


def supports_scaling(optimizer: Any) -> bool:
    """Return whether an optimizer's `step` handles scales and infinities itself, as fused ones do."""
    return bool(getattr(optimizer, SUPPORTS_SCALING, False))
