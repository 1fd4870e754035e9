"""How an optimizer that wraps another passes on what a GradScaler tells it."""

from typing import Any

import torch

from thinwire.averaging.scaler import unscale


def wrapped_step(wrapper: torch.optim.Optimizer, optim: Any, *args: Any, **kwargs: Any) -> Any:
    """The wrapped optimizer's step; under a GradScaler, unless it found gradients that are not finite.

    A wrapper that communicates sets `_step_supports_amp_scaling`. GradScaler then calls its `step` on every
    rank and says what it found; otherwise it would leave out the call on ranks whose gradients overflow, and
    the others would wait for them.
    """
    if "found_inf" not in wrapper.__dict__:
        return optim.step(*args, **kwargs)
    scale, found = wrapper.__dict__["grad_scale"], wrapper.__dict__["found_inf"]
    if getattr(optim, "_step_supports_amp_scaling", False):
        optim.grad_scale, optim.found_inf = scale, found
        try:
            return optim.step(*args, **kwargs)
        finally:
            del optim.grad_scale, optim.found_inf
    if scale is not None:
        unscale(wrapper, scale)
    return None if found else optim.step(*args, **kwargs)
