"""The step of an optimizer that wraps another and passes it a GradScaler's scale and overflow flag."""

from typing import Any

import torch

from thinwire.amp.internals import supports_scaling
from thinwire.amp.skipped_steps import unscale


def wrapped_step(wrapper: torch.optim.Optimizer, optim: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the wrapped optimizer's step, unless a GradScaler found non-finite gradients.

    A wrapper that communicates sets `_step_supports_amp_scaling`. GradScaler then calls its `step` on every
    rank, with `found_inf` set. Otherwise it would skip the call on ranks whose gradients overflow, and the
    other ranks would wait for them.

    Args:
        wrapper: The wrapping optimizer, on which GradScaler sets `grad_scale` and `found_inf`.
        optim: The wrapped optimizer.
        *args: Passed to its `step`.
        **kwargs: Passed to its `step`.

    Returns:
        The result of its `step`; None if it was skipped.
    """
    if "found_inf" not in wrapper.__dict__:
        return optim.step(*args, **kwargs)
    scale, found = wrapper.__dict__["grad_scale"], wrapper.__dict__["found_inf"]
    if supports_scaling(optim):
        optim.grad_scale, optim.found_inf = scale, found
        try:
            return optim.step(*args, **kwargs)
        finally:
            del optim.grad_scale, optim.found_inf
    if scale is not None:
        unscale(wrapper, scale)
    return None if found else optim.step(*args, **kwargs)
