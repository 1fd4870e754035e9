"""Steps of a subset of an optimizer's parameters, for any optimizer."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from thinwire.engine.pack import real_numbers
from thinwire.errors import UnavailableError
from thinwire.step.autograd import no_step_hooks


def step_some(optimizer: Optimizer, gradients: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Step only these parameters with these gradients and the groups' current options.

    The state is the optimizer's own. Hooks belong to the user's own calls of `step()`, so none runs here.
    `.grad` is left as it was.

    Args:
        optimizer: The user's optimizer.
        gradients: Pairs of a parameter and its gradient.

    Raises:
        UnavailableError: The optimizer counts steps in its groups or attributes, and would count each bucket.
    """
    chosen = {id(parameter) for parameter, _ in gradients}
    split = [[one for one in group["params"] if id(one) in chosen] for group in optimizer.param_groups]
    given = [
        {**group, "params": params}
        for group, params in zip(optimizer.param_groups, split, strict=True)
        if params
    ]
    inner = object.__new__(type(optimizer))
    vars(inner).update(vars(optimizer), param_groups=[dict(group) for group in given])
    vars(inner).update(no_step_hooks())
    own = dict(vars(inner))
    before = [(parameter, parameter.grad) for parameter, _ in gradients]
    try:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        type(optimizer).step(inner)  # not the instance's, which an LR scheduler replaces
    finally:
        for parameter, gradient_before in before:
            parameter.grad = gradient_before
    changed = [key for key, value in vars(inner).items() if own.get(key, inner) is not value]
    changed += [
        key for one, other in zip(given, inner.param_groups, strict=True) for key in _differing(one, other)
    ]
    if changed:
        raise UnavailableError(
            f"{type(optimizer).__name__} keeps {changed[0]!r} for all of its parameters and changes it in"
            " step(), so they cannot be stepped bucket by bucket: step after backward, as"
            " ZeRO(interleaved=False) does"
        )


def _differing(group: Mapping[str, Any], stepped: Mapping[str, Any]) -> list[str]:
    """Return the options that a step has changed."""
    plain = (int, float, str, tuple, type(None))
    return [
        key
        for key, value in stepped.items()
        if key not in group
        or (value is not group[key] and not (isinstance(value, plain) and value == group[key]))
    ]


def gradients_in(
    buffer: torch.Tensor, parameters: Sequence[torch.Tensor], *, strided: bool = True
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each parameter with its gradient, a view of a flat buffer.

    Args:
        buffer: The gradients, one after another.
        parameters: Their parameters.
        strided: Whether the buffer is DDP's own, which lays gradients out with their parameters' strides, so
            that a channels_last parameter has a channels_last gradient. Programs see them in logical order.
    """
    numbers = [one.detach() if buffer.is_complex() else real_numbers(one) for one in parameters]
    found, start = [], 0
    for parameter, like in zip(parameters, numbers, strict=True):
        piece = buffer[start : start + like.numel()]
        dense = strided and torch.empty_like(like, device="meta").stride() == like.stride()
        view = (
            piece.as_strided(like.shape, like.stride(), piece.storage_offset())
            if dense
            else piece.view(like.shape)
        )
        pairs = parameter.is_complex() and not buffer.is_complex()
        found.append((parameter, torch.view_as_complex(view) if pairs else view))
        start += like.numel()
    return found
